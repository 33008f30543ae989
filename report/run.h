// The record of a training run: its metrics file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "report/bottlenecks.h"

namespace lockstep::report {

inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

inline constexpr std::string_view kStepEvent{"step"};           // of a metrics file's lines
inline constexpr std::string_view kTableBegins{"event,step,"};  // the names of a table's columns

/// What a metrics file has of each step. Their order is that of a step's line, which makes reading it fast.
enum class Field : std::uint8_t {
  kStep,
  kEpoch,
  kLoss,
  kLr,
  kGradNorm,
  kStepMs,
  kCommWaitMs,
  kSamplesPerS,
  kSamples,
  kMemoryBytes,
  kLossScale,
  kUnixS,
  kCount
};
inline constexpr auto kFields = static_cast<std::size_t>(Field::kCount);
const char* name_of(Field field);  // in the file

using Figures = std::vector<std::pair<std::string, double>>;  // "accuracy", 0.97

struct Evaluation {
  double step = kNone, epoch = kNone, unix_s = kNone;
  std::string split = {};
  bool of_average = false, best = false;
  Figures figures = {};  // loss first
};

/// What a process says of itself as it begins: a run that is resumed has several.
struct Start {
  struct Setting {
    std::string name, value, from;
  };
  struct Rank {
    std::string host, device;
  };
  std::string command = {}, version = {}, model = {}, data = {}, data_sha256 = {}, instruction_set = {}, git = {};
  double parameters = kNone, trained_parameters = kNone, planned_steps = kNone, unix_s = kNone;
  std::vector<Rank> ranks = {};
  std::vector<Setting> settings = {};
};

struct Checkpoint {
  double step = kNone, bytes = kNone, write_ms = kNone, held_up_ms = kNone;
};

/// What happened beside steps: "warning", "restart", "resume"; of the launcher, also "start", "end", "grow".
struct Incident {
  std::string kind;
  double step = kNone;    // after which it was
  double unix_s = kNone;  // where it is known
  std::string text;
};

struct Final {
  Figures figures = {};  // of the last evaluation
  double steps = kNone, wall_s = kNone, world_size = kNone;
  std::string params_sha256 = {};
  std::vector<double> peak_memory_bytes = {};  // by rank
  std::vector<RankTimes> times = {};           // by rank, without hosts; empty: of an older version, or few steps
  std::optional<std::string> best = {};        // in words
};

/// A part of the data: its line in words.
struct DataPart {
  std::string name;
  double samples = kNone, classes = kNone;
};

/// All of it. The vectors of steps have one length.
struct Run {
  std::string path;
  std::array<std::vector<double>, kFields> steps = {};
  std::vector<Evaluation> evaluations = {};
  std::vector<Start> starts = {};
  std::vector<Checkpoint> checkpoints = {};
  std::vector<Incident> incidents = {};
  std::vector<DataPart> data = {};
  std::optional<Final> final = {};

  const std::vector<double>& of(Field field) const { return steps[static_cast<std::size_t>(field)]; }
  std::size_t size() const { return of(Field::kStep).size(); }
};

/// Reads a metrics file, lines of JSON or a table, piece by piece as it grows. A last line that is not complete waits
/// for its end.
class RunReader {
 public:
  /// `path` is for errors, and says by its ending what the file is.
  explicit RunReader(std::string path);
  /// Throws IoError with the line for what is no metrics file.
  void add(std::string_view bytes);
  const Run& run() const { return run_; }
  Run take() { return std::move(run_); }

 private:
  void add_line(std::string_view line);
  void add_row(std::string_view line);
  void add_event(std::string_view line);
  [[noreturn]] void refuse(const std::string& problem) const;

  Run run_;
  bool table_ = false;
  std::size_t line_ = 0;
  std::string rest_;                  // of a line that is not complete
  std::vector<std::string> columns_;  // of a table
};

/// All of a file. Throws IoError also where it is no regular file, or has no event.
Run read_run(const std::string& path);

/// A curve as it is drawn: of each stretch of steps the mean, and the least and the greatest value, which are never
/// left out; of few points each as it is.
struct Bin {
  double x = 0, mean = 0, least = 0, most = 0;
};
inline constexpr std::size_t kMostBins = 400;
/// Of `x`, which does not fall, and `y`, of the same length. Values that are not finite are left out.
std::vector<Bin> binned(const std::vector<double>& x, const std::vector<double>& y, std::size_t most = kMostBins);

/// What a curve's table says of it.
struct Extent {
  std::size_t points = 0;  // that are finite
  double first = kNone, last = kNone, least = kNone, most = kNone;
  double least_at = kNone, most_at = kNone;  // x
};
Extent extent_of(const std::vector<double>& x, const std::vector<double>& y);

/// "validation", also of files that do not say which.
std::string split_text(const std::string& split);

/// The evaluations' values of one figure of one split, by step. `of_average`: of the moving average.
struct Curve {
  std::vector<double> x, y;
};
Curve curve_of(const Run& run, std::string_view figure, std::string_view split, bool of_average);

}  // namespace lockstep::report
