// lockstep report, compare, watch and bugreport: runs as people look at them, afterwards and while they train.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "options/table.h"
#include "report/run.h"
#include "report/trace.h"

namespace lockstep::report {

/// A run, and what lies beside its metrics file.
struct RecordedRun {
  Run run;
  std::string name;  // by which pages call it; that of no other
  std::optional<Trace> trace = {};
  std::vector<Incident> launcher = {};    // attempts and their ends, from --log-dir
  std::vector<std::string> flights = {};  // each rank's last actions, in words
};

/// Whether a file begins as a metrics file does.
bool begins_as_metrics(const std::string& path);
/// The metrics file that RUN is, or the one in the directory that it is. Throws IoError, UsageError for several.
std::string metrics_file_of(const std::string& path);

/// RUN: a metrics file; or a directory with one, in which a trace and what the launcher's --log-dir holds are found
/// too. `trace` and `log_dir` add them; empty: they do not. Throws IoError, UsageError for a directory with several.
RecordedRun read_recorded(const std::string& path, const std::string& trace = {}, const std::string& log_dir = {});

struct ReportOptions {
  std::vector<std::string> runs;
  std::string output = "report.html";
  std::string trace = {}, log_dir = {};  // of the only run
};
options::OptionTable report_options(ReportOptions& options);
/// Writes the page, whole or not at all; returns what is printed.
std::string report(const ReportOptions& options);
/// A page that loads nothing: curves, where time went, what happened, settings.
std::string page_of(const std::vector<RecordedRun>& runs);

struct CompareOptions {
  std::string first, second;
  bool all = false;  // also what is equal
};
options::OptionTable compare_options(CompareOptions& options);
/// Settings and results, those that differ first.
std::string compare(const CompareOptions& options);

struct WatchOptions {
  std::string run;
  double every = 1;   // seconds
  bool once = false;  // it draws once, and ends
};
options::OptionTable watch_options(WatchOptions& options);
/// Draws in the terminal until the run ends or Ctrl-C. Returns the exit code.
int watch(const WatchOptions& options);
/// What it draws, in lines of at most so many columns.
std::vector<std::string> drawing_of(const Run& run, int columns, int lines);

struct BugreportOptions {
  std::string run;
  std::string output = "bugreport.zip";
};
options::OptionTable bugreport_options(BugreportOptions& options);
/// Writes the archive; returns what is printed. `version`: what lockstep version prints.
std::string bugreport(const BugreportOptions& options, const std::string& version);
/// `text` with "(removed)" in place of values that are secret: by their names, by what they look like, or because they
/// are this process's own.
std::string without_secrets(const std::string& text);

/// The settings of the last start, by name: value, and where it came from.
struct SettingOf {
  std::string value, from;
};
std::optional<SettingOf> setting_of(const Run& run, std::string_view name);
/// The names of settings that differ, or are in one of them alone, in the order of the first run.
std::vector<std::string> differing_settings(const std::vector<const Run*>& runs);
/// "0.9722", "1.25e-05", "–" for none.
std::string shown(double value);
/// "12 s", "3 min 20 s", "2 h 05 min".
std::string duration_text(double seconds);
/// What a run's end says of its steps; nothing where it does not.
std::optional<StepFacts> facts_of(const Run& run);
/// Results by name, in the order in which they are shown: steps, time, rate, losses, figures, memory.
std::vector<std::pair<std::string, double>> results_of(const Run& run);

}  // namespace lockstep::report
