#include "simulate/collective_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/json_value.h"
#include "base/text.h"

namespace lockstep::simulate {
namespace {

constexpr double kMostUs = 1e15;

constexpr std::array kAlgorithms = {Algorithm::kAuto, Algorithm::kRing, Algorithm::kTree, Algorithm::kTwoLevel,
                                    Algorithm::kDirect};

double levels(int leaves) { return std::ceil(std::log2(static_cast<double>(leaves))); }

/// 2 (k - 1) / k: what each of k sends of the bytes that all of them sum.
double twice_share(int k) { return 2.0 * (k - 1) / k; }

}  // namespace

double Fabric::rate_between(int nodes) const {
  const bool above = nodes_per_switch > 0 && nodes > nodes_per_switch;
  return above ? between.bytes_per_s / oversubscription : between.bytes_per_s;
}

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto: return "auto";
    case Algorithm::kRing: return "ring";
    case Algorithm::kTree: return "tree";
    case Algorithm::kTwoLevel: return "two-level";
    case Algorithm::kDirect: return "direct";
  }
  return "";
}

std::span<const Algorithm> algorithms() { return kAlgorithms; }

double MeasuredTimes::between(const std::vector<double>& values, double n) const {
  if (n <= bytes.front()) return values.front();
  if (n >= bytes.back()) return values.back() * n / bytes.back();
  const auto i = static_cast<std::size_t>(std::ranges::upper_bound(bytes, n) - bytes.begin());
  const double share = (n - bytes[i - 1]) / (bytes[i] - bytes[i - 1]);
  return values[i - 1] + share * (values[i] - values[i - 1]);
}

std::vector<MeasuredTimes> parse_measured(std::string_view text, const std::string& name, int nodes) {
  constexpr const char* kRemedy = "give what lockstep bench allreduce --json prints";
  struct Time {
    double seconds = 0;
    std::optional<double> cpu_seconds;
  };
  std::map<int, std::map<double, Time>> times;  // by ranks and bytes
  std::size_t number = 0;
  for (const auto& line : split(text, '\n')) {
    ++number;
    if (trim(line).empty()) continue;
    const JsonMembers one(line, /*deepest=*/2, fmt::format("{}, line {}", name, number), kRemedy);
    if (!one.has("collective", "allreduce")) one.refuse("this is no line of an allreduce");
    const auto ranks = static_cast<int>(one.whole("world_size", 2, 1 << 20));
    Time& time = times[ranks][static_cast<double>(one.whole("bytes", 1, std::uint64_t{1} << 40))];
    time.seconds = 1e-6 * one.positive("time_us");
    if (one.has("cpu_us")) time.cpu_seconds = 1e-6 * one.number("cpu_us", 0, kMostUs);
  }
  if (times.empty()) throw IoError(fmt::format("{}, line 1: there is no time", name), kRemedy);
  std::vector<MeasuredTimes> all;
  for (const auto& [ranks, by_bytes] : times) {
    MeasuredTimes& one = all.emplace_back(MeasuredTimes{.ranks = ranks, .nodes = nodes, .bytes = {}, .seconds = {}});
    for (const auto& [bytes, time] : by_bytes) {
      one.bytes.push_back(bytes);
      one.seconds.push_back(time.seconds);
      if (time.cpu_seconds) one.cpu_seconds.push_back(*time.cpu_seconds);
    }
    if (one.cpu_seconds.size() < one.bytes.size()) one.cpu_seconds.clear();
  }
  return all;
}

CollectiveCosts::CollectiveCosts(const Fabric& fabric, int nodes, Algorithm algorithm,
                                 std::span<const MeasuredTimes> measured)
    : fabric_(fabric), nodes_(nodes), algorithm_(algorithm) {
  for (const auto& times : measured)
    if (times.ranks == ranks() && times.nodes == nodes) measured_ = &times;
}

double CollectiveCosts::seconds_of(Algorithm algorithm, double bytes) const {
  const int g = fabric_.ranks_per_node, n = nodes_, p = ranks();
  const Link inside = fabric_.inside, between = {fabric_.rate_between(n), fabric_.between.latency_s};
  const double slowest = n == 1   ? inside.bytes_per_s
                         : g == 1 ? between.bytes_per_s
                                  : std::min(inside.bytes_per_s, between.bytes_per_s);
  const double within = twice_share(g) * bytes / inside.bytes_per_s;
  const double across = n == 1 ? 0 : twice_share(n) * bytes / between.bytes_per_s;
  switch (algorithm) {
    case Algorithm::kAuto: return seconds_of(fastest(bytes), bytes);
    case Algorithm::kRing:
      return 2 * (p - 1) * (n == 1 ? inside.latency_s : between.latency_s) + twice_share(p) * bytes / slowest;
    case Algorithm::kTree:
      return (n == 1 ? 2 * levels(g) * inside.latency_s
                     : 2 * (levels(n) * between.latency_s + (g - 1) * inside.latency_s)) +
             2 * bytes / slowest;
    case Algorithm::kTwoLevel:
      return 2 * (g - 1) * inside.latency_s + within + 2 * (n - 1) * between.latency_s + across;
    case Algorithm::kDirect:
      return (g > 1 ? 2 * inside.latency_s : 0) + (n > 1 ? 2 * between.latency_s + 2 * (n - 1) * kMessageSeconds : 0) +
             std::max(within, across);
  }
  return 0;
}

Algorithm CollectiveCosts::fastest(double bytes) const {
  // What NCCL chooses among; "direct" is for those who say so.
  Algorithm best = Algorithm::kRing;
  for (const Algorithm each : {Algorithm::kTree, Algorithm::kTwoLevel})
    if (seconds_of(each, bytes) < seconds_of(best, bytes)) best = each;
  return best;
}

Cost CollectiveCosts::allreduce(double bytes) const {
  if (ranks() == 1) return {};
  const double seconds = measured_ != nullptr ? measured_->at(bytes) : seconds_of(algorithm_, bytes);
  if (fabric_.thread_bytes_per_s <= 0) return {seconds, 0};
  // Inside a node the thread is what moves the bytes, all the time; between nodes the kernel and the wire do their
  // part.
  if (nodes_ == 1) return {seconds, seconds};
  const auto cpu = measured_ != nullptr ? measured_->cpu_at(bytes) : std::nullopt;
  if (cpu) return {seconds, std::min(seconds, fabric_.threads_per_core * *cpu)};
  const double busy =
      fabric_.threads_per_core *
      (twice_share(nodes_) * bytes / fabric_.ranks_per_node / fabric_.thread_bytes_per_s +
       (fabric_.ranks_per_node > 1 ? twice_share(fabric_.ranks_per_node) * bytes / fabric_.inside.bytes_per_s : 0));
  return {std::max(seconds, busy), std::min(std::max(seconds, busy), busy)};
}

std::string CollectiveCosts::source(double bytes) const {
  if (measured_ != nullptr) return "measured";
  return name_of(algorithm_ == Algorithm::kAuto ? fastest(bytes) : algorithm_);
}

}  // namespace lockstep::simulate
