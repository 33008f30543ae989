// How fast the ranks do what they do together: time and bandwidth of each collective by size, beside other libraries'.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "bench/timings.h"
#include "lockstep/base/dtype.h"
#include "lockstep/comm/op.h"
#include "lockstep/session/session.h"

namespace lockstep::bench {

enum class Collective : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kAllToAll,
  kSendRecv,
  kBarrier
};

/// Who sends to whom.
enum class Pattern : std::uint8_t {
  kRing,          // each rank to the next one, all at a time
  kLatency,       // one message there and one back; half of the time of both
  kBandwidth,     // many messages one way, then one small one back
  kBidirectional  // many messages both ways
};

/// What the command line and the benchmark have to know of a collective.
struct CollectiveFamily {
  Collective collective = Collective::kAllReduce;
  const char* name = "";   // of the subcommand
  const char* about = "";  // "Measures …"
  bool reduces = false;
  bool has_root = false;
  bool in_place = true;   // there is a form that is
  bool in_parts = false;  // the buffer is a part for each rank
  /// busbw / algbw among n ranks, as nccl-tests define them (doc/PERFORMANCE.md there): what the slowest link of the
  /// best algorithm moves, so that any n can be compared with the hardware.
  double (*bus_factor)(double n) = nullptr;
};
std::span<const CollectiveFamily> collective_families();
const CollectiveFamily& family_of(Collective collective);

/// Messages at a time of Pattern::kBandwidth and kBidirectional: 64, as OSU's benchmarks have, of 64 MiB together at
/// most.
inline int window_of(std::size_t bytes) {
  return static_cast<int>(std::clamp<std::size_t>((std::size_t{64} << 20) / std::max<std::size_t>(bytes, 1), 1, 64));
}

/// With whom a rank exchanges messages. In a ring it sends to the next rank and receives from the one before; else rank
/// r and rank r + n / 2 form one pair.
struct Partners {
  int to = 0, from = 0;
  bool first = true;  // of a pair, the lower rank: it sends where one way is measured
};
/// Nothing for the last of an odd number of ranks, where pairs are formed: it waits.
inline std::optional<Partners> partners_of(Pattern pattern, int rank, int ranks) {
  if (pattern == Pattern::kRing) return Partners{.to = (rank + 1) % ranks, .from = (rank + ranks - 1) % ranks};
  const int half = ranks / 2, peer = rank < half ? rank + half : rank - half;
  if (rank >= 2 * half) return std::nullopt;
  return Partners{.to = peer, .from = peer, .first = rank < half};
}

struct CollectiveOptions {
  Collective collective = Collective::kAllReduce;
  std::int64_t min_bytes = 8;
  std::int64_t max_bytes = std::int64_t{128} << 20;
  int factor = 2;         // from one size to the next
  int iterations = 0;     // timed rounds per size; 0: as many as `seconds` allow, 5 to 1000
  double seconds = 0.25;  // per size and column
  int in_flight = 1;      // operations that are issued before the first is waited for
  DType dtype = DType::kF32;
  comm::ReduceOp op = comm::ReduceOp::kSum;
  int root = 0;
  Pattern pattern = Pattern::kRing;
  bool own_memory = false;  // the caller's, which is staged, instead of an arena
  bool check = true;
  std::vector<std::string> compare;  // names of rivals
  bool measure_peak = false;         // of copies, too
  Format format = Format::kTable;
  session::SessionOptions session;
};

/// One operation's figures. algbw = bytes / time, busbw = algbw · bus_factor, in 10⁹ bytes/s.
struct Speed {
  double time_us = 0;  // the median of rounds
  double min_us = 0, p99_us = 0;
  double algbw_gbs = 0, busbw_gbs = 0;
  double cpu_us = 0;        // that a rank's threads ran meanwhile, waits that poll among them; the rank's with most
  std::int64_t wrong = -1;  // elements, of all ranks; -1: not checked
};
/// `rounds`: of each, its microseconds; not empty.
Speed speed_of(const std::vector<double>& rounds, double bytes, double bus_factor);

struct CollectiveResult {
  std::int64_t bytes = 0;  // of the larger one of a rank's buffers, as nccl-tests count
  std::int64_t count = 0;  // elements of it, or of a rank's part of it
  std::optional<Speed>
      out_of_place;  // from another buffer of the rank: in an arena, the copy into it, and the sum there
  std::optional<Speed> in_place;
  std::vector<Speed> rivals;  // in the order of CollectiveOptions::compare
  /// What JSON calls time_us: in place where there is that.
  const Speed& speed() const { return in_place ? *in_place : *out_of_place; }
};

/// Sizes from `min_bytes` to `max_bytes`, each `factor` times the one before, in whole elements (and of as many for
/// each of `ranks`, where a collective has parts), none twice; {0} of a barrier.
std::vector<std::int64_t> sizes_of(const CollectiveOptions& options, int ranks);

/// What comes before the results, and one of them, as JSON, CSV or rows of the table.
std::string heading_of(const CollectiveOptions& options, int ranks, const std::string& backend);
std::string line_of(const CollectiveResult& result, const CollectiveOptions& options, int ranks,
                    const std::string& backend);
/// What comes after them: of a table, the mean bus bandwidth and the number of wrong elements, as nccl-tests have it;
/// and the best one beside the rate of copies in the devices' memory, if that was measured.
std::string summary_of(const std::vector<CollectiveResult>& results, const CollectiveOptions& options,
                       std::optional<double> copy_bytes_per_s = {});

/// Collective; rank 0 prints. A round is a barrier and then one operation, or for small sizes several; its time is the
/// slowest rank's. Columns of a size alternate, round by round. Returns the exit code; throws Error when a result was
/// wrong. `refusal`: as for trainer::train.
int bench_collective(const CollectiveOptions& options, const std::optional<UsageError>& refusal);

}  // namespace lockstep::bench
