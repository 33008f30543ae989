// How long a collective takes, from its size, the links and the algorithm; or from what was measured.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::simulate {

/// A message of n bytes takes latency_s + n / bytes_per_s (Hockney's model: R. W. Hockney, "The communication challenge
/// for MPP", Parallel Computing 20 (1994)).
struct Link {
  double bytes_per_s = 0;  // one way
  double latency_s = 0;
};

/// Nodes of equal kind, with the same number of ranks each.
struct Fabric {
  int ranks_per_node = 1;
  Link inside{.bytes_per_s = 10e9, .latency_s = 1e-6};      // of each rank to the others of its node
  Link between{.bytes_per_s = 1.25e9, .latency_s = 20e-6};  // of each node to the others, all of its cards together
  int nodes_per_switch = 0;                                 // 0: one switch has all nodes
  double oversubscription = 1;  // of the links above those switches: their nodes' rates together ÷ the uplink's rate
  /// Of a rank that moves bytes on its own thread: bytes that it sends, receives and adds per second at most. 0: no
  /// limit (a GPU, or a network card that does it).
  double thread_bytes_per_s = 0;
  /// Threads that the ranks compute with, of all that share a machine, for each of its cores; 1 where each has a core
  /// of its own. What such a thread does takes so many times as long.
  double threads_per_core = 1;

  /// Of the links that `nodes` nodes use.
  double rate_between(int nodes) const;
};

/// Note [Costs of allreduce]
/// n bytes, N nodes of g ranks, P = N g; α, B inside a node; α', B' between nodes, of a node.
///   ring        2 (P - 1) steps around all ranks, n / P each: 2 (P - 1) α* + 2 (P - 1) / P · n / B*, of the slowest
///               link that it crosses (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
///               workstations", J. Parallel Distrib. Comput. 69 (2009)).
///   tree        two binary trees of nodes, each with half of the bytes, in pipelined chunks, and a chain inside:
///               2 (log2 N α' + (g - 1) α) + 2 n / B* (P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full
///               bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009)). One node: log2 g levels.
///   two-level   reduce-scatter inside, rings of the ranks with the same index between nodes, all-gather inside, one
///               after the other: 2 (g - 1) α + 2 (g - 1) / g · n / B + 2 (N - 1) α' + 2 (N - 1) / N · n / B'.
///   direct      lockstep's own on CPUs (comm: Note [Two levels]): both phases between all pairs at the same time, in
///               chunks that follow each other, so that the slower of inside and between counts:
///               2 α + 2 α' + max(2 (g - 1) / g · n / B, 2 (N - 1) / N · n / B'). A message to each other node costs
///               its thread `kMessageSeconds` as well.
/// Where nodes lie under several switches, B' is divided by the oversubscription. A reduce-scatter and an all-gather
/// are half of an allreduce each.
enum class Algorithm { kAuto, kRing, kTree, kTwoLevel, kDirect };
inline constexpr double kMessageSeconds = 2e-6;

/// "auto", "ring", …; all of them in their order.
const char* name_of(Algorithm algorithm);
std::span<const Algorithm> algorithms();

/// What a collective takes. While it is under way a rank's thread is busy for `thread_s` of its `seconds`, if it is the
/// thread that moves the bytes.
struct Cost {
  double seconds = 0, thread_s = 0;
};

/// Times of one collective that were measured (`lockstep bench allreduce --json`).
struct MeasuredTimes {
  int ranks = 0, nodes = 1;
  std::vector<double> bytes, seconds;    // ascending bytes
  std::vector<double> cpu_seconds = {};  // of them, those in which a rank's threads ran; none: it was not measured

  /// Linear between sizes; beyond them as the nearest size's rate, below as its time.
  double at(double n) const { return between(seconds, n); }
  std::optional<double> cpu_at(double n) const {
    return cpu_seconds.empty() ? std::optional<double>() : between(cpu_seconds, n);
  }

 private:
  double between(const std::vector<double>& values, double n) const;
};
/// One for each number of ranks in the lines of such output. `nodes` is that of all lines. Throws IoError for other
/// content.
std::vector<MeasuredTimes> parse_measured(std::string_view text, const std::string& name, int nodes);

/// Costs on a fabric of `nodes` nodes.
class CollectiveCosts {
 public:
  /// `measured` counts where it has the fabric's ranks and nodes, whatever the algorithm; it outlives this.
  CollectiveCosts(const Fabric& fabric, int nodes, Algorithm algorithm, std::span<const MeasuredTimes> measured);

  Cost allreduce(double bytes) const;
  Cost reduce_scatter(double bytes) const { return half(allreduce(bytes)); }
  Cost all_gather(double bytes) const { return half(allreduce(bytes)); }
  int ranks() const { return nodes_ * fabric_.ranks_per_node; }
  /// What allreduce() takes its time from: the algorithm (kAuto: the fastest one's for so many bytes), or "measured".
  std::string source(double bytes) const;

 private:
  static Cost half(const Cost& cost) { return {cost.seconds / 2, cost.thread_s / 2}; }
  double seconds_of(Algorithm algorithm, double bytes) const;
  Algorithm fastest(double bytes) const;

  Fabric fabric_;
  int nodes_;
  Algorithm algorithm_;
  const MeasuredTimes* measured_ = nullptr;
};

}  // namespace lockstep::simulate
