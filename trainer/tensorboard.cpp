#include "trainer/tensorboard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "lockstep/nn/ops/transfer.h"
#include "trainer/event_file.h"
#include "trainer/scores.h"

namespace lockstep::trainer {
namespace {

// Of steps that are shorter than 5 ms, some: TensorBoard shows a thousand of a run, and an hour's file of all of them
// would take gigabytes.
constexpr double kStepsPerMs = 0.2, kStepsAtOnce = 1000;

std::string cell(std::string_view text) {
  std::string made;
  for (const char c : one_line(text)) {
    if (c == '|' || c == '*' || c == '_' || c == '`' || c == '<' || c == '\\') made += '\\';
    made += c;
  }
  return made;
}

std::string row(std::initializer_list<std::string_view> texts) {
  std::string made = "|";
  for (const std::string_view text : texts) made += " " + cell(text) + " |";
  return made + "\n";
}

/// Facts of the run, then its settings.
std::string table_of(const RunReport& run) {
  constexpr std::string_view kRule = "|---|---|---|\n";
  std::vector<std::string> ranks;
  for (const auto& [host, device] : run.ranks) ranks.push_back(host + ": " + device);
  std::string text = "| run | | |\n" + std::string(kRule);
  text += row({"command", run.command, ""});
  text += row(
      {"model", run.model, fmt::format("{} parameters, {} of them trained", run.parameters, run.trained_parameters)});
  text += row({"data", run.data, run.data_sha256});
  text += row({"steps", fmt::to_string(run.steps), ""});
  text += row({"ranks", fmt::to_string(run.ranks.size()), join(ranks, "; ")});
  text += row({"lockstep", run.version, run.instruction_set});
  if (!run.git_commit.empty()) text += row({"git", run.git_commit, run.git_branch});
  text += "\n| setting | value | from |\n" + std::string(kRule);
  for (const auto& [name, value, from] : run.settings) text += row({name, value, from});
  return text;
}

class TensorBoard final : public Follower {
 public:
  TensorBoard(const std::string& directory, std::int64_t done) : file_(directory), done_(done) {
    event_.begin(unix_seconds(), 0);
    event_.set_file_version();
    add();
    event_.begin(unix_seconds(), done > 0 ? done + 1 : 0);
    event_.set_session_start();
    add();
  }

  using Follower::write;
  void write(const RunReport& report) override {
    event_.begin(unix_seconds(), done_);
    event_.add_text("settings", table_of(report));
    add();
    file_.hurry();
  }

  void write(const StepReport& report) override {
    scale_ = report.scaling ? report.scaling->scale : 1;
    allowed_ = std::min(allowed_ + kStepsPerMs * report.step_ms, kStepsAtOnce);
    if (allowed_ < 1) {
      left_out_ = report;
      return;
    }
    allowed_ -= 1;
    left_out_.reset();
    add_step(report);
  }

  void write(const TensorReport& report) override {
    add_left_out();
    event_.begin(unix_seconds(), report.step);
    for (const auto& [name, parameter] : report.parameters) {
      event_.add_histogram("parameters/" + name, histogram_of(nn::values_of(report.backend, parameter->value())));
      if (parameter->has_gradient())
        event_.add_histogram("gradients/" + name,
                             histogram_of(nn::values_of(report.backend, parameter->gradient()), 1 / scale_));
    }
    add();
  }

  void write(const EvalReport& report) override {
    add_left_out();
    event_.begin(unix_seconds(), report.step);
    const std::string group = report.of_average ? "validation_ema/" : "validation/";
    for (const auto& [name, value] : all_figures(report))
      if (!std::isnan(value)) event_.add_scalar(group + name, value);
    add();
    file_.hurry();
  }

  void write(const FinalReport& /*report*/) override {
    add_left_out();
    file_.hurry();
  }

  std::string failure() const override { return file_.failure(); }

 private:
  void add() {
    record_.clear();
    event_.append_to(record_);
    file_.add(record_);
  }

  void add_step(const StepReport& report) {
    event_.begin(unix_seconds(), report.step);
    event_.add_scalar("train/loss", report.loss);
    event_.add_scalar("train/lr", report.lr);
    if (!std::isnan(report.grad_norm)) event_.add_scalar("train/grad_norm", report.grad_norm);
    event_.add_scalar("train/samples_per_s", report.samples_per_s);
    event_.add_scalar("train/step_ms", report.step_ms);
    event_.add_scalar("train/comm_wait_ms", report.comm_wait_ms);
    event_.add_scalar("train/memory_bytes", static_cast<double>(report.memory_bytes));
    if (report.scaling) event_.add_scalar("train/loss_scale", report.scaling->scale);
    add();
  }

  void add_left_out() {
    if (const auto report = std::exchange(left_out_, std::nullopt)) add_step(*report);
  }

  EventFile file_;
  std::int64_t done_;
  double allowed_ = kStepsAtOnce;       // steps
  std::optional<StepReport> left_out_;  // the last step, if it was
  double scale_ = 1;                    // by which the gradients of the last step are too large
  Event event_;
  std::string record_;
};

}  // namespace

std::unique_ptr<Follower> make_tensorboard_follower(const std::string& directory, std::int64_t done) {
  return std::make_unique<TensorBoard>(directory, done);
}

}  // namespace lockstep::trainer
