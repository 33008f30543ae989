// What lies beside a metrics file, and what is read off runs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/file.h"
#include "base/flight_snapshot.h"
#include "base/json_value.h"
#include "base/statistics.h"
#include "base/text.h"
#include "launcher/inspect.h"
#include "report/report.h"

namespace lockstep::report {
namespace {

namespace fs = std::filesystem;

constexpr const char* kHistoryFile = "restarts.jsonl";
constexpr std::size_t kMostHistory = std::size_t{1} << 20;  // lines
constexpr std::size_t kMostFlights = 64;

std::string text_at(const nlohmann::json& json, const char* name) {
  const auto found = json.find(name);
  if (found == json.end() || found->is_null()) return {};
  return found->is_string() ? found->get<std::string>() : found->dump();
}

/// The launcher's history: its lines are its own words.
std::vector<Incident> read_history(const std::string& path) {
  std::vector<Incident> all;
  std::ifstream in(path, std::ios::binary);
  std::size_t number = 0;
  for (std::string line; std::getline(in, line) && !in.eof() && number < kMostHistory;) {
    ++number;
    nlohmann::json json;
    try {
      json = parse_json(line, 3);
    } catch (const JsonError& error) {
      throw IoError(fmt::format("{}, line {}: {}", path, number, error.what()), "remove the line, or the file");
    }
    if (!json.is_object()) continue;
    std::string text = text_at(json, "time");
    for (const auto& [name, value] : json.items())
      if (name != "time" && name != "event" && !value.is_null())
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, text_at(json, name.c_str()));
    all.push_back({.kind = text_at(json, "event"), .text = text});
  }
  return all;
}

void add_log_dir(const std::string& directory, RecordedRun& recorded) {
  std::error_code none;
  if (const fs::path history = fs::path(directory) / kHistoryFile; fs::exists(history, none))
    recorded.launcher = read_history(history.string());
  if (!fs::is_directory(fs::path(directory) / "flight", none)) return;
  for (const auto& path : launcher::records_at(directory)) {
    if (recorded.flights.size() == kMostFlights) break;
    const auto snapshot = flight::decode(flight::read_bytes(path), path);
    std::string text = fmt::format("rank {} (host {}, process {}): {}", snapshot.rank, snapshot.host, snapshot.pid,
                                   flight::describe_state(snapshot));
    if (snapshot.signal != 0) text += fmt::format("; it crashed by signal {}", snapshot.signal);
    recorded.flights.push_back(std::move(text));
  }
}

bool begins_with(const fs::path& path, std::string_view text) {
  std::ifstream in(path, std::ios::binary);
  std::string begin(text.size(), '\0');
  return in.read(begin.data(), static_cast<std::streamsize>(begin.size())) && begin == text;
}

/// In `directory`: metrics files, and traces.
std::pair<std::vector<std::string>, std::vector<std::string>> files_of(const fs::path& directory) {
  std::vector<std::string> metrics, traces;
  std::error_code error;
  for (auto entry = fs::directory_iterator(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const fs::path& path = entry->path();
    std::error_code none;
    if (path.filename() == kHistoryFile || !fs::is_regular_file(path, none)) continue;
    if (begins_as_metrics(path.string())) metrics.push_back(path.string());
    if (begins_with(path, R"({"displayTimeUnit":"ms","traceEvents":[)")) traces.push_back(path.string());
  }
  std::ranges::sort(metrics);
  std::ranges::sort(traces);
  return {metrics, traces};
}

}  // namespace

bool begins_as_metrics(const std::string& path) {
  return begins_with(path, R"({"event":")") || begins_with(path, kTableBegins);
}

std::string metrics_file_of(const std::string& path) {
  if (std::error_code none; !fs::is_directory(path, none)) return path;
  const auto files = files_of(path).first;
  if (files.empty())
    throw IoError(fmt::format("{}: a directory without a metrics file", path),
                  "give the file that --metrics FILE.jsonl has written, or its directory");
  if (files.size() > 1)
    throw UsageError(fmt::format("{}: a directory with {} metrics files", path, files.size()),
                     fmt::format("give one of them: {}", files.front()));
  return files.front();
}

RecordedRun read_recorded(const std::string& path, const std::string& trace, const std::string& log_dir) {
  const std::string metrics = metrics_file_of(path);
  std::string found_trace = trace, directory = log_dir;
  if (metrics != path) {
    const auto traces = files_of(path).second;
    if (found_trace.empty() && traces.size() == 1) found_trace = traces.front();
    if (directory.empty()) directory = path;
  }
  RecordedRun recorded = {.run = read_run(metrics), .name = fs::path(metrics).lexically_normal().string()};
  if (!found_trace.empty()) recorded.trace = read_trace(found_trace);
  if (!log_dir.empty() && !fs::is_directory(log_dir))
    throw IoError(fmt::format("--log-dir {}: no directory", log_dir), "give the launcher's --log-dir");
  if (!directory.empty()) add_log_dir(directory, recorded);
  return recorded;
}

std::optional<SettingOf> setting_of(const Run& run, std::string_view name) {
  if (run.starts.empty()) return std::nullopt;
  for (const auto& setting : run.starts.back().settings)
    if (setting.name == name) return SettingOf{setting.value, setting.from};
  return std::nullopt;
}

std::vector<std::string> differing_settings(const std::vector<const Run*>& runs) {
  std::vector<std::string> names;
  for (const Run* run : runs) {
    if (run->starts.empty()) continue;
    for (const auto& setting : run->starts.back().settings) {
      if (std::ranges::find(names, setting.name) != names.end()) continue;
      const auto differs = [&](const Run* other) {
        const auto there = setting_of(*other, setting.name);
        return !there || there->value != setting.value;
      };
      if (std::ranges::any_of(runs, differs)) names.push_back(setting.name);
    }
  }
  return names;
}

std::optional<StepFacts> facts_of(const Run& run) {
  if (!run.final || run.final->times.empty()) return std::nullopt;
  StepFacts facts;
  facts.ranks = run.final->times;
  for (std::size_t rank = 0; rank < facts.ranks.size(); ++rank) {
    RankTimes& times = facts.ranks[rank];
    if (!run.starts.empty() && rank < run.starts.back().ranks.size()) times.host = run.starts.back().ranks[rank].host;
    const double compute = std::isnan(times.compute_ms) ? 0 : times.compute_ms;
    facts.step_ms = std::max(facts.step_ms, times.data_ms + compute + times.wait_ms);
  }
  // Of a device's steps the host knows their length.
  if (std::isnan(facts.ranks.front().compute_ms)) {
    const auto& steps = run.of(Field::kStepMs);
    std::vector<double> finite;
    std::ranges::copy_if(steps, std::back_inserter(finite), [](double ms) { return std::isfinite(ms); });
    if (!finite.empty()) facts.step_ms = std::max(facts.step_ms, median(std::move(finite)));
  }
  if (const auto workers = setting_of(run, "workers"))
    facts.workers = static_cast<int>(parse_int(workers->value).value_or(1));
  if (const auto hook = setting_of(run, "comm-hook")) facts.compresses = hook->value != "none";
  return facts;
}

std::string shown(double value) { return std::isnan(value) ? "–" : fmt::format("{:.6g}", value); }

std::string duration_text(double seconds) {
  if (std::isnan(seconds)) return "–";
  if (seconds < 60) return fmt::format("{:.3g} s", seconds);
  const auto whole = static_cast<std::int64_t>(std::min(seconds, 1e12) + 0.5);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

std::vector<std::pair<std::string, double>> results_of(const Run& run) {
  std::vector<std::pair<std::string, double>> results;
  const auto add = [&](std::string name, double value) {
    if (!std::isnan(value)) results.emplace_back(std::move(name), value);
  };
  const auto& steps = run.of(Field::kStep);
  add("steps", run.final ? run.final->steps : steps.empty() ? kNone : steps.back());
  if (run.final) add("wall_s", run.final->wall_s);
  // Without the first, which compiles, allocates and waits for the first batch.
  double milliseconds = 0, waits = 0, count = 0;
  for (std::size_t i = 1; i < run.size(); ++i) {
    if (!std::isfinite(run.of(Field::kStepMs)[i])) continue;
    milliseconds += run.of(Field::kStepMs)[i];
    if (std::isfinite(run.of(Field::kCommWaitMs)[i])) waits += run.of(Field::kCommWaitMs)[i];
    count += 1;
  }
  if (count > 0) {
    add("mean step_ms", milliseconds / count);
    add("mean comm_wait_ms", waits / count);
  }
  const Extent losses = extent_of(steps, run.of(Field::kLoss));
  add("last loss of training", losses.last);
  add("least loss of training", losses.least);
  const Evaluation* last = nullptr;
  for (const auto& evaluation : run.evaluations)
    if (evaluation.split != "train" && (last == nullptr || evaluation.step >= last->step)) last = &evaluation;
  if (last != nullptr) {
    for (const auto& [name, value] : last->figures) {
      add("validation " + name, value);
      const auto curve = curve_of(run, name, last->split, last->of_average);
      const Extent extent = extent_of(curve.x, curve.y);
      add("validation " + name + ", least", extent.least);
      add("validation " + name + ", greatest", extent.most);
    }
  }
  if (run.final && !run.final->peak_memory_bytes.empty())
    add("peak memory, greatest of a rank, bytes", std::ranges::max(run.final->peak_memory_bytes));
  return results;
}

}  // namespace lockstep::report
