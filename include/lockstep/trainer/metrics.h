// The metrics file: one JSON object per line, or a table.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/options.h"

namespace lockstep {
class JsonObject;
}
namespace lockstep::data {
struct DataSplits;
}

namespace lockstep::trainer {

/// Of a step whose losses were scaled.
struct LossScaling {
  double scale = 1, next_scale = 1;  // of this step, and from the next one on
  bool skipped = false;              // its gradients were not finite: it has changed nothing but the scale
  std::int64_t good_steps = 0;       // in a row, since the scale has changed
  std::int64_t skipped_steps = 0;    // of the run so far
};

/// What a run is, as it begins.
struct RunReport {
  static constexpr int kSchema = 1;  // grows when a field changes its meaning, not when there is a new one
  struct Setting {
    std::string name, value, from;  // from: as in TrainConfig::places, or "default"
  };
  struct Rank {
    std::string host, device;  // "a", "cpu (avx512_core_bf16, 2 threads)"
  };
  std::string command = {};            // empty: a program has started it
  std::vector<Setting> settings = {};  // that apply to it
  std::string model = {};
  std::int64_t parameters = 0, trained_parameters = 0;
  std::string data = {}, data_sha256 = {};  // of what data_facts_of() says of the training part
  std::int64_t steps = 0;                   // that are planned
  std::vector<Rank> ranks = {};
  std::string version = {}, instruction_set = {};
  std::string git_commit = {}, git_branch = {};  // of the working directory; empty: there is none
};

struct StepReport {
  std::int64_t step = 0;   // steps done, this one included
  std::int64_t epoch = 0;  // from 1
  double loss = 0;         // mean over the global batch
  double lr = 0;
  double grad_norm = std::numeric_limits<double>::quiet_NaN();  // L2, before clipping; NaN where it was not found
  double step_ms = 0;
  double comm_wait_ms = 0;        // of it, stood waiting for collectives
  double samples_per_s = 0;       // of all ranks together
  std::int64_t samples = 0;       // of all ranks together, since this process began
  std::int64_t memory_bytes = 0;  // of this rank, not always as of this step: resident; on a GPU, what it holds there
  std::optional<LossScaling> scaling = {};
};

/// Of targets that are numbers, in the units of the data.
struct ErrorReport {
  double mae = 0, rmse = 0;       // mean absolute error, and the root of the mean squared one
  std::optional<double> r2 = {};  // the share of the targets' variance that is explained; nothing: they have none
};

struct EvalReport {
  std::int64_t step = 0;
  std::int64_t epoch = 0;  // of a training's evaluation: the one that is done, or under way, from 1; 0: nobody trains
  std::string split = {};  // of which it is: kSplits
  double loss = 0;         // mean over the evaluation set
  double accuracy = 0;     // 0 to 1; NaN: there is none, for targets are numbers, or the loss does not count
  std::int64_t samples = 0;
  std::optional<double> top5 = {};  // 0 to 1: where it was asked for
  std::optional<double> auc = {};   // 0 to 1, of two classes; NaN: there are samples of one alone
  std::optional<ErrorReport> errors = {};
  bool stopped = false;     // not all samples were looked at
  bool of_average = false;  // the parameters' moving average was evaluated
  /// Where it was asked for: (classes, classes), in row r and column c the samples of class r that are taken for c.
  std::vector<std::int64_t> confusion = {};
  bool best = false;                                     // better than all before, where a run keeps the best
  std::vector<std::pair<std::string, double>> own = {};  // a program's own metrics (OwnMetric)
};

/// What the gradients of a step take on the wire, in bytes that a rank sends if each has a link of its own
/// (ddp::Reducer::bytes_sent()).
struct HookReport {
  std::string name;  // "powersgd:4"
  double bytes_sent = 0;
  double bytes_without_hook = 0;
  std::int64_t fallbacks = 0;  // buckets, so far, that were sent a second time, in f32
};

/// Means of a rank's steps, without the first few, in ms.
struct RankTimes {
  double data = 0;     // it waited for its batches
  double compute = 0;  // NaN: a device computes, and its host does not know
  double wait = 0;     // it waited for other ranks
};

struct FinalReport {
  std::int64_t steps = 0, epochs = 0;
  int world_size = 1;
  double wall_s = 0;
  double loss = 0, accuracy = 0;   // of the last evaluation; NaN: there was none
  std::optional<double> auc = {};  // likewise
  std::optional<ErrorReport> errors = {};
  std::vector<std::int64_t> peak_memory_bytes;  // resident, by rank
  std::vector<RankTimes> times = {};            // by rank; empty: of too few steps
  std::string params_sha256;
  std::optional<HookReport> hook = {};
  std::string ema_params_sha256 = {};  // of their moving average; empty: there is none
  std::optional<LossScaling> scaling = {};
  std::optional<checkpoint::BestEvaluation> best = {};  // of a run that looks for it
  bool gave_up = false;                                 // it ended early, for want of a better one
  std::int64_t skipped = 0;                             // steps that were left out, since this process began
  std::int64_t rewinds = 0;                             // after divergence, likewise
  std::int64_t audits = 0;                              // steps that two ranks have computed alike, likewise
  std::vector<checkpoint::BestEvaluation> kept = {};    // whose checkpoints stay, the best first
};

struct ResumeReport {
  std::int64_t step = 0;  // the last one that had been done
  int world_size = 1;
};

/// Training has diverged and goes back to a checkpoint.
struct RewindReport {
  std::int64_t step = 0;   // at which it has diverged
  std::int64_t to = 0;     // after which it continues; 0: at the beginning
  std::int64_t count = 0;  // of such, since this process began
  std::string cause = {};
};

/// The launcher has started the job again.
struct RestartReport {
  int attempt = 0;    // from 1
  std::string cause;  // "rank 1 was killed by SIGKILL"
};

/// From the step after this one on, ranks have these shares of a step (--balance).
struct BalanceReport {
  std::int64_t step = 0;
  std::vector<std::uint32_t> shares = {};  // by rank: shards, or samples of a whole global batch
  std::vector<double> own_ms = {};         // by rank: data and computation of a step before; empty: speeds were given
  double expected_ms = 0;                  // then: of the slowest rank from now on
};

/// A step that all ranks have left out (--on-bad-batch).
struct SkippedReport {
  std::int64_t step = 0, epoch = 0;
  std::int64_t count = 0;  // of such steps since this process began, this one included
  struct Cause {
    int rank = 0;
    std::string text;  // what could not be read, or whose loss is not finite
  };
  std::vector<Cause> causes = {};  // by rank; empty: the loss is not finite, and no rank's own is
};

/// A checkpoint that is on the disk.
struct CheckpointReport {
  std::int64_t step = 0;    // after which it was taken
  std::uint64_t bytes = 0;  // of its files
  double write_ms = 0;      // that writing took, beside training
  double held_up_ms = 0;    // for which training stood still: comparing the ranks, the one before, the copy in memory
};

/// A file of lines of JSON, or, where its name ends with ".csv", a table: a row for each step, each evaluation and the
/// end, in columns that are always the same, those of a program's own metrics last. What a table has no column for is
/// left out. Lines are written whole, so that readers never see a part of one, and those of steps that follow each
/// other at once together, every 50 ms. Where they cannot be written (a full disk) it warns once and training
/// continues; `failure()` then says what happened. Not thread-safe, but for warnings. A copy writes to the same file;
/// what was moved from writes nothing.
class Metrics {
 public:
  Metrics() = default;
  /// Creates or empties `path`; an empty path writes nothing. Throws IoError naming the file, UsageError for a named
  /// pipe.
  explicit Metrics(const std::string& path);
  /// Appends to the file of a run that resumes after `step`. Lines of later steps, of an evaluation after that step,
  /// and a line that is cut are removed first; warnings and restarts stay. A file that is not regular is only appended
  /// to. Throws UsageError for a table with other columns.
  static Metrics resumed(const std::string& path, std::int64_t step);

