// What the rounds of bench scaling say together: a table and JSON.
#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "base/text.h"
#include "bench/scaling.h"

namespace lockstep::bench {
namespace {

using Outcome = ScalingChange::Outcome;

template <class Value>
std::vector<double> series_of(const RoundResults& rounds, const Value& value) {
  std::vector<double> all;
  for (const auto& [round, result] : rounds) all.push_back(value(result));
  return all;
}

std::vector<double> step_times(const RoundResults& rounds) {
  return series_of(rounds, [](const JobResult& r) { return r.step_ms; });
}

/// Of the rounds that both have, the throughput of one divided by that of the other.
std::vector<double> ratios(const RoundResults& of, const RoundResults& to) {
  std::vector<double> all;
  for (const auto& [round, result] : of)
    if (const auto other = to.find(round); other != to.end())
      all.push_back(result.samples_per_s / other->second.samples_per_s);
  return all;
}

ScalingPoint point_of(const RoundResults& rounds, int ranks) {
  ScalingPoint point;
  point.ranks = ranks;
  point.rounds = std::ssize(rounds);
  if (rounds.empty()) return point;
  const JobResult& last = rounds.rbegin()->second;
  point.batch = last.batch;
  point.backend = last.backend;
  point.device = last.device;
  point.precision = last.precision;
  const auto rates = series_of(rounds, [](const JobResult& r) { return r.samples_per_s; });
  point.total = mean(rates);
  point.total_deviation = kHorovodDeviations * standard_deviation(rates);
  point.per_rank = point.total / ranks;
  point.per_rank_deviation = point.total_deviation / ranks;
  point.step_ms = median(step_times(rounds));
  point.compute_ms = median(series_of(rounds, [](const JobResult& r) { return r.compute_ms; }));
  point.exposed_comm_ms = median(series_of(rounds, [](const JobResult& r) { return r.exposed_comm_ms; }));
  for (const auto& [round, result] : rounds)
    point.peak_memory_bytes = std::max(point.peak_memory_bytes, result.peak_memory_bytes);
  return point;
}

Interval scaled(const Interval& interval, double scale) {
  return {interval.middle * scale, interval.low * scale, interval.high * scale};
}

std::string table_of(const ScalingSeries& series) {
  const bool weak = series.mode == ScalingMode::kWeak;
  std::string text = fmt::format("\n{}, {}\n", series.model, name_of(series.mode));
  text += fmt::format("{:>7}{:>22}{:>22}{:>25}{:>11}{:>12}{:>12}\n", "ranks", "samples/s per rank", "in total",
                      weak ? "efficiency" : "speed-up", "step ms", "exposed ms", "memory");
  for (const auto& point : series.points) {
    const std::string ranks = fmt::format("{}{}", point.ranks, point.crowded ? "*" : "");
    if (point.rounds == 0) {
      text += fmt::format("{:>7}  {}\n", ranks, point.failed.empty() ? "not measured" : "failed: " + point.failed);
      continue;
    }
    text += fmt::format("{:>7}{:>22}{:>22}{:>25}{:>11.3f}{:>12.3f}{:>12}\n", ranks,
                        with_deviation(point.per_rank, point.per_rank_deviation, point.rounds),
                        with_deviation(point.total, point.total_deviation, point.rounds),
                        weak ? shown(point.efficiency, 100, " %") : shown(point.speedup, 1, " ×"), point.step_ms,
                        point.exposed_comm_ms, human_bytes(static_cast<double>(point.peak_memory_bytes)));
  }
  return text;
}

std::string table_of_changes(const ScalingReport& report) {
  std::string text = fmt::format("\nAgainst {} ({})\n", report.baseline, test_in_words(report.slower_by));
  for (const auto& change : report.changes) {
    if (change.outcome == Outcome::kMissing) {
      text += fmt::format("  {:<28}not in both\n", text_of(change.one));
      continue;
    }
    text += fmt::format("  {:<28}{:>10.3f} → {:.3f} ms  {:>+7.1f} %  p = {:.3g}  {}\n", text_of(change.one),
                        change.before_ms, change.now_ms, change.percent(), change.p, name_of(change.outcome));
  }
  return text;
}

JsonText json_of(const std::optional<Interval>& interval) {
  if (!interval) return nullptr;
  return JsonObject{{"middle", rounded(interval->middle, 1e6)},
                    {"low", rounded(interval->low, 1e6)},
                    {"high", rounded(interval->high, 1e6)}};
}

JsonObject json_of(const ScalingPoint& point) {
  JsonObject json = {{"ranks", point.ranks}, {"more_than_cores", point.crowded}, {"rounds", point.rounds}};
  if (!point.failed.empty()) json.add("failed", point.failed);
  if (point.rounds == 0) return json;
  return json.add("batch", point.batch)
      .add("samples_per_s_per_rank", rounded(point.per_rank))
      .add("samples_per_s_per_rank_deviation", rounded(point.per_rank_deviation))
      .add("samples_per_s", rounded(point.total))
      .add("samples_per_s_deviation", rounded(point.total_deviation))
      .add("efficiency", json_of(point.efficiency))
      .add("speedup", json_of(point.speedup))
      .add("step_ms", rounded(point.step_ms))
      .add("compute_ms", rounded(point.compute_ms))
      .add("exposed_comm_ms", rounded(point.exposed_comm_ms))
      .add("peak_memory_bytes", point.peak_memory_bytes)
      .add("backend", point.backend)
      .add("device", point.device)
      .add("precision", point.precision);
}

std::string json_of(const ScalingReport& report) {
  std::vector<JsonText> series;
  for (const auto& each : report.series) {
    std::vector<JsonText> points;
    for (const auto& point : each.points) points.emplace_back(json_of(point));
    series.emplace_back(JsonObject{{"mode", name_of(each.mode)}, {"model", each.model}, {"points", std::move(points)}});
  }
  JsonObject json = {{"settings", facts_as_json(report.settings)},
                     {"machine", facts_as_json(report.machine)},
                     {"rounds", report.rounds},
                     {"deviation", kDeviationInWords},
                     {"interval", kIntervalInWords},
                     {"series", std::move(series)}};
  if (!report.baseline.empty()) {
    std::vector<JsonText> changes;
    for (const auto& change : report.changes) {
      JsonObject one = {{"mode", name_of(change.one.mode)},
                        {"model", change.one.model},
                        {"ranks", change.one.ranks},
                        {"outcome", name_of(change.outcome)}};
      if (change.outcome != Outcome::kMissing)
        one.add("before_ms", rounded(change.before_ms))
            .add("now_ms", rounded(change.now_ms))
            .add("percent", rounded(change.percent()))
            .add("p", change.p)
            .add("rounds_before", change.rounds_before)
            .add("rounds_now", change.rounds_now);
      changes.emplace_back(one);
    }
    json.add("baseline", JsonObject{{"file", report.baseline},
                                    {"machine", facts_as_json(report.baseline_machine)},
                                    {"test", test_in_words(report.slower_by)},
                                    {"changes", std::move(changes)}});
  }
  return json.text() + "\n";
}

}  // namespace

std::string value_of(const Facts& facts, std::string_view name) {
  const auto found = std::ranges::find(facts, name, &Facts::value_type::first);
  return found == facts.end() ? std::string() : found->second;
}

/// So many digits that the last one of both means something: "4311.2 ± 12.3".
std::string with_deviation(double value, double deviation, std::int64_t rounds) {
  const int places = value >= 1000 ? 0 : value >= 100 ? 1 : 2;
  return rounds < 2 ? fmt::format("{:.{}f}", value, places)
                    : fmt::format("{:.{}f} ± {:.{}f}", value, places, deviation, places);
}

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::kSlower: return "slower";
    case Outcome::kFaster: return "faster";
    case Outcome::kMissing: return "not in both";
    case Outcome::kSame: break;
  }
  return "same";
}

