#include "trainer/progress.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/signals.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::trainer {
namespace {

constexpr auto kDrawEvery = Millis(200), kLookEvery = Millis(200), kCountEvery = Millis(1000);
constexpr auto kCheckpointEvery = std::chrono::seconds(10);
constexpr int kPatienceMs = 1000;  // with a stdout that never blocks and takes nothing

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

// Terminals that cannot be redrawn, and those whose output is read afterwards.
bool wants_lines() {
  const std::string ci = env("CI").value_or("");
  return env("TERM").value_or("") == "dumb" || !(ci.empty() || ci == "false" || ci == "0");
}

bool takes_bytes(int fd, int wait_ms) {
  pollfd ready = {.fd = fd, .events = POLLOUT, .revents = 0};
  return ::poll(&ready, 1, wait_ms) == 1;
}

}  // namespace

RunPlan plan_of_run(const TrainConfig& config, const sampler::DistributedSampler& sampler,
                    const data::Dataset* validation, std::int64_t first_steps, std::int64_t total_steps) {
  const auto steps_per_epoch = static_cast<std::int64_t>(sampler.steps_per_epoch());
  const auto samples = static_cast<double>(validation != nullptr ? validation->size() : 0);
  const bool epochs_fit = config.eval_every <= total_steps / steps_per_epoch;
  return {.first_steps = first_steps,
          .total_steps = total_steps,
          .steps_per_epoch = steps_per_epoch,
          .evaluate_every = config.eval_steps > 0 ? config.eval_steps
                            : epochs_fit          ? config.eval_every * steps_per_epoch
                                                  : 0,
          .evaluation_steps = samples / static_cast<double>(sampler.config().global_batch),
          .checkpoint_every = config.checkpoint_every.value_or(steps_per_epoch),
          .checkpoint_at_end = !config.checkpoint_dir.empty(),
          .checkpoint_evaluation = config.keep_best > 0};
}

Progress::Style Progress::style_for(int rank, bool quiet) {
  if (rank != 0 || quiet) return Style::kNone;
  return !wants_lines() && terminal_columns() > 0 ? Style::kBar : Style::kLines;
}

Progress::Progress(Style style, const RunPlan& plan, std::int64_t log_every)
    : style_(style), plan_(plan), log_every_(log_every) {
  if (style_ != Style::kBar) return;
  g_current = this;
  set_log_hook(&Progress::clear_current);
  thread_ = start_thread([this] { follow_terminal(); });
}

Progress::~Progress() {
  if (style_ != Style::kBar) return;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    clear();
  }
  wake_.notify_all();
  thread_.join();
  set_log_hook(nullptr);
  g_current = nullptr;
}

void Progress::clear_current() {
  if (g_current == nullptr) return;
  const std::lock_guard lock(g_current->mutex_);
  g_current->clear();
}

void Progress::follow_terminal() {
  std::unique_lock lock(mutex_);
  while (!ended_) {
    wake_.wait_for(lock, kLookEvery);
    const auto now = Clock::now();
    const auto unchanged = now - last_change_;
    // Not at once: who has taken the bar off is about to write a line in its place.
    if (ended_ || !latest_ || unchanged < kDrawEvery) continue;
    if (!drawn_ || unchanged >= kCountEvery || terminal_columns() != columns_) draw(now);
  }
}

void Progress::put(std::string_view text) {
  if (failure_ == EPIPE) return;
  const BrokenPipesTolerated tolerated;
  std::fflush(stdout);  // what a program has written itself comes before
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      if (!takes_bytes(STDOUT_FILENO, kPatienceMs)) return;
    } else if (errno != EINTR) {
      failure_ = errno;
      return;
    }
  }
}

// Without the lock: the hook of log lines takes it.
void Progress::warn_of_failure() {
  if (failure_ == 0 || failure_told_) return;
  failure_told_ = true;
  log_warn("standard output: {}: what the run says there is lost, and training continues", errno_text(failure_));
}

void Progress::clear() {
  if (!drawn_) return;
  put("\r\033[J");
  drawn_ = false;
  last_change_ = Clock::now();
}

void Progress::draw(Clock::time_point now) {
  last_change_ = now;
  if (!takes_bytes(STDOUT_FILENO, 0)) return;
  columns_ = terminal_columns();
  put(fmt::format("\r{}\033[J\r", bar_line(standing(now), std::max(1, columns_ - 1))));  // the last column wraps
  drawn_ = true;
}

void Progress::say(const std::string& lines) {
  clear();
  put(lines);
}

