#include "simulate/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"

namespace lockstep::simulate {
namespace {

double rounded(double value) { return std::round(value * 1e4) / 1e4; }

bool is_cpu(const StepProfile& profile) { return !profile.device.starts_with("cuda"); }

/// What was not given is filled by the kind of device.
void complete(SimulateOptions& o, const std::vector<StepProfile>& profiles) {
  Fabric& fabric = o.cluster.fabric;
  const StepProfile& first = profiles.front();
  for (const auto& other : profiles)
    if (other.model != first.model || other.batch != first.batch || other.precision != first.precision ||
        other.gradients.size() != first.gradients.size() || is_cpu(other) != is_cpu(first))
      throw UsageError("the profiles are of different models, batches, precisions or kinds of devices",
                       "measure them with the same settings");
  const bool cpu = is_cpu(first);
  if (!o.has_local_link && cpu && first.copy_bytes_per_s > 0)
    fabric.inside = {.bytes_per_s = first.copy_bytes_per_s / 2, .latency_s = 1e-6};
  fabric.thread_bytes_per_s = o.thread_gbit.value_or(cpu ? kThreadGbit : 0) * 1e9 / 8;
  if (!o.has_algorithm) o.cluster.algorithm = cpu ? Algorithm::kDirect : Algorithm::kAuto;
  if (o.job.zero > 0 && o.job.comm_hook != "none")
    throw UsageError("--comm-hook with --zero, which reduce-scatters gradients", "leave one of them out");
  if (o.cluster.fabric.oversubscription > 1 && o.cluster.fabric.nodes_per_switch == 0)
    throw UsageError("--oversubscription without --switch-nodes", "say how many nodes one switch has");
  if (o.failures.node_mtbf_s > 0 && o.failures.checkpoint_s <= 0)
    throw UsageError("--node-mtbf-hours without --checkpoint-seconds", "say how long a checkpoint takes");
  if (o.failures.node_mtbf_s <= 0 && (o.failures.restart_s > 0 || o.checkpoint_interval_s > 0))
    throw UsageError("--restart-seconds and --checkpoint-minutes need --node-mtbf-hours", "leave them out, or give it");
  if (o.price > 0 && o.samples <= 0) throw UsageError("--price without --samples", "say how long the training is");
  for (const auto& name : o.collectives) {
    const auto colon = name.rfind(':');
    std::string path = name;
    double nodes = 1;
    if (colon != std::string::npos && colon + 1 < name.size()) {
      if (const auto number = parse_double(name.substr(colon + 1)); number && *number >= 1 && *number <= 1 << 20) {
        path = name.substr(0, colon);
        nodes = *number;
      }
    }
    for (auto& times : parse_measured(MappedFile(path).text(), path, static_cast<int>(nodes)))
      o.cluster.measured.push_back(std::move(times));
  }
  constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;
  const bool knows_inside = o.has_local_link || (cpu && first.copy_bytes_per_s > 0);
  for (const int n : o.nodes) {
    const std::int64_t ranks = std::int64_t{n} * fabric.ranks_per_node;
    if (ranks > kMostRanks)
      throw UsageError(
          fmt::format("{} nodes of {} ranks, where up to {} ranks are possible", n, fabric.ranks_per_node, kMostRanks),
          "lower --nodes or --ranks-per-node");
    if (std::ranges::any_of(o.cluster.measured, [&](const auto& m) { return m.nodes == n && m.ranks == ranks; }))
      continue;
    if (n > 1 && !o.has_link)
      throw UsageError(fmt::format("the link between {} nodes is neither described nor measured", n),
                       "give --link GBIT,USEC, such as 100,5");
    if (fabric.ranks_per_node > 1 && !knows_inside)
      throw UsageError("the link inside a node is neither described nor measured",
                       "give --local-link GBIT,USEC: 3600,3 is one direction of NVLink 4");
  }
}

std::vector<StepProfile> all_profiles(const SimulateOptions& o, std::vector<StepProfile> profiles) {
  if (profiles.empty()) profiles.push_back(read_profile(o.subject));
  for (const auto& path : o.more_profiles) profiles.push_back(read_profile(path));
  if (o.step_ms > 0)
    for (auto& profile : profiles) profile.scale_to(o.step_ms);
  return profiles;
}

std::string heading(const SimulateOptions& o, const StepProfile& p) {
  return fmt::format("{}, {} samples per rank, {}, as measured on {} ({} thread{}){}\n{}\n", p.model,
                     p.batch * o.job.accumulate, p.precision, p.device, p.threads, p.threads == 1 ? "" : "s",
                     o.step_ms > 0 ? fmt::format(", scaled to a step of {:g} ms", o.step_ms) : "", describe(o));
}

/// One line where computation of several ranks of a node was not measured.
std::string warning(const SimulateOptions& o, const StepProfile& p) {
  const int ranks = o.cluster.fabric.ranks_per_node;
  if (!is_cpu(p) || p.ranks == ranks) return "";
  return fmt::format(
      "computation was measured with {} rank{} on a host, and {} share memory and caches here: give --profiles FILE, "
      "of "
      "lockstep launch -n {} -- lockstep bench step {} --profile-out FILE\n",
      p.ranks, p.ranks == 1 ? "" : "s", ranks, ranks, p.model);
}

JsonObject json_of(const Prediction& p) {
  return {{"nodes", p.nodes},
          {"ranks", p.ranks},
          {"step_ms", rounded(p.step_ms)},
          {"step_ms_p10", rounded(p.step_ms_p10)},
          {"step_ms_p90", rounded(p.step_ms_p90)},
          {"compute_ms", rounded(p.compute_ms)},
          {"communication_ms", rounded(p.communication_ms)},
          {"exposed_comm_ms", rounded(p.exposed_ms)},
          {"samples_per_s", rounded(p.samples_per_s)},
          {"efficiency", rounded(p.efficiency)},
          {"bytes_sent", p.bytes_sent},
          {"buckets", p.buckets},
          {"limit", p.limit}};
}

JsonObject json_of(const Candidate& c, const Job& asked) {
  JsonObject json = json_of(c.prediction);
  return json.add("flags", flags_of(c.job, asked));
}

JsonObject json_of(const Economy& e) {
  JsonObject json = {
      {"hours", rounded(e.hours)},
      {"checkpoint_minutes",
       std::isfinite(e.checkpoint_s) ? JsonText(rounded(e.checkpoint_s / 60)) : JsonText(nullptr)},
      {"checkpoint_minutes_young", std::isfinite(e.young_s) ? JsonText(rounded(e.young_s / 60)) : JsonText(nullptr)},
      {"lost_share", rounded(e.lost)},
      {"failures", rounded(e.failures)}};
  if (e.price > 0) json.add("price", rounded(e.price));
  return json;
}

std::string table_of(const Economy& e) {
  std::string text = fmt::format("{:>6} {:>12.2f}", e.nodes, e.hours);
  text += e.price > 0 ? fmt::format(" {:>14.2f}", e.price) : fmt::format(" {:>14}", "");
  if (std::isfinite(e.checkpoint_s))
    text += fmt::format(" {:>11.1f} {:>9.1f} {:>8.2f} % {:>9.1f}", e.checkpoint_s / 60, e.young_s / 60, 100 * e.lost,
                        e.failures);
  return text + "\n";
}

}  // namespace

bool names_a_file(const std::string& subject) {
  std::error_code ignored;
  return subject.find('/') != std::string::npos || subject.ends_with(".json") ||
         std::filesystem::exists(subject, ignored);
}

std::string describe(const SimulateOptions& o) {
  const Fabric& f = o.cluster.fabric;
  std::string text = fmt::format("{} rank{} per node", f.ranks_per_node, f.ranks_per_node == 1 ? "" : "s");
  if (f.ranks_per_node > 1)
    text +=
        fmt::format(", {:.4g} Gbit/s and {:g} µs between them", 8e-9 * f.inside.bytes_per_s, 1e6 * f.inside.latency_s);
  if (o.has_link)
    text += fmt::format("; {:.4g} Gbit/s and {:g} µs between nodes", 8e-9 * f.between.bytes_per_s,
                        1e6 * f.between.latency_s);
  if (f.nodes_per_switch > 0)
    text += fmt::format("; {} nodes per switch, oversubscribed {:g} times", f.nodes_per_switch, f.oversubscription);
  text += fmt::format("; allreduce: {}", name_of(o.cluster.algorithm));
  if (!o.cluster.measured.empty()) text += ", measured where known";
  if (o.job.comm_hook != "none") text += "; hook " + o.job.comm_hook;
  if (o.job.zero > 0) text += "; ZeRO-1";
  return text;
}

std::optional<Economy> economy_of(const SimulateOptions& o, const Prediction& p) {
  if (o.samples <= 0 && o.failures.node_mtbf_s <= 0) return std::nullopt;
  Economy e{.nodes = p.nodes};
  e.young_s = young_interval_s(o.failures, p.nodes);
  const bool fails = o.failures.node_mtbf_s > 0;
  e.checkpoint_s = o.checkpoint_interval_s > 0 ? o.checkpoint_interval_s
                   : fails                     ? daly_interval_s(o.failures, p.nodes)
                                               : std::numeric_limits<double>::infinity();
  const double factor = fails ? slowdown(o.failures, p.nodes, e.checkpoint_s) : 1;
  e.lost = 1 - 1 / factor;
  if (o.samples > 0) {
    e.hours = o.samples / p.samples_per_s * factor / 3600;
    e.price = e.hours * p.nodes * o.price;
    if (fails) e.failures = e.hours * 3600 * p.nodes / o.failures.node_mtbf_s;
  }
  return e;
}

std::string simulate(SimulateOptions o, std::vector<StepProfile> profiles, const std::string& command) {
  profiles = all_profiles(o, std::move(profiles));
  complete(o, profiles);
  std::vector<Prediction> predictions;
  std::vector<Advice> advice;
  for (const int nodes : o.nodes) {
    predictions.push_back(simulate_step(profiles, o.job, o.cluster, nodes, o.trials));
    advice.push_back(
        advise(profiles, o.job, o.cluster, nodes, {.trials = std::min(o.trials.trials, 20), .seed = o.trials.seed}));
  }
  const StepProfile& profile = profile_for(profiles, o.cluster.fabric.ranks_per_node);
  if (!o.html.empty()) write_whole_file(o.html, page_of(o, profile, predictions, command));
  if (!o.svg.empty()) write_whole_file(o.svg, svg_of(profile, predictions, describe(o)));

  if (o.json) {
    std::vector<JsonText> rows;
    for (std::size_t i = 0; i < predictions.size(); ++i) {
      JsonObject row = json_of(predictions[i]);
      row.add("best", json_of(advice[i].best, o.job));
      if (const auto economy = economy_of(o, predictions[i])) row.add("run", json_of(*economy));
      rows.emplace_back(row);
    }
    return JsonObject{{"model", profile.model},   {"batch", profile.batch}, {"precision", profile.precision},
                      {"device", profile.device}, {"cluster", describe(o)}, {"predictions", rows}}
               .text() +
           "\n";
  }
  std::string text = heading(o, profile) + warning(o, profile);
  text += fmt::format("\n{:>6} {:>7} {:>11} {:>21} {:>11} {:>11} {:>10} {:>13}  {}\n", "nodes", "ranks", "step ms",
                      "10 % to 90 %", "communic.", "exposed", "efficiency", "samples/s", "limit");
  for (const auto& p : predictions)
    text += fmt::format("{:>6} {:>7} {:>11.3f} {:>21} {:>11.3f} {:>11.3f} {:>8.1f} % {:>13.1f}  {}\n", p.nodes, p.ranks,
                        p.step_ms, fmt::format("{:.3f} to {:.3f}", p.step_ms_p10, p.step_ms_p90), p.communication_ms,
                        p.exposed_ms, 100 * p.efficiency, p.samples_per_s, p.limit);
  for (const auto& each : advice) {
    const std::string flags = flags_of(each.best.job, o.job);
    if (!flags.empty())
      text += fmt::format("{} nodes: {} makes steps {:.1f} % shorter\n", each.best.prediction.nodes, flags,
                          100 * (1 - each.best.prediction.step_ms / each.as_asked.prediction.step_ms));
  }
  if (economy_of(o, predictions.front())) {
    text += fmt::format("\n{:>6} {:>12} {:>14}", "nodes", "hours", o.price > 0 ? "price" : "");
    if (o.failures.node_mtbf_s > 0)
      text += fmt::format(" {:>11} {:>9} {:>10} {:>9}", "checkpoint", "Young's", "lost", "failures");
    text += "\n";
    for (const auto& p : predictions) text += table_of(*economy_of(o, p));
  }
  return text;
}

std::string plan(SimulateOptions o, std::vector<StepProfile> profiles) {
  profiles = all_profiles(o, std::move(profiles));
  complete(o, profiles);
  const StepProfile& profile = profile_for(profiles, o.cluster.fabric.ranks_per_node);
  std::vector<JsonText> rows;
  std::string text = heading(o, profile) + warning(o, profile);
  for (const int nodes : o.nodes) {
    const Advice a = advise(profiles, o.job, o.cluster, nodes, o.trials);
    if (o.json) {
      JsonObject row = {{"nodes", nodes},
                        {"as_asked", json_of(a.as_asked, o.job)},
                        {"best", json_of(a.best, o.job)},
                        {"compression_worth", a.compression_worth},
                        {"because", a.because},
                        {"accumulated", json_of(a.accumulated, o.job)}};
      if (a.sharded) row.add("zero", json_of(*a.sharded, o.job));
      std::vector<JsonText> hooks;
      for (const auto& each : a.compressed) hooks.emplace_back(json_of(each, o.job));
      rows.emplace_back(row.add("compressed", hooks));
      continue;
    }
    const auto shown = [&](const Candidate& c) {
      const std::string flags = flags_of(c.job, o.job);
      return flags.empty() ? std::string("as it is") : flags;
    };
    const auto ms = [](const Candidate& c) { return c.prediction.step_ms; };
    text += fmt::format("\n{} node{}, {} rank{}: {:.3f} ms as asked, limited by {}\n", nodes, nodes == 1 ? "" : "s",
                        a.best.prediction.ranks, a.best.prediction.ranks == 1 ? "" : "s", ms(a.as_asked),
                        a.as_asked.prediction.limit);
    text += fmt::format("  shortest         {:>10.3f} ms  {}\n", ms(a.best), shown(a.best));
    if (a.sharded) text += fmt::format("  less memory      {:>10.3f} ms  {}\n", ms(*a.sharded), shown(*a.sharded));
    for (const auto& each : a.compressed)
      text += fmt::format("  compressed       {:>10.3f} ms  {}\n", ms(each), shown(each));
    text += fmt::format("  compression      {}, because {}\n", a.compression_worth ? "yes" : "no", a.because);
    text += a.accumulated.job.accumulate == a.best.job.accumulate
                ? fmt::format("  accumulation     no: more parts make no more samples per second\n")
                : fmt::format("  accumulation     {}: {:.1f} % more samples per second, at {} times the global batch\n",
                              shown(a.accumulated),
                              100 * (a.accumulated.prediction.samples_per_s / a.best.prediction.samples_per_s - 1),
                              a.accumulated.job.accumulate / o.job.accumulate);
  }
  if (!o.json) return text;
  return JsonObject{{"model", profile.model}, {"cluster", describe(o)}, {"advice", rows}}.text() + "\n";
}

}  // namespace lockstep::simulate
