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

double MeasuredTimes::at(double n) const {
  if (n <= bytes.front()) return seconds.front();
  if (n >= bytes.back()) return seconds.back() * n / bytes.back();
  const auto i = static_cast<std::size_t>(std::ranges::upper_bound(bytes, n) - bytes.begin());
  const double share = (n - bytes[i - 1]) / (bytes[i] - bytes[i - 1]);
  return seconds[i - 1] + share * (seconds[i] - seconds[i - 1]);
}

std::vector<MeasuredTimes> parse_measured(std::string_view text, const std::string& name, int nodes) {
  const auto refuse = [&](std::size_t line, const std::string& problem) {
    throw IoError(fmt::format("{}, line {}: {}", name, line, problem),
                  "give what lockstep bench allreduce --json prints");
  };
  std::map<int, std::map<double, double>> times;  // by ranks: seconds by bytes
  std::size_t number = 0;
  for (const auto& line : split(text, '\n')) {
    ++number;
    if (trim(line).empty()) continue;
    nlohmann::json json;
    try {
      json = parse_json(line, 2);
    } catch (const JsonError& error) {
      refuse(number, error.what());
    }
    if (!json.is_object() || json.value("collective", nlohmann::json()) != "allreduce")
      refuse(number, "this is no line of an allreduce");
    const auto bytes = json.contains("bytes") ? whole_number(json["bytes"], std::uint64_t{1} << 40) : std::nullopt;
    const auto ranks = json.contains("world_size") ? whole_number(json["world_size"], 1 << 20) : std::nullopt;
    if (!bytes || !ranks || *bytes == 0 || *ranks < 2 || !json.contains("time_us") || !json["time_us"].is_number() ||
        !(json["time_us"].get<double>() > 0))
      refuse(number, "bytes, time_us or world_size of two ranks or more is missing");
    times[static_cast<int>(*ranks)][static_cast<double>(*bytes)] = 1e-6 * json["time_us"].get<double>();
  }
  if (times.empty()) refuse(1, "there is no time");
  std::vector<MeasuredTimes> all;
  for (const auto& [ranks, by_bytes] : times) {
    MeasuredTimes& one = all.emplace_back(MeasuredTimes{.ranks = ranks, .nodes = nodes, .bytes = {}, .seconds = {}});
    for (const auto& [bytes, seconds] : by_bytes) {
      one.bytes.push_back(bytes);
      one.seconds.push_back(seconds);
    }
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
  const double busy =
      twice_share(nodes_) * bytes / fabric_.ranks_per_node / fabric_.thread_bytes_per_s +
      (fabric_.ranks_per_node > 1 ? twice_share(fabric_.ranks_per_node) * bytes / fabric_.inside.bytes_per_s : 0);
  return {std::max(seconds, busy), std::min(std::max(seconds, busy), busy)};
}

std::string CollectiveCosts::source(double bytes) const {
  if (measured_ != nullptr) return "measured";
  return name_of(algorithm_ == Algorithm::kAuto ? fastest(bytes) : algorithm_);
}

}  // namespace lockstep::simulate
