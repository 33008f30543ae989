// Independent streams of inference over one copy of a model's weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "inference/ordered_queue.h"
#include "inference/report.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::inference {

/// What a stream does with its inputs. Made and used by the stream's own thread.
class InferWorker {
 public:
  virtual ~InferWorker() = default;

  /// Where results go. False: nobody wants more.
  using Put = std::function<bool(std::string_view)>;
  /// Computes input `job` and puts what is to be printed of it; adds to `tally`.
  virtual void run(std::uint64_t job, const Put& put, Tally& tally) = 0;
};

struct StreamsOptions {
  int streams = 1;  // shared out evenly: the first ones are on the first device, and so on
  std::uint64_t jobs = 0;
  std::int64_t warmup = 0;  // runs of job 0 by each stream, which nobody sees or counts
  const char* doing = "";   // for stop requests: "classifying"
  /// Takes results, on the calling thread, as they come. Throws where it cannot.
  std::function<void(std::string_view)> print;
};

struct StreamsResult {
  Tally tally;
  double wall_s = 0;  // from when all streams were ready
};

/// Makes what works with a stream on device `device`, a place among the devices.
using MakeWorker = std::function<std::unique_ptr<InferWorker>(nn::Backend& stream, std::size_t device)>;

/// Runs all jobs on so many threads and prints what comes of them, in their order, as it comes. Each thread
/// has a stream of one of `devices` (on the CPU with one compute thread, and bound to its share of the cores that
/// the calling thread may use) and a worker of its own, which `make_worker` makes on that thread. Few jobs more than
/// there are streams are under way at a time. Throws a worker's error, print()'s, and
/// InterruptedError after a stop request; all threads have ended by then.
StreamsResult run_streams(std::span<nn::Backend* const> devices, const StreamsOptions& options,
                          const MakeWorker& make_worker);

/// The device of stream `stream` of `streams`: as many streams for each device as there can be, at most one more for
/// some; with fewer streams than devices the last devices have none.
std::size_t device_of_stream(int stream, int streams, std::size_t devices);

}  // namespace lockstep::inference
