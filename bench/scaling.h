// How training scales with the number of ranks: `lockstep bench scaling`. A job for each number of ranks, started by
// the launcher, in rounds; a file with what each job measured, from which an interrupted run continues; and what is
// made of it: a table, JSON, a page, a figure, and a comparison with an earlier file.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/scope.h"
#include "bench/statistics.h"
#include "bench/timings.h"

namespace lockstep::bench {

/// Weak: each rank keeps its batch. Strong: all share one batch.
enum class ScalingMode : std::uint8_t { kWeak, kStrong };
const char* name_of(ScalingMode mode);

/// Names and values, in their order, for people and for files.
using Facts = std::vector<std::pair<std::string, std::string>>;
JsonObject facts_as_json(const Facts& facts);

struct ScalingOptions {
  std::vector<std::string> models;
  std::vector<ScalingMode> modes = {ScalingMode::kWeak, ScalingMode::kStrong};
  std::vector<int> ranks;  // empty: 1, 2, 4, … up to `places`
  std::string hosts;       // as launch takes them; empty: this host
  std::string device = "auto";
  std::int64_t batch = 64;              // samples per rank, weak
  std::int64_t global_batch = 256;      // samples of all ranks, strong
  std::int64_t threads = 1;             // per rank
  std::vector<std::string> step_flags;  // further ones of bench step
  std::int64_t rounds = 9, steps = 30, warmup_steps = 10;
  std::string out = "scaling.jsonl";
  std::string html, svg, baseline;  // files; empty: none
  double slower_by = 5;             // percent by which a median is at least slower to count
  Format format = Format::kTable;

  // What the command line knows:
  int places = 0;          // how many ranks there is a core, a GPU or a slot for; 0: unknown
  std::string places_are;  // "cores", "GPUs" or "slots"
  Facts versions;          // of this build and its libraries
  std::string command;     // as it was typed
  std::string program;     // the binary to start
};

/// One of the things that are measured in each round.
struct ScalingCase {
  ScalingMode mode = ScalingMode::kWeak;
  std::string model;
  int ranks = 1;
  friend auto operator<=>(const ScalingCase&, const ScalingCase&) = default;
};
/// "cnn, weak, 2 ranks"
std::string text_of(const ScalingCase& one);

/// What one job found; of `bench step`. Times in ms.
struct JobResult {
  double step_ms = 0, samples_per_s = 0, compute_ms = 0, exposed_comm_ms = 0;
  std::int64_t batch = 0;              // samples per rank
  std::int64_t peak_memory_bytes = 0;  // of the rank that needs most
  std::string backend, device, precision;
};

/// By round, which counts from 1.
using RoundResults = std::map<std::int64_t, JobResult>;

/// A file of results: a line with settings and machine, then a line for each job.
struct ScalingFile {
  Facts settings, machine;
  std::map<ScalingCase, RoundResults> results;
  std::size_t whole_bytes = 0;  // without a last line that was cut; 0: nothing was ever written
};
/// Throws IoError naming `path` and line for what no run has written, and for a job that is there twice.
ScalingFile parse_scaling(std::string_view text, const std::string& path);

/// What decides what is measured, as the flags are called. `rounds` is not among it: more of them continue a run.
Facts settings_of(const ScalingOptions& options);
/// This host, with the versions of `options`.
Facts describe_machine(const ScalingOptions& options);

/// A file of results that this process alone appends to. Each job is on the disk before the next one starts.
class ScalingJournal {
 public:
  /// Creates it, or opens one with the same settings; cuts off a last line that is not whole. Throws IoError for a file
  /// that cannot be written, is in use or is no such file, UsageError naming what differs.
  ScalingJournal(const std::string& path, const Facts& settings, const Facts& machine);

  const ScalingFile& file() const { return file_; }
  /// Throws UsageError unless all of it was measured on this machine and with this version.
  void check_machine(const Facts& machine) const;
  void add(const ScalingCase& one, std::int64_t round, const JobResult& result);

 private:
  void append(const std::string& line);

