#include "lockstep/trainer/metrics.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <string_view>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/text.h"
#include "data/class_report.h"

#include "trainer/confusion.h"
#include "trainer/scores.h"

namespace lockstep::trainer {
namespace {

// JSON has no NaN and no infinity.
std::string number(double value) { return std::isfinite(value) ? fmt::format("{}", value) : "null"; }

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string text_of(const HookReport& hook) {
  return fmt::format(R"(,"comm_hook":"{}","comm_bytes":{:.0f},"comm_bytes_without_hook":{:.0f},"comm_fallbacks":{})",
                     hook.name, hook.bytes_sent, hook.bytes_without_hook, hook.fallbacks);
}

std::string text_of(const LossScaling& scaling) {
  return fmt::format(R"(,"loss_scale":{},"good_steps":{},"skipped_steps":{})", scaling.scale, scaling.good_steps,
                     scaling.skipped_steps);
}

// The number after `name` in a line of ours.
std::optional<std::int64_t> number_in(const std::string& line, std::string_view name) {
  const auto at = line.find(name);
  if (at == std::string::npos) return std::nullopt;
  const auto begin = at + name.size();
  return parse_int(line.substr(begin, line.find_first_of(",}", begin) - begin));
}

// /dev/stdout and /dev/stderr may be pipes: who has started this process reads them anyhow.
bool is_standard_stream(const struct stat& file) {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat there = {};
    if (::fstat(fd, &there) == 0 && there.st_dev == file.st_dev && there.st_ino == file.st_ino) return true;
  }
  return false;
}

// How many bytes of a metrics file describe the run up to `step`, without what follows once it is done: the evaluation,
// the end, another resume.
std::uint64_t length_until(const std::string& path, std::int64_t step) {
  std::ifstream in(path, std::ios::binary);
  std::uint64_t length = 0;
  for (std::string line; std::getline(in, line) && !in.eof(); length += line.size() + 1) {
    const bool of_step = line.starts_with(R"({"event":"step")") || line.starts_with(R"({"event":"checkpoint")");
    const auto told = number_in(line, line.starts_with(R"({"event":"final")") ? R"("steps":)" : R"("step":)");
    if (told && (of_step ? *told > step : *told >= step)) break;
  }
  return length;
}

/// Of the best evaluation, which is there.
std::string text_of(const FinalReport& r) {
  return fmt::format(R"(,"best":{{"metric":"{}","value":{},"step":{}}},"gave_up":{})", r.best->metric,
                     number(r.best->value), r.best->step, r.gave_up);
}

}  // namespace

Metrics::Metrics(const std::string& path) : Metrics(path, O_TRUNC) {}

Metrics Metrics::resumed(const std::string& path, std::int64_t step) {
  Metrics metrics(path, 0);
  struct stat there = {};
  if (metrics.fd_ && ::fstat(metrics.fd_->get(), &there) == 0 && S_ISREG(there.st_mode)) {
    const auto length = static_cast<off_t>(length_until(path, step));
    if (length < there.st_size && ::ftruncate(metrics.fd_->get(), length) != 0)
      throw IoError(fmt::format("cannot append to metrics file {}: {}", path, errno_text(errno)),
                    "choose another --metrics file");
  }
  return metrics;
}

Metrics::Metrics(const std::string& path, int flags) : path_(path) {
  if (path.empty()) return;
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
  fd_ = std::make_shared<UniqueFd>(std::move(fd));
}

void Metrics::write_line(std::string line) {
  if (!fd_ || !failure_.empty()) return;
  line += '\n';
  const ssize_t written = ::write(fd_->get(), line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return;
  failure_ =
      fmt::format("metrics file {} is cut: {}", path_, written < 0 ? errno_text(errno) : "no space left on device");
  log_warn("{}; training continues without it", failure_);
}

void Metrics::write(const data::DataSplits& splits) {
  if (!fd_) return;
  for (const auto& dataset : {splits.train, splits.validation, splits.test, splits.whole}) {
    if (dataset == nullptr) continue;
    const data::Dataset::Info& info = dataset->info();
    JsonObject json = {{"event", "data"}, {"name", info.name}, {"samples", info.size}};
    if (data::has_classes(*dataset)) {
      json.add("classes", info.classes);
      json.add("class_names", info.class_names);
      json.add("class_counts", info.class_counts);
    }
    if (!info.reading.empty()) json.add("reading", info.reading);
    write_line(json.text());
  }
}

void Metrics::write(const RunReport& r) {
  if (!fd_) return;
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
  write_line(json.add("unix_s", unix_seconds()).text());
}

void Metrics::write(const StepReport& r) {
  if (!fd_) return;
  write_line(fmt::format(
      R"({{"event":"step","step":{},"epoch":{},"loss":{},"lr":{},"grad_norm":{},"step_ms":{:.4f},"comm_wait_ms":{:.4f},"samples_per_s":{:.1f},"samples":{}{},"unix_s":{:.6f}}})",
      r.step, r.epoch, number(r.loss), number(r.lr), number(r.grad_norm), r.step_ms, r.comm_wait_ms, r.samples_per_s,
      r.samples, r.scaling ? text_of(*r.scaling) : std::string(), unix_seconds()));
}

void Metrics::write(const EvalReport& r) { write_line(json_of(r).add("unix_s", unix_seconds()).text()); }

void Metrics::write_classes(const EvalReport& r, const std::vector<std::string>& names) {
  if (!fd_) return;
  write_line(json_of(Confusion(r.confusion), names).add("step", r.step).text());
}

void Metrics::write(const ResumeReport& r) {
  write_line(fmt::format(R"({{"event":"resume","step":{},"world_size":{}}})", r.step, r.world_size));
}

void Metrics::write(const CheckpointReport& r) {
  write_line(fmt::format(R"({{"event":"checkpoint","step":{},"bytes":{},"write_ms":{:.3f},"held_up_ms":{:.3f}}})",
                         r.step, r.bytes, r.write_ms, r.held_up_ms));
}

void Metrics::take_warnings() {
  if (!fd_) return;
  // A warning that this fails to write may not be one.
  set_warning_observer([fd = fd_](std::string_view text) {
    const std::string line = JsonObject{{"event", "warning"}, {"text", text}, {"unix_s", unix_seconds()}}.text() + '\n';
    static_cast<void>(::write(fd->get(), line.data(), line.size()) > 0);
  });
  observing_ = std::shared_ptr<void>(nullptr, [](void*) { set_warning_observer({}); });
}

void Metrics::write(const FinalReport& r) {
  observing_.reset();  // it is the last line
  std::string figures;
  for (const auto& [name, value] : named_figures(r.auc, r.errors))
    figures += fmt::format(R"(,"{}":{})", name, number(value));
  write_line(fmt::format(
      R"({{"event":"final","steps":{},"epochs":{},"world_size":{},"wall_s":{:.4f},"loss":{},"accuracy":{}{},"params_sha256":"{}"{},"peak_memory_bytes":[{}]{}}})",
      r.steps, r.epochs, r.world_size, r.wall_s, number(r.loss), number(r.accuracy), figures, r.params_sha256,
      r.ema_params_sha256.empty() ? std::string() : fmt::format(R"(,"ema_params_sha256":"{}")", r.ema_params_sha256),
      fmt::join(r.peak_memory_bytes, ","),
      (r.hook ? text_of(*r.hook) : "") + (r.scaling ? text_of(*r.scaling) : "") + (r.best ? text_of(r) : "")));
}

}  // namespace lockstep::trainer