std::string busy_in_words(const Facts& machine) {
  const auto load = parse_double(value_of(machine, "load average"));
  if (!load || *load <= kBusy) return {};
  return fmt::format("The host was busy when this began (load average {:.1f}): do not rely on these figures.", *load);
}

std::string test_in_words(double slower_by) {
  return fmt::format(
      "slower: p < {} by Mann and Whitney's U test of the rounds' step times, two-sided, and a median above by more "
      "than "
      "{:g} %",
      kSignificance, slower_by);
}

std::string shown(const std::optional<Interval>& interval, double scale, const char* unit) {
  if (!interval) return "–";
  const double middle = scale * interval->middle;
  const int places = middle >= 100 ? 1 : middle >= 10 ? 1 : 2;
  if (interval->low == interval->high) return fmt::format("{:.{}f}{}", middle, places, unit);
  return fmt::format("{:.{}f}{} ({:.{}f} to {:.{}f})", middle, places, unit, scale * interval->low, places,
                     scale * interval->high, places);
}

std::vector<ScalingChange> compare(const ScalingFile& before, const ScalingFile& now, double slower_by) {
  std::vector<ScalingChange> changes;
  for (const auto& [one, rounds] : now.results) {
    ScalingChange change = {.one = one};
    const auto other = before.results.find(one);
    change.rounds_now = rounds.size();
    change.rounds_before = other == before.results.end() ? 0 : other->second.size();
    if (change.rounds_before == 0 || change.rounds_now == 0) {
      change.outcome = Outcome::kMissing;
    } else {
      const auto was = step_times(other->second), is = step_times(rounds);
      change.before_ms = median(was);
      change.now_ms = median(is);
      change.p = mann_whitney_p(was, is);
      if (change.p < kSignificance && change.percent() > slower_by) change.outcome = Outcome::kSlower;
      if (change.p < kSignificance && change.percent() < -slower_by) change.outcome = Outcome::kFaster;
    }
    changes.push_back(std::move(change));
  }
  return changes;
}