  std::string path_;
  UniqueFd fd_;
  ScalingFile file_;
};

struct ScalingJob {
  std::int64_t round = 1;
  ScalingCase one;
};
/// All jobs in the order in which they run: round by round, every second round backwards, so that what drifts (heat,
/// other programs) affects all cases alike.
std::vector<ScalingJob> plan_of(const ScalingOptions& options);
/// The launcher's command line.
std::vector<std::string> command_of(const ScalingOptions& options, const ScalingCase& one);

/// The rounds of one case together.
struct ScalingPoint {
  int ranks = 1;
  bool crowded = false;                                // more threads than cores
  std::int64_t rounds = 0;                             // 0: it failed, or has not been measured yet
  std::int64_t batch = 0;                              // samples per rank
  double per_rank = 0, total = 0;                      // samples per second: the rounds' mean
  double per_rank_deviation = 0, total_deviation = 0;  // 1.96 standard deviations, as Horovod prints them
  std::optional<Interval> speedup;  // against the series' smallest number of ranks, from ratios within a round
  std::optional<Interval> efficiency;
  double step_ms = 0, compute_ms = 0, exposed_comm_ms = 0;  // medians
  std::int64_t peak_memory_bytes = 0;
  std::string backend, device, precision;
  std::string failed;  // why it has no result
};
struct ScalingSeries {
  ScalingMode mode = ScalingMode::kWeak;
  std::string model;
  std::vector<ScalingPoint> points;  // by ranks
};

/// A case in this file and in an earlier one, by the times of its steps.
struct ScalingChange {
  ScalingCase one;
  std::size_t rounds_before = 0, rounds_now = 0;
  double before_ms = 0, now_ms = 0;  // medians
  double p = 1;                      // mann_whitney_p()
  enum class Outcome : std::uint8_t { kSame, kSlower, kFaster, kMissing } outcome = Outcome::kSame;

  double percent() const { return 100 * (now_ms / before_ms - 1); }
};
inline constexpr double kSignificance = 0.01;

/// By case. Throws UsageError where `before` measured something else, or has too few rounds for a difference at
/// kSignificance from `rounds` of now.
void check_baseline(const ScalingFile& before, const Facts& settings, std::int64_t rounds, const std::string& path);
std::vector<ScalingChange> compare(const ScalingFile& before, const ScalingFile& now, double slower_by);

struct ScalingReport {
  Facts settings, machine;
  std::string places_are;
  std::int64_t rounds = 0;
  std::vector<ScalingSeries> series;
  std::string baseline;  // its path
  Facts baseline_machine;
  double slower_by = 0;
  std::vector<ScalingChange> changes;
};
/// `failures`: why cases failed.
ScalingReport report_of(const ScalingOptions& options, const ScalingFile& file,
                        const std::map<ScalingCase, std::string>& failures);

/// For people, or one JSON object.
std::string text_of(const ScalingReport& report, Format format);
/// One file for a browser: plots with a table under each, the machine, how it was measured. It loads nothing.
std::string page_of(const ScalingReport& report);
/// Efficiency and speed-up side by side.
std::string figure_of(const ScalingReport& report);

// Parts of these:
inline constexpr double kHorovodDeviations = 1.96;
inline constexpr const char* kDeviationInWords =
    "1.96 standard deviations of the rounds, as Horovod's synthetic benchmark prints";
inline constexpr const char* kIntervalInWords =
    "95 % confidence interval of the ratios within a round, by Student's t on their logarithms";
/// A fact of a machine: how many ranks there is a core, a GPU or a slot for: "2 cores".
inline constexpr const char* kPlaces = "places";
/// The value of that name; empty: there is none.
std::string value_of(const Facts& facts, std::string_view name);
/// A load average above which figures are not to be relied on.
inline constexpr double kBusy = 0.5;
/// That it was above when measuring began; empty: it was not.
std::string busy_in_words(const Facts& machine);
/// What counts as slower, and by which test.
std::string test_in_words(double slower_by);
/// Whether the fact of a machine is one that everybody wants to see.
bool is_main_fact(std::string_view name);
/// "97.4 ± 1.3"; without the second one of a single round.
std::string with_deviation(double value, double deviation, std::int64_t rounds);
const char* name_of(ScalingChange::Outcome outcome);
/// "97.4 % (96.1 to 98.8)"
std::string shown(const std::optional<Interval>& interval, double scale, const char* unit);

/// Returns the exit code: that of a job that failed; else 1 if something has become slower than in the baseline; else
/// 0.
int bench_scaling(ScalingOptions options);

}  // namespace lockstep::bench
