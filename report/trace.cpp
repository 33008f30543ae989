#include "report/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"

namespace lockstep::report {
namespace {

constexpr const char* kTraceRemedy = "give the file that --trace FILE.json has written";
constexpr std::string_view kStepSpan{"step"};
constexpr int kSteps = 0, kComputation = 1, kFirstLoader = 10, kFirstBucket = 1000;  // trainer::Trace::Row

/// The text after `key` in a line of the file, up to the end of its value; nothing where there is no such key.
std::optional<std::string_view> value_after(std::string_view line, std::string_view key) {
  const std::size_t at = line.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = line.substr(at + key.size());
  if (!rest.starts_with('"')) return rest.substr(0, rest.find_first_of(",}"));
  for (std::size_t end = 1; end < rest.size(); ++end) {
    if (rest[end] == '\\')
      ++end;
    else if (rest[end] == '"')
      return rest.substr(1, end - 1);
  }
  return std::nullopt;
}

template <class T>
std::optional<T> number_after(std::string_view line, std::string_view key) {
  const auto text = value_after(line, key);
  T value{};
  if (!text) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size()) return std::nullopt;
  return value;
}

Phase phase_of(int row, std::string_view name) {
  if (row >= kFirstBucket) return Phase::kCollective;
  if (row != kComputation) return Phase::kOther;
  if (name == "data") return Phase::kData;
  if (name == "optimizer") return Phase::kOptimizer;
  if (name.starts_with("wait")) return Phase::kWait;
  return name.ends_with(" backward") ? Phase::kBackward : Phase::kForward;
}

/// Milliseconds that some spans cover together.
double covered(std::vector<std::pair<double, double>> spans) {
  std::ranges::sort(spans);
  double sum = 0, until = -1e300;
  for (const auto& [begin, end] : spans) {
    sum += std::max(0.0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  return sum;
}

}  // namespace

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kData: return "waiting for data";
    case Phase::kForward: return "forward";
    case Phase::kBackward: return "backward";
    case Phase::kOptimizer: return "optimizer";
    case Phase::kWait: return "waiting for collectives";
    case Phase::kOther: return "other";
    case Phase::kCollective: break;
  }
  return "collectives";
}

Trace read_trace(const std::string& path) { return parse_trace(MappedFile(path).text(), path); }

Trace parse_trace(std::string_view rest, const std::string& path) {
  const auto refuse = [&](const std::string& problem) {
    throw IoError(fmt::format("{}: {}", path, problem), kTraceRemedy);
  };
  if (!rest.starts_with("{\"displayTimeUnit\"")) refuse("is no trace of lockstep's");
  Trace trace;
  std::map<std::pair<std::int64_t, int>, TracedStep> steps;  // by step, then by rank
  const auto step_of = [&](int rank, std::int64_t step) -> TracedStep& {
    TracedStep& of = steps[{step, rank}];
    of.rank = rank;
    of.step = step;
    return of;
  };
  for (std::size_t number = 1; !rest.empty(); ++number) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    const auto rank = number_after<int>(line, "\"pid\":");
    const auto name = value_after(line, "{\"name\":");
    if (!rank || !name) continue;
    constexpr int kMostRanks = 1 << 20;
    if (*rank < 0 || *rank >= kMostRanks) refuse(fmt::format("line {} is of rank {}", number, *rank));
    if (*name == "process_name") {
      trace.ranks.resize(std::max(trace.ranks.size(), static_cast<std::size_t>(*rank) + 1));
      trace.ranks[static_cast<std::size_t>(*rank)] = value_after(line, "\"args\":{\"name\":").value_or("");
    }
    const auto row = number_after<int>(line, "\"tid\":");
    const auto begin = number_after<double>(line, "\"ts\":"), took = number_after<double>(line, "\"dur\":");
    const auto step = number_after<std::int64_t>(line, "\"step\":");
    if (!row || !begin || !took || !step || !std::isfinite(*begin + *took)) continue;
    const double from = 1e-3 * *begin, to = 1e-3 * (*begin + *took);
    trace.span_ms = std::max(trace.span_ms, to);
    if (*row == kSteps) {
      if (*name != kStepSpan) continue;
      TracedStep& of = step_of(*rank, *step);
      of.begin = from;
      of.end = to;
    } else if (*row < kFirstLoader || *row >= kFirstBucket) {
      step_of(*rank, *step).spans.push_back({std::string(*name), phase_of(*row, *name), *row, from, to});
    }
  }
  for (auto& [key, step] : steps) {
    if (step.end <= step.begin) continue;  // it was cut
    // A batch is asked for before its step begins.
    for (const auto& span : step.spans)
      if (span.phase == Phase::kData) step.begin = std::min(step.begin, span.begin);
    std::ranges::stable_sort(step.spans, {}, &TraceSpan::begin);
    trace.steps.push_back(std::move(step));
  }
  if (trace.steps.empty()) refuse("has no whole step");
  return trace;
}

std::vector<std::vector<double>> mean_phases(const Trace& trace) {
  std::vector<std::vector<double>> means;
  std::vector<double> counts;
  for (const auto& step : trace.steps) {
    const auto rank = static_cast<std::size_t>(step.rank);
    if (means.size() <= rank) {
      means.resize(rank + 1, std::vector<double>(kPhases, 0.0));
      counts.resize(rank + 1, 0.0);
    }
    double left = step.end - step.begin;
    std::vector<const TraceSpan*> open;  // each within the one before
    const auto add = [&](const TraceSpan& span, double ms) { means[rank][static_cast<std::size_t>(span.phase)] += ms; };
    for (const auto& span : step.spans) {
      if (span.phase == Phase::kCollective) continue;
      while (!open.empty() && open.back()->end <= span.begin) open.pop_back();
      // What is within another span is not its time.
      if (!open.empty()) add(*open.back(), -(span.end - span.begin));
      add(span, span.end - span.begin);
      if (open.empty()) left -= span.end - span.begin;
      open.push_back(&span);
    }
    means[rank][static_cast<std::size_t>(Phase::kOther)] += std::max(0.0, left);
    counts[rank] += 1;
  }
  for (std::size_t rank = 0; rank < means.size(); ++rank)
    for (double& ms : means[rank]) ms /= std::max(1.0, counts[rank]);
  return means;
}

Overlap overlap_of(const TracedStep& step) {
  std::vector<std::pair<double, double>> collectives, both;
  std::vector<std::pair<double, double>> waits;
  for (const auto& span : step.spans) {
    if (span.phase == Phase::kCollective) collectives.emplace_back(span.begin, span.end);
    if (span.phase == Phase::kWait) waits.emplace_back(span.begin, span.end);
  }
  const double all = covered(collectives);
  for (const auto& [begin, end] : collectives)
    for (const auto& [wait_begin, wait_end] : waits)
      if (std::min(end, wait_end) > std::max(begin, wait_begin))
        both.emplace_back(std::max(begin, wait_begin), std::min(end, wait_end));
  return {.collectives_ms = all, .hidden_ms = std::max(0.0, all - covered(both))};
}

std::vector<const TracedStep*> typical_step(const Trace& trace) {
  std::vector<const TracedStep*> of_first;
  for (const auto& step : trace.steps)
    if (step.rank == trace.steps.front().rank) of_first.push_back(&step);
  std::ranges::sort(of_first, {}, [](const TracedStep* step) { return step->end - step->begin; });
  const std::int64_t chosen = of_first[of_first.size() / 2]->step;
  std::vector<const TracedStep*> all;
  for (const auto& step : trace.steps)
    if (step.step == chosen) all.push_back(&step);
  return all;
}

}  // namespace lockstep::report