ScalingReport report_of(const ScalingOptions& options, const ScalingFile& file,
                        const std::map<ScalingCase, std::string>& failures) {
  ScalingReport report;
  report.settings = file.settings;
  report.machine = file.machine;
  // The file's, which may be of another machine.
  const auto places = words_of(value_of(file.machine, kPlaces));
  const std::int64_t count = places.empty() ? 0 : parse_int(places.front()).value_or(0);
  report.places_are = places.size() < 2 ? "" : places[1];
  for (const ScalingMode mode : options.modes)
    for (const std::string& model : options.models) {
      ScalingSeries series = {.mode = mode, .model = model, .points = {}};
      const RoundResults* smallest = nullptr;
      for (const int ranks : options.ranks) {
        const ScalingCase one = {mode, model, ranks};
        static const RoundResults kNone;
        const auto found = file.results.find(one);
        const RoundResults& rounds = found == file.results.end() ? kNone : found->second;
        if (smallest == nullptr) smallest = &rounds;
        ScalingPoint point = point_of(rounds, ranks);
        if (const auto failure = failures.find(one); failure != failures.end()) point.failed = failure->second;
        point.crowded = count > 0 && report.places_are == "cores" && ranks * options.threads > count;
        if (const auto each = ratios(rounds, *smallest); !each.empty()) {
          point.speedup = ratio_interval(each);
          point.efficiency = scaled(*point.speedup, static_cast<double>(options.ranks.front()) / ranks);
        }
        report.rounds = std::max(report.rounds, point.rounds);
        series.points.push_back(std::move(point));
      }
      report.series.push_back(std::move(series));
    }
  return report;
}

std::string text_of(const ScalingReport& report, Format format) {
  if (format == Format::kJson) return json_of(report);
  std::string text;
  for (const auto& [name, value] : report.machine)
    if (is_main_fact(name)) text += fmt::format("{:<16}{}\n", name, printable(value));
  text += fmt::format("\n{} round{}. ±: {}. Brackets: {}.\n", report.rounds, report.rounds == 1 ? "" : "s",
                      kDeviationInWords, kIntervalInWords);
  if (const std::string busy = busy_in_words(report.machine); !busy.empty()) text += busy + "\n";
  bool crowded = false;
  for (const auto& series : report.series) {
    text += table_of(series);
    crowded = crowded || std::ranges::any_of(series.points, &ScalingPoint::crowded);
  }
  if (crowded) text += fmt::format("\n* more threads than {}\n", report.places_are);
  return report.baseline.empty() ? text : text + table_of_changes(report);
}

}  // namespace lockstep::bench
