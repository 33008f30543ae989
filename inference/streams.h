// Independent streams of inference over one copy of a model's weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
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
  int streams = 1;
  std::uint64_t jobs = 0;
  std::int64_t warmup = 0;  // runs of job 0 by each stream, which nobody sees or counts
  const char* doing = "";   // for stop requests: "classifying"
};

struct StreamsResult {
  Tally tally;
  double wall_s = 0;  // from when all streams were ready
};

/// Runs all jobs on so many threads and prints what comes of them to stdout, in their order, as it comes. Each thread
/// has a stream of `backend` (on the CPU with one compute thread, and bound to its share of the cores that
/// the calling thread may use) and a worker of its own, which `make_worker` makes on that thread. Few jobs more than
/// there are streams are under way at a time. Throws what a worker has thrown, IoError where stdout takes no more, and
/// InterruptedError where a stop has been asked for; all threads have ended by then.
StreamsResult run_streams(nn::Backend& backend, const StreamsOptions& options,
                          const std::function<std::unique_ptr<InferWorker>(nn::Backend&)>& make_worker);

}  // namespace lockstep::inference
