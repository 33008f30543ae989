#include "trainer/progress.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/log.h"
#include "base/scope.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "lockstep/nn/ops/backend.h"
#include "trainer/best.h"

namespace lockstep::trainer {
namespace {

constexpr auto kDrawEvery = std::chrono::milliseconds(100);
constexpr auto kCheckpointEvery = std::chrono::seconds(10);

Progress* g_current = nullptr;

// Columns of the terminal that shows stdout; 0: none does.
int terminal_columns() {
  struct winsize size = {};
  // A launcher owns the terminal and passes our bytes on.
  if (const auto said = env("LOCKSTEP_TTY")) {
    const auto words = split(*said, ' ');
    if (words.size() == 3) {
      static const UniqueFd terminal(::open(words[2].c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
      const auto prefix = parse_int(words[1]);
      if (prefix && ::ioctl(terminal.get(), TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
        return std::max(1, size.ws_col - static_cast<int>(*prefix));
    }
    const auto columns = parse_int(words[0]);
    return columns && *columns > 0 ? static_cast<int>(*columns) : 80;
  }
  // mpirun gives its ranks a pseudo-terminal even where its own output is a file.
  if (env("LOCKSTEP_LAUNCHER") || env("OMPI_COMM_WORLD_SIZE") || ::isatty(STDOUT_FILENO) == 0) return 0;
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string duration_text(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string accuracy_text(double accuracy) { return fmt::format("accuracy {:.2f} %", 100.0 * accuracy); }

// Small ones keep their digits.
std::string loss_text(double loss) {
  return loss != 0 && std::abs(loss) < 0.01 ? fmt::format("{:.3e}", loss) : fmt::format("{:.4f}", loss);
}

std::string rate_text(double samples_per_s) { return fmt::format("{:.0f} samples/s", samples_per_s); }

}  // namespace

Progress::Style Progress::style_for(int rank, bool quiet) {
  if (rank != 0 || quiet) return Style::kNone;
  return terminal_columns() > 0 ? Style::kBar : Style::kLines;
}

Progress::Progress(Style style, std::int64_t total_steps, std::int64_t epochs, std::int64_t log_every,
                   std::int64_t first_steps)
    : style_(style), total_steps_(total_steps), epochs_(epochs), log_every_(log_every), first_steps_(first_steps) {
  if (style_ != Style::kBar) return;
  g_current = this;
  set_log_hook(&Progress::clear_current);
}

Progress::~Progress() {
  if (style_ != Style::kBar) return;
  clear();
  set_log_hook(nullptr);
  g_current = nullptr;
}

void Progress::clear_current() {
  if (g_current != nullptr) g_current->clear();
}

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stdout);
  std::fflush(stdout);
  drawn_ = false;
}

void Progress::announce(const std::string& line) {
  if (style_ == Style::kNone) return;
  clear();
  std::puts(line.c_str());
  std::fflush(stdout);
}

void Progress::step(const StepReport& report) {
  if (style_ == Style::kLines && (report.step % log_every_ == 0 || report.step == first_steps_ + 1)) {
    announce(fmt::format("epoch {}/{}  step {}/{}  loss {}  lr {:.3g}  {}", report.epoch, epochs_, report.step,
                         total_steps_, loss_text(report.loss), report.lr, rate_text(report.samples_per_s)));
  } else if (style_ == Style::kBar) {
    const auto now = Clock::now();
    if (now - last_draw_ < kDrawEvery && report.step != total_steps_) return;
    last_draw_ = now;
    draw(report);
  }
}

void Progress::draw(const StepReport& report) {
  const double done = static_cast<double>(report.step) / static_cast<double>(std::max<std::int64_t>(1, total_steps_));
  const auto steps_here = static_cast<double>(std::max<std::int64_t>(1, report.step - first_steps_));
  const double left =
      seconds_between(start_, Clock::now()) / steps_here * static_cast<double>(total_steps_ - report.step);
  const std::string text =
      fmt::format(" epoch {}/{} step {}/{} loss {} {} ETA {}", report.epoch, epochs_, report.step, total_steps_,
                  loss_text(report.loss), rate_text(report.samples_per_s), duration_text(left));
  const int columns = std::max(1, terminal_columns() - 1);  // asked each time: windows are resized; the last one wraps
  const int room = std::min(30, columns - 2 - static_cast<int>(text.size()));
  std::string bar;
  if (room >= 5) {
    const auto filled = static_cast<std::size_t>(done * room);
    bar = fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", static_cast<std::size_t>(room) - filled);
  }
  std::string line = bar + text;
  line.resize(std::min(line.size(), static_cast<std::size_t>(columns)));
  std::fputs(fmt::format("\r{}\033[K", line).c_str(), stdout);
  std::fflush(stdout);
  drawn_ = true;
}

std::string figures_of(const EvalReport& report) {
  std::string text;
  if (!std::isnan(report.accuracy)) text += "  " + accuracy_text(report.accuracy);
  if (report.top5) text += fmt::format("  top-5 {:.2f} %", 100 * *report.top5);
  if (report.auc) text += fmt::format("  AUC {:.4f}", *report.auc);
  if (const auto& errors = report.errors) {
    text += fmt::format("  MAE {:.6g}  RMSE {:.6g}", errors->mae, errors->rmse);
    if (errors->r2) text += fmt::format("  R² {:.4f}", *errors->r2);
  }
  for (const auto& [name, value] : report.own) text += fmt::format("  {} {:.6g}", name, value);
  return text;
}

void Progress::evaluation(const EvalReport& report, std::int64_t epoch) {
  announce(fmt::format("epoch {}/{}  step {}  validation {}loss {}{} of {}{}", epoch, epochs_, report.step,
                       report.of_average ? "of the moving average: " : "", loss_text(report.loss), figures_of(report),
                       report.samples, report.best ? ", the best so far" : ""));
}

void Progress::checkpoint(const CheckpointReport& report) {
  const auto now = Clock::now();
  if (now < next_checkpoint_) return;
  next_checkpoint_ = now + kCheckpointEvery;
  announce(fmt::format("step {}  checkpoint of {} written in {:.2f} s, training stood still for {:.1f} ms", report.step,
                       human_bytes(static_cast<double>(report.bytes)), 1e-3 * report.write_ms, report.held_up_ms));
}

std::string note_of(Precision precision, DeviceKind kind) {
  if (precision == Precision::kF32) return "";
  const bool on_cpu = kind == DeviceKind::kCpu && precision == Precision::kBF16;
  return fmt::format(", {}{}", name_of(precision), on_cpu ? fmt::format(" ({})", nn::name_of(nn::cpu_bf16())) : "");
}

std::string describe(const checkpoint::Checkpoints::Summary& all, const std::string& directory, double seconds) {
  return fmt::format(
      "checkpoints: {} of {} in {}, {:.2f} s each to write; training stood still for {:.2f} s ({:.1f} %)", all.count,
      human_bytes(static_cast<double>(all.bytes)), directory, all.write_seconds, all.held_seconds,
      100 * all.held_seconds / seconds);
}

std::string describe(const HookReport& hook) {
  std::string text = fmt::format("{}: a rank sends {} of gradients per step instead of {} ({:.1f} %)", hook.name,
                                 human_bytes(hook.bytes_sent), human_bytes(hook.bytes_without_hook),
                                 100 * hook.bytes_sent / hook.bytes_without_hook);
  if (hook.fallbacks > 0)
    text += fmt::format("; {} bucket{} did not fit and were sent again as f32", hook.fallbacks,
                        hook.fallbacks == 1 ? "" : "s");
  return text;
}

void Progress::summary(const Summary& s) {
  clear();
  const double rate = s.train_s > 0 ? static_cast<double>(s.samples) / s.train_s : 0.0;
  const std::string steps = s.steps_here == s.final.steps ? fmt::to_string(s.final.steps)
                                                          : fmt::format("{} of {}", s.steps_here, s.final.steps);
  std::string result(trim(figures_of({.accuracy = s.final.accuracy, .auc = s.final.auc, .errors = s.final.errors})));
  if (!result.empty()) result += "  ";
  if (!std::isnan(s.final.loss)) result += fmt::format("loss {}  ", loss_text(s.final.loss));
  std::printf("%s", fmt::format("params_sha256 {}\n", s.final.params_sha256).c_str());
  if (!s.final.ema_params_sha256.empty())
    std::printf("%s", fmt::format("ema_params_sha256 {}\n", s.final.ema_params_sha256).c_str());
  std::printf("%s", fmt::format("{}{} steps in {:.1f} s on {} rank{}  {}  waiting for communication {:.2f} s ({:.1f} "
                                "%)\n",
                                result, steps, s.final.wall_s, s.final.world_size, s.final.world_size == 1 ? "" : "s",
                                rate_text(rate), s.comm_wait_s, s.train_s > 0 ? 100.0 * s.comm_wait_s / s.train_s : 0.0)
                        .c_str());
  if (const auto& best = s.final.best)
    std::printf("%s", fmt::format("best {} {:.6g}, at step {}{}\n", best->metric, best->value, best->step,
                                  s.final.gave_up ? ": none of the evaluations since was better, so the run ended" : "")
                          .c_str());
  if (!s.final.kept.empty()) std::printf("checkpoints of the best evaluations: %s\n", describe(s.final.kept).c_str());
  if (const auto& scaling = s.final.scaling)
    std::printf("%s", fmt::format("losses scaled by {:g} in the end  skipped_steps {}\n", scaling->scale,
                                  scaling->skipped_steps)
                          .c_str());
  if (s.final.hook) std::printf("%s\n", describe(*s.final.hook).c_str());
  for (const auto& straggler : s.stragglers) std::printf("straggler: %s\n", straggler.text.c_str());
  std::fflush(stdout);
}

}  // namespace lockstep::trainer
