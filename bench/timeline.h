// One training step, bucket by bucket, on one clock.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::bench {

/// A bucket's gradients and their allreduce, in ms from the beginning of the step. A group of one has no allreduce: its
/// start and end are `ready_ms`.
struct BucketSpan {
  std::size_t bytes = 0;
  double ready_ms = 0;  // its last gradient was there
  double start_ms = 0;  // of the allreduce, which comes after those of the earlier buckets
  double end_ms = 0;
};

struct Timeline {
  std::string clock;  // "device": the GPU's, from events in its streams; "host"
  std::vector<BucketSpan> buckets;
  double last_ready_ms = 0;  // the last gradient of all was there
  double end_ms = 0;         // all parameters were moved

  /// All allreduces together.
  double communication_ms() const;
  /// What of that lay before the last gradient: backward hid it.
  double hidden_ms() const;
};

/// One line a bucket and two for the step.
std::string describe(const Timeline& timeline);

/// Of a step on the CPU, whose forward began at `begin`, and which ended at `end`.
Timeline timeline_of(const ddp::StepTimeline& step, Clock::time_point begin, Clock::time_point end);

/// Puts marks into the stream of a GPU's computation while a step is given to it, and has the group time its
/// operations. Between begin() and read() one step, which is not captured. Backend and group must outlive it.
class DeviceTimer {
 public:
  virtual ~DeviceTimer() = default;
  virtual void begin() = 0;
  /// The gradients of a bucket are complete after what was given so far; its allreduce is issued next.
  virtual void bucket_ready(std::size_t bytes) = 0;
  virtual void end() = 0;
  /// Waits for the step.
  virtual Timeline read() = 0;
};

/// `gradients` has its arenas on `backend`'s GPU. Throws DeviceError in a build without CUDA.
std::unique_ptr<DeviceTimer> make_device_timer(nn::Backend& backend, comm::ProcessGroup& gradients);

}  // namespace lockstep::bench
