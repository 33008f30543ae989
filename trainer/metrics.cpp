#include "lockstep/trainer/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <mutex>
#include <string_view>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/text.h"
#include "data/class_report.h"
#include "lockstep/base/deadline.h"

#include "trainer/best.h"
#include "trainer/confusion.h"
#include "trainer/reports.h"
#include "trainer/scores.h"

namespace lockstep::trainer {
namespace {

constexpr auto kTogether = std::chrono::milliseconds(50);  // lines that one system call writes
constexpr std::size_t kMostTogether = std::size_t{1} << 16;
// Of lines that wait for space on the disk.
constexpr std::size_t kMostKept = std::size_t{64} << 20;

constexpr const char* kOtherFile = "choose another --metrics file";

constexpr std::string_view kStepEvent{"step"};

/// A table's; those of a program's own metrics follow.
constexpr const char* kColumns[] = {
    "event",        "step",       "epoch",      "unix_s",        "split",        "loss",          "accuracy",
    "top5",         "lr",         "grad_norm",  "step_ms",       "comm_wait_ms", "samples_per_s", "samples",
    "memory_bytes", "loss_scale", "good_steps", "skipped_steps", "auc",          "mae",           "rmse",
    "r2",           "ema",        "best",       "wall_s",        "params_sha256"};

/// With so many digits after the point: a file of millions of lines has no others that mean nothing.
double rounded(double value, double digits) { return std::round(value * digits) / digits; }

bool is_table(const std::string& path) { return path.ends_with(".csv"); }

std::string header_of_table() {
  std::string header;
  for (const char* column : kColumns) header += (header.empty() ? "" : ",") + std::string(column);
  for (const OwnMetric& metric : own_metrics()) header += "," + metric.name;
  return header + '\n';
}

// The number after `name` in a line of ours.
std::optional<std::int64_t> number_in(const std::string& line, std::string_view name) {
  const auto at = line.find(name);
  if (at == std::string::npos) return std::nullopt;
  const auto begin = at + name.size();
  return parse_int(line.substr(begin, line.find_first_of(",}", begin) - begin));
}

/// What a line is of, and the step that it names.
struct LineOf {
  std::string event;
  std::optional<std::int64_t> step;
};

LineOf line_of(const std::string& line, bool table) {
  if (table) {
    const auto cells = split(line, ',');
    return {.event = cells[0], .step = cells.size() > 1 ? parse_int(cells[1]) : std::nullopt};
  }
  constexpr std::string_view kEvent = R"({"event":")";
  if (!line.starts_with(kEvent)) return {};
  const std::string event = line.substr(kEvent.size(), line.find('"', kEvent.size()) - kEvent.size());
  return {.event = event, .step = number_in(line, event == "final" ? R"("steps":)" : R"("step":)")};
}

// /dev/stdout and /dev/stderr may be pipes: who has started this process reads them anyhow.
bool is_standard_stream(const struct stat& file) {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat there = {};
    if (::fstat(fd, &there) == 0 && there.st_dev == file.st_dev && there.st_ino == file.st_ino) return true;
  }
  return false;
}

/// What stays of a metrics file if the run continues after a step.
struct Kept {
  std::uint64_t bytes = 0;  // from its beginning: the run up to that step
  std::string lines = {};   // of what follows, those that are true all the same
  std::int64_t step = 0;    // the last one there, skipped ones among them
};

/// Steps are in order: where the line of one begins that is no later than `step`, and not far from the end; 0: there is
/// none.
std::streamoff begin_near_end(std::ifstream& in, std::int64_t step, bool table) {
  constexpr std::streamoff kNear = 1 << 20;
  std::streamoff begin = 0;
  in.seekg(0, std::ios::end);
  if (const std::streamoff size = in.tellg(); size > kNear) {
    in.seekg(size - kNear);
    std::string line;
    std::getline(in, line);  // a part of one
    begin = in.tellg();
    while (std::getline(in, line) && line_of(line, table).event != kStepEvent) begin = in.tellg();
    const auto found = line_of(line, table);
    if (found.event != kStepEvent || !found.step || *found.step > step) begin = 0;
  }
  in.clear();
  in.seekg(begin);
  return begin;
}

