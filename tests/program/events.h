// What the program writes as JSON, one object per line: its metrics files, and what `--json` prints.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/program/command.h"
#include "tests/support/json.h"

namespace lockstep::testing {

inline std::vector<nlohmann::json> events_of(const std::string& text) {
  std::vector<nlohmann::json> events;
  for (const auto& line : lines_of(text)) events.push_back(json_in(line));
  return events;
}

/// Those of one kind in a file.
inline std::vector<nlohmann::json> events_of(const std::filesystem::path& path, const char* kind) {
  auto events = events_of(read_file(path));
  std::erase_if(events, [&](const auto& event) { return event["event"] != kind; });
  return events;
}

/// A metrics file.
struct Metrics {
  std::vector<double> losses;  // of all steps
  std::vector<nlohmann::json> evaluations;
  nlohmann::json final;
};

inline Metrics read_metrics(const std::filesystem::path& path) {
  Metrics metrics;
  for (const auto& event : events_of(read_file(path))) {
    if (event["event"] == "step") metrics.losses.push_back(event["loss"]);
    if (event["event"] == "eval") metrics.evaluations.push_back(event);
    if (event["event"] == "final") metrics.final = event;
  }
  return metrics;
}

/// The metrics of a training that must succeed.
inline Metrics metrics_of(const std::string& line, const std::filesystem::path& directory) {
  run_well(line + " --quiet --metrics m.jsonl", directory);
  return read_metrics(directory / "m.jsonl");
}

}  // namespace lockstep::testing
