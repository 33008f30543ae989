// How fast the ranks sum their memory: time and bandwidth by size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bench/timings.h"
#include "lockstep/base/dtype.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/op.h"

namespace lockstep::bench {

struct AllReduceOptions {
  std::int64_t min_bytes = 8;
  std::int64_t max_bytes = std::int64_t{128} << 20;
  int factor = 2;      // from one size to the next
  int iterations = 0;  // timed rounds per size; 0: as many as take a quarter of a second, 5 to 1000
  DType dtype = DType::kF32;
  comm::ReduceOp op = comm::ReduceOp::kSum;
  bool check = true;
  Format format = Format::kTable;
  comm::GroupOptions group;
};

/// One operation's figures. Bandwidths as nccl-tests define them (doc/PERFORMANCE.md there), in 10⁹ bytes/s:
/// algbw = bytes / time; busbw = algbw · 2(n − 1)/n, which for any n can be compared with what the hardware moves.
struct Speed {
  double time_us = 0;
  double algbw_gbs = 0, busbw_gbs = 0;
  std::int64_t wrong = 0;  // elements, of all ranks; -1: not checked
};
Speed speed_of(double time_us, std::int64_t bytes, int world_size);

struct AllReduceResult {
  std::int64_t bytes = 0, count = 0;  // of one rank
  Speed out_of_place;                 // from another buffer of the rank: the copy into the arena, and the sum there
  Speed in_place;
};

/// Sizes from `min_bytes` to `max_bytes`, each `factor` times the one before, in whole elements, none twice.
std::vector<std::int64_t> sizes_of(const AllReduceOptions& options);

/// One line of a report: a result as JSON, CSV or a row of the table.
std::string line_of(const AllReduceResult& result, const AllReduceOptions& options, const comm::ProcessGroup& group);

/// Collective; rank 0 prints. A round is a barrier and then one operation, or for small sizes several; its time is the
/// slowest rank's, the result the median over rounds. Returns the exit code; throws Error when a sum was wrong.
/// `refusal`: as for trainer::train.
int bench_allreduce(const AllReduceOptions& options, const std::optional<UsageError>& refusal);

}  // namespace lockstep::bench
