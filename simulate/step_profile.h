// What one rank's training step is made of, as it was measured: what simulations start from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"

namespace lockstep::simulate {

/// Of steps without communication (`lockstep bench step MODEL --profile-out FILE`). Times in ms from the beginning of a
/// step, medians over steps.
struct StepProfile {
  struct Gradient {
    ddp::SlotSpec slot;
    double ready_ms = 0;  // it was complete
  };

  std::string model = {}, precision = {}, device = {}, version = {};
  std::int64_t batch = 0;                // samples per rank
  int threads = 1;                       // per rank
  int cores = 0;                         // that they may run on together; 0: not known
  int ranks = 1;                         // that computed beside each other meanwhile; all times are the slowest one's
  std::vector<Gradient> gradients = {};  // in the order in which the model registers them
  double backward_ms = 0;                // backward was over
  double update_ms = 0;                  // of all parameters, after that
  std::vector<double> step_ms = {};      // of every measured step, of the slowest rank: what differs from step to step
  double copy_bytes_per_s = 0;           // bytes read and written per second, when large memory is copied on the device
  double flops_per_step = 0;             // bench/flops.h
  std::uint64_t memory_bytes = 0;        // most that the rank took
  std::size_t arena_alignment = 64;      // BucketLimits::slot_alignment

  std::uint64_t gradient_bytes() const;
  /// As if a step of the median's length took `step_ms`: of a faster or slower device, whose layers have the same
  /// shares.
  void scale_to(double step_ms);
  /// Gradients as they became ready: the order in which buckets take them from the second step on.
  std::vector<std::size_t> ready_order() const;
};

/// One JSON object.
std::string text_of(const StepProfile& profile);
/// `name` is for messages. Throws IoError for what is no such object, or has impossible values.
StepProfile parse_profile(std::string_view text, const std::string& name);
/// Throws IoError for a file that cannot be read.
StepProfile read_profile(const std::string& path);

}  // namespace lockstep::simulate