// The run up to `step`, without what follows once it is done: the evaluation, the end, another resume.
Kept kept_of(const std::string& path, std::int64_t step) {
  std::ifstream in(path, std::ios::binary);
  const bool table = is_table(path);
  Kept kept;
  kept.bytes = static_cast<std::uint64_t>(begin_near_end(in, step, table));
  bool later = false;
  for (std::string line; std::getline(in, line) && !in.eof();) {
    const LineOf of = line_of(line, table);
    const bool of_step = of.event == kStepEvent || of.event == "checkpoint" || of.event == "skipped";
    later = later || (of.step && (of_step ? *of.step > step : *of.step >= step));
    if (!later) kept.bytes += line.size() + 1;
    if (!later && (of.event == kStepEvent || of.event == "skipped")) kept.step = of.step.value_or(kept.step);
    if (later && (of.event == "warning" || of.event == "restart" || of.event == "rewind")) kept.lines += line + '\n';
  }
  return kept;
}

UniqueFd open_file(const std::string& path, int flags) {
  // Without O_NONBLOCK a named pipe that nobody reads would block here for ever, and one whose reader is slow later on.
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | flags, 0644));
  const int opening = errno;
  struct stat there = {};
  if (fd ? ::fstat(fd.get(), &there) == 0 && S_ISFIFO(there.st_mode) && !is_standard_stream(there) : opening == ENXIO)
    throw UsageError(fmt::format("metrics file {} is a pipe or a socket", path),
                     "give a file: training would wait for whoever reads a pipe");
  if (!fd)
    throw IoError(fmt::format("cannot write metrics file {}: {}", path, errno_text(opening)),
                  "choose a path in an existing, writable directory");
  ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
  return fd;
}

/// An event's cells; empty: a table has no row for it. Their texts are words of ours and hexadecimal digits, so none
/// needs quotes.
std::string row_of(const JsonObject& event) {
  const std::string& kind = event.members().front().second.text();
  const bool final = kind == R"("final")";
  if (!final && kind != R"("step")" && kind != R"("eval")") return {};
  std::string row;
  const auto add_cell = [&](std::string_view column) {
    const auto& members = event.members();
    const std::string_view name = final && column == kColumns[1] ? std::string_view("steps") : column;
    const auto member = std::ranges::find(members, name, [](const auto& each) { return std::string_view(each.first); });
    std::string_view cell = member != members.end() ? std::string_view(member->second.text()) : "null";
    if (cell == "null") cell = {};
    if (cell.starts_with('"')) cell = cell.substr(1, cell.size() - 2);
    row.append(cell).push_back(',');
  };
  for (const char* column : kColumns) add_cell(column);
  for (const OwnMetric& metric : own_metrics()) add_cell(metric.name);
  row.back() = '\n';
  return row;
}

void add(JsonObject& event, const LossScaling& scaling) {
  event.add("loss_scale", scaling.scale)
      .add("good_steps", scaling.good_steps)
      .add("skipped_steps", scaling.skipped_steps);
}

JsonObject with_time(JsonObject event) { return event.add("unix_s", rounded(unix_seconds(), 1e6)); }

}  // namespace