Standing Progress::standing(Clock::time_point now) const {
  return {.epoch = latest_->epoch,
          .epochs = plan_.epochs(),
          .step = latest_->step,
          .steps = plan_.total_steps,
          .loss = latest_->loss,
          .seconds_left = pace_.seconds_left(now),
          .epoch_seconds = pace_.epoch_seconds(),
          .samples_per_s = pace_.samples_per_s(),
          .evaluated = evaluated_,
          .best = best_text_};
}

void Progress::announce(const std::string& line) {
  if (style_ == Style::kNone) return;
  {
    const std::lock_guard lock(mutex_);
    say(line + '\n');
  }
  warn_of_failure();
}

Progress::Pause::Pause(Progress& progress, Pace::Pause what, std::int64_t step)
    : progress_(progress), what_(what), step_(step) {
  const std::lock_guard lock(progress_.mutex_);
  progress_.pace_.pause_begins(Clock::now());
}

Progress::Pause::~Pause() {
  const std::lock_guard lock(progress_.mutex_);
  progress_.pace_.pause_ended(what_, step_, Clock::now());
}

void Progress::step(const StepReport& report) {
  if (style_ == Style::kNone) return;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    pace_.step_ended(report.step, report.samples - (latest_ ? latest_->samples : 0), now);
    latest_ = report;
    if (style_ == Style::kBar) {
      if (now - last_change_ >= kDrawEvery || report.step == plan_.total_steps) draw(now);
    } else if (report.step % log_every_ == 0 || report.step == plan_.first_steps + 1) {
      say(line_of(standing(now), report.lr, seconds_between(start_, now)) + '\n');
    }
  }
  warn_of_failure();
}

std::string Progress::compare(const EvalReport& report, const std::optional<BestEvaluation>& best) {
  // As the run takes it: of a moving average, where there is one.
  if (report.of_average && !of_average_) own_best_.reset();
  of_average_ = of_average_ || report.of_average;
  if (of_average_ != report.of_average) return "";
  const bool by_accuracy = !std::isnan(report.accuracy);
  const std::string metric = best ? best->metric : by_accuracy ? "accuracy" : "loss";
  const double value = value_in(report, metric);
  if (!std::isnan(value) && (!own_best_ || (by_accuracy ? value > own_best_->value : value < own_best_->value)))
    own_best_ = {.metric = metric, .value = value, .step = report.step};
  const auto& known = best ? best : own_best_;
  evaluated_ = fmt::format("{}{} {}", metric == "loss" ? "validation " : "", metric, value_text(metric, value));
  if (!known) return "";
  // Accuracies are known by their sign of percent.
  best_text_ = fmt::format("best {}{}", metric == "accuracy" ? "" : metric + ' ', value_text(metric, known->value));
  if (known->step == report.step) return ", the best so far";
  if (style_ == Style::kBar) return "";  // it has it
  return fmt::format(", best {} {} at step {}", metric, value_text(metric, known->value), known->step);
}

void Progress::evaluation(const EvalReport& report, std::int64_t epoch, const std::optional<BestEvaluation>& best) {
  if (style_ == Style::kNone) return;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    std::string line = fmt::format("epoch {}/{}  step {}  validation {}loss {}{} of {}{}", epoch, plan_.epochs(),
                                   report.step, report.of_average ? "of the moving average: " : "",
                                   loss_text(report.loss), figures_of(report), report.samples, compare(report, best));
    if (const auto seconds = pace_.epoch_seconds()) line += "  " + epoch_text(*seconds);
    // On a terminal the bar has them.
    if (style_ == Style::kLines) line += times_text(seconds_between(start_, now), pace_.seconds_left(now));
    say(line + '\n');
  }
  warn_of_failure();
}

void Progress::checkpoint(const CheckpointReport& report) {
  const auto now = Clock::now();
  if (now < next_checkpoint_) return;
  next_checkpoint_ = now + kCheckpointEvery;
  announce(fmt::format("step {}  checkpoint of {} written in {:.2f} s, training stood still for {:.1f} ms", report.step,
                       human_bytes(static_cast<double>(report.bytes)), 1e-3 * report.write_ms, report.held_up_ms));
}

void Progress::saved(const std::optional<session::SavedFile>& file) {
  if (file) announce(describe(*file));
}

void Progress::summary(const Summary& summary) {
  if (style_ == Style::kNone) return;
  {
    const std::lock_guard lock(mutex_);
    latest_.reset();
    say(text_of(summary));
  }
  warn_of_failure();
}

}  // namespace lockstep::trainer