  explicit operator bool() const { return file_ != nullptr; }
  /// Writes one line per part of the data: its samples, its classes with names and, if known, numbers of samples, and
  /// how a table was read.
  void write(const data::DataSplits& splits);
  void write(const RunReport& report);
  void write(const StepReport& report);
  void write(const EvalReport& report);
  void write(const FinalReport& report);
  /// Of an evaluation: the figures of each class, by their names.
  void write_classes(const EvalReport& report, const std::vector<std::string>& names);
  void write(const ResumeReport& report);
  void write(const RestartReport& report);
  void write(const RewindReport& report);
  void write(const CheckpointReport& report);
  void write(const BalanceReport& report);
  void write(const SkippedReport& report);
  /// Of a run that resumes: the last step whose line was there, or that was left out.
  std::int64_t last_step() const { return last_step_; }
  /// Of a run that resumes: warns if a file that was there lacks steps up to `step`. If the launcher has restarted the
  /// run, that is its failure(): they were this job's. Of a table this is not known, for it has no rows of steps that
  /// were left out.
  void look_for_gap(std::int64_t step, bool restarted);
  /// Writes the lines of steps that wait: before a checkpoint, from which a run resumes without them.
  void flush();
  /// From here on warnings that this process logs are lines too, until the final report, or the end of this. Where
  /// they cannot be written they are left out.
  void take_warnings();

  /// Empty, or why the file lacks lines. While there is no space they wait in memory, up to 64 MiB.
  std::string failure() const;

 private:
  class File;
  explicit Metrics(std::shared_ptr<File> file);
  void write(const JsonObject& event, bool soon = true);

  std::shared_ptr<File> file_;  // nullptr: nothing is written
  std::int64_t last_step_ = 0;
  bool has_steps_ = false;
  std::shared_ptr<void> observing_;  // with which the last one ends what take_warnings() has begun
};

}  // namespace lockstep::trainer