/// The file, and lines on their way to it. Thread-safe.
class Metrics::File {
 public:
  File(const std::string& path, int flags) : path_(path), table_(is_table(path)), fd_(open_file(path, flags)) {}
  ~File() { write(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  bool table() const { return table_; }
  int fd() const { return fd_.get(); }
  std::string failure() {
    const std::lock_guard lock(mutex_);
    if (!lack_.empty()) return lack_;
    return why_.empty() ? std::string() : fmt::format("metrics file {} is cut: {}", path_, why_);
  }

  /// What it will never have, which is its failure().
  void lack(const std::string& text) {
    const std::lock_guard lock(mutex_);
    lack_ = text;
  }

  void add(std::string_view lines, bool soon) {
    const std::lock_guard lock(mutex_);
    lines_ += lines;
    if (const auto now = Clock::now(); soon || now >= next_write_ || lines_.size() > kMostTogether) {
      write();
      next_write_ = now + kTogether;
    }
  }

  void flush() {
    const std::lock_guard lock(mutex_);
    write();
  }

  /// What is to be said of it once: that it cannot be written.
  std::string take_warning() {
    const std::lock_guard lock(mutex_);
    if (why_.empty() || std::exchange(warned_, true)) return {};
    return fmt::format("metrics file {} cannot be written: {}; training continues {}", path_, why_,
                       given_up_ ? "without it" : "and keeps its lines for when it can");
  }

 private:
  // What a disk without space does not take is kept and tried again with the lines that follow.
  void write() {
    if (lines_.empty() || given_up_) return;
    const ssize_t written = ::write(fd_.get(), lines_.data(), lines_.size());
    const int error = written < 0 ? errno : ENOSPC;
    lines_.erase(0, static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
    why_ = lines_.empty() ? std::string() : errno_text(error);
    if (lines_.empty() || (error != EPIPE && lines_.size() <= kMostKept)) return;
    given_up_ = true;
    lines_.clear();
  }

  const std::string path_;
  const bool table_;
  const UniqueFd fd_;
  std::mutex mutex_;
  std::string lines_;
  Clock::time_point next_write_{};
  std::string why_;  // the last lines are not written; empty: they are
  std::string lack_;
  bool given_up_ = false;
  bool warned_ = false;
};

Metrics::Metrics(std::shared_ptr<File> file) : file_(std::move(file)) {}

Metrics::Metrics(const std::string& path) {
  if (path.empty()) return;
  file_ = std::make_shared<File>(path, O_TRUNC);
  if (file_->table()) file_->add(header_of_table(), /*soon=*/true);
}

Metrics Metrics::resumed(const std::string& path, std::int64_t step) {
  if (path.empty()) return {};
  Metrics metrics(std::make_shared<File>(path, 0));
  File& file = *metrics.file_;
  struct stat there = {};
  const bool regular = ::fstat(file.fd(), &there) == 0 && S_ISREG(there.st_mode);
  if (file.table() && (!regular || there.st_size == 0)) {
    file.add(header_of_table(), /*soon=*/true);
  } else if (regular) {
    std::string header;
    if (std::ifstream in(path); file.table() && (!std::getline(in, header) || header + '\n' != header_of_table()))
      throw UsageError(fmt::format("metrics file {} has other columns than this run", path), kOtherFile);
    const Kept kept = kept_of(path, step);
    if (const auto length = static_cast<off_t>(kept.bytes);
        length < there.st_size && ::ftruncate(file.fd(), length) != 0)
      throw IoError(fmt::format("cannot append to metrics file {}: {}", path, errno_text(errno)), kOtherFile);
    file.add(kept.lines, /*soon=*/true);
    metrics.last_step_ = kept.step;
    metrics.has_steps_ = !file.table() && there.st_size > 0;
  }
  return metrics;
}

void Metrics::write(const JsonObject& event, bool soon) {
  if (!file_) return;
  if (const auto row = file_->table() ? row_of(event) : event.text() + '\n'; !row.empty()) file_->add(row, soon);
  if (const auto warning = file_->take_warning(); !warning.empty()) log_warn("{}", warning);
}

void Metrics::flush() {
  if (file_) file_->flush();
}

void Metrics::look_for_gap(std::int64_t step, bool restarted) {
  if (!has_steps_ || last_step_ >= step) return;
  const auto text = fmt::format("metrics file {} lacks the steps from {} to {}, which could not be written",
                                file_->path(), last_step_ + 1, step);
  log_warn("{}", text);
  if (restarted) file_->lack(text);
}

std::string Metrics::failure() const { return file_ ? file_->failure() : std::string(); }

void Metrics::write(const data::DataSplits& splits) {
  for (const auto& dataset : {splits.train, splits.validation, splits.test, splits.whole}) {
    if (!file_ || dataset == nullptr) continue;
    const data::Dataset::Info& info = dataset->info();
    JsonObject json = {{"event", "data"}, {"name", info.name}, {"samples", info.size}};
    if (data::has_classes(*dataset)) {
      json.add("classes", info.classes);
      json.add("class_names", info.class_names);
      json.add("class_counts", info.class_counts);
    }
    if (!info.reading.empty()) json.add("reading", info.reading);
    write(json);
  }
}

void Metrics::write(const RunReport& r) {
  if (!file_) return;
  JsonObject settings;
  for (const auto& [name, value, from] : r.settings) settings.add(name, JsonObject{{"value", value}, {"from", from}});
  std::vector<JsonObject> ranks;
  for (const auto& [host, device] : r.ranks) ranks.push_back({{"host", host}, {"device", device}});
  JsonObject json = {{"event", "run"},
                     {"schema", RunReport::kSchema},
                     {"command", r.command},
                     {"lockstep", r.version},
                     {"model", r.model},
                     {"parameters", r.parameters},
                     {"trained_parameters", r.trained_parameters},
                     {"data", r.data},
                     {"data_sha256", r.data_sha256},
                     {"planned_steps", r.steps},
                     {"instruction_set", r.instruction_set},
                     {"ranks", ranks},
                     {"settings", settings}};
  if (!r.git_commit.empty()) json.add("git", JsonObject{{"commit", r.git_commit}, {"branch", r.git_branch}});
  write(with_time(std::move(json)));
}

void Metrics::write(const StepReport& r) {
  if (!file_) return;
  JsonObject json = {{"event", "step"},
                     {"step", r.step},
                     {"epoch", r.epoch},
                     {"loss", r.loss},
                     {"lr", r.lr},
                     {"grad_norm", r.grad_norm},
                     {"step_ms", rounded(r.step_ms, 1e4)},
                     {"comm_wait_ms", rounded(r.comm_wait_ms, 1e4)},
                     {"samples_per_s", rounded(r.samples_per_s, 10)},
                     {"samples", r.samples},
                     {"memory_bytes", r.memory_bytes}};
  if (r.scaling) add(json, *r.scaling);
  write(with_time(std::move(json)), /*soon=*/false);
}

void Metrics::write(const EvalReport& r) { write(with_time(json_of(r))); }

void Metrics::write_classes(const EvalReport& r, const std::vector<std::string>& names) {
  if (file_) write(json_of(Confusion(r.confusion), names).add("step", r.step));
}

void Metrics::write(const ResumeReport& r) {
  write({{"event", "resume"}, {"step", r.step}, {"world_size", r.world_size}});
}

void Metrics::write(const RestartReport& r) {
  write(with_time({{"event", "restart"}, {"attempt", r.attempt}, {"cause", r.cause}}));
}

void Metrics::write(const CheckpointReport& r) {
  write({{"event", "checkpoint"},
         {"step", r.step},
         {"bytes", r.bytes},
         {"write_ms", rounded(r.write_ms, 1e3)},
         {"held_up_ms", rounded(r.held_up_ms, 1e3)}});
}

void Metrics::write(const BalanceReport& r) {
  if (!file_) return;
  JsonObject json = {{"event", "balance"}, {"step", r.step}, {"shares", r.shares}};
  if (!r.own_ms.empty()) {
    std::vector<double> own;
    for (const double ms : r.own_ms) own.push_back(rounded(ms, 1e4));
    json.add("own_ms", own).add("expected_ms", rounded(r.expected_ms, 1e4));
  }
  write(with_time(std::move(json)));
}

void Metrics::write(const SkippedReport& r) {
  if (!file_) return;
  std::vector<JsonObject> causes;
  for (const auto& [rank, text] : r.causes) causes.push_back({{"rank", rank}, {"text", text}});
  write(
      with_time({{"event", "skipped"}, {"step", r.step}, {"epoch", r.epoch}, {"count", r.count}, {"causes", causes}}));
}

void Metrics::write(const RewindReport& r) {
  if (!file_) return;
  write(with_time({{"event", "rewind"}, {"step", r.step}, {"to", r.to}, {"count", r.count}, {"cause", r.cause}}));
}

void Metrics::take_warnings() {
  if (!file_ || file_->table()) return;
  set_warning_observer([file = file_](std::string_view text) {
    file->add(with_time({{"event", "warning"}, {"text", text}}).text() + '\n', /*soon=*/true);
  });
  observing_ = std::shared_ptr<void>(nullptr, [](void*) { set_warning_observer({}); });
}

void Metrics::write(const FinalReport& r) {
  observing_.reset();  // it is the last line
  if (!file_) return;
  JsonObject json = {{"event", "final"},
                     {"steps", r.steps},
                     {"epochs", r.epochs},
                     {"world_size", r.world_size},
                     {"wall_s", rounded(r.wall_s, 1e4)},
                     {"loss", r.loss},
                     {"accuracy", r.accuracy}};
  for (const auto& [name, value] : named_figures(r.auc, r.errors)) json.add(name, value);
  json.add("params_sha256", r.params_sha256);
  if (!r.ema_params_sha256.empty()) json.add("ema_params_sha256", r.ema_params_sha256);
  json.add("peak_memory_bytes", r.peak_memory_bytes);
  std::vector<JsonObject> times;
  for (const auto& [data, compute, wait] : r.times)
    times.push_back(
        {{"data_ms", rounded(data, 1e4)}, {"compute_ms", rounded(compute, 1e4)}, {"wait_ms", rounded(wait, 1e4)}});
  if (!times.empty()) json.add("times", times);
  if (r.skipped > 0) json.add("skipped", r.skipped);
  if (r.rewinds > 0) json.add("rewinds", r.rewinds);
  if (r.audits > 0) json.add("audits", r.audits);
  if (const auto& hook = r.hook) {
    json.add("comm_hook", hook->name)
        .add("comm_bytes", std::round(hook->bytes_sent))
        .add("comm_bytes_without_hook", std::round(hook->bytes_without_hook))
        .add("comm_fallbacks", hook->fallbacks);
  }
  if (r.scaling) add(json, *r.scaling);
  if (const auto& best = r.best) {
    json.add("best", JsonObject{{"metric", best->metric}, {"value", best->value}, {"step", best->step}})
        .add("gave_up", r.gave_up);
  }
  write(json);
}

}  // namespace lockstep::trainer
