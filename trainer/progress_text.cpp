#include "trainer/progress_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "base/text.h"
#include "data/class_report.h"
#include "lockstep/nn/ops/backend.h"
#include "trainer/best.h"

namespace lockstep::trainer {
namespace {

constexpr int kLeastBar = 5, kMostBar = 30;

std::string bar(double done, int columns) {
  const auto filled = static_cast<std::size_t>(std::clamp(done, 0.0, 1.0) * columns);
  return fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", static_cast<std::size_t>(columns) - filled);
}

}  // namespace

std::string value_text(const std::string& metric, double value) {
  if (metric == "accuracy") return fmt::format("{:.2f} %", 100 * value);
  return metric == "loss" ? loss_text(value) : fmt::format("{:.6g}", value);
}

std::string duration_text(double seconds) {
  const auto s = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e12) + 0.5);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string loss_text(double loss) {
  return loss != 0 && std::abs(loss) < 0.01 ? fmt::format("{:.3e}", loss) : fmt::format("{:.4f}", loss);
}

std::string rate_text(double samples_per_s) {
  return fmt::format("{:.{}f} samples/s", samples_per_s, samples_per_s < 10 ? 2 : 0);
}

std::string epoch_text(double seconds) { return fmt::format("{:.3g} s/epoch", seconds); }

std::string times_text(double elapsed_seconds, const std::optional<double>& seconds_left) {
  std::string text = "  elapsed " + duration_text(elapsed_seconds);
  if (seconds_left) text += "  ETA " + duration_text(*seconds_left);
  return text;
}

std::string line_of(const Standing& s, double lr, double elapsed_seconds) {
  std::string line = fmt::format("epoch {}/{}  step {}/{}  loss {}  lr {:.3g}  {}", s.epoch, s.epochs, s.step, s.steps,
                                 loss_text(s.loss), lr, rate_text(s.samples_per_s));
  if (s.epoch_seconds) line += "  " + epoch_text(*s.epoch_seconds);
  return line + times_text(elapsed_seconds, s.seconds_left);
}

std::string bar_line(const Standing& s, int columns) {
  std::vector<std::string> first = {fmt::format("epoch {}/{}", s.epoch, s.epochs),
                                    fmt::format("step {}/{}", s.step, s.steps), "loss " + loss_text(s.loss)};
  if (s.seconds_left) first.push_back("ETA " + duration_text(*s.seconds_left));
  std::string line = join(first, " ");
  for (std::size_t left_out = 1; columns_of(line) > columns && left_out <= 2; ++left_out)
    line = join(std::span(first).subspan(left_out), " ");
  if (columns_of(line) > columns) return cut_columns(line, columns);
  for (const std::string& more : {s.best, s.evaluated, s.epoch_seconds ? epoch_text(*s.epoch_seconds) : std::string(),
                                  s.samples_per_s > 0 ? rate_text(s.samples_per_s) : std::string()}) {
    if (more.empty()) continue;
    if (columns_of(line) + 2 + columns_of(more) > columns) return line;
    line += "  " + more;
  }
  const int room = std::min(kMostBar, columns - columns_of(line) - 4);
  if (room < kLeastBar) return line;
  return line + "  " + bar(static_cast<double>(s.step) / static_cast<double>(std::max<std::int64_t>(1, s.steps)), room);
}

std::string figures_of(const EvalReport& report) {
  std::string text;
  if (!std::isnan(report.accuracy)) text += "  accuracy " + value_text("accuracy", report.accuracy);
  if (report.top5) text += fmt::format("  top-5 {:.2f} %", 100 * *report.top5);
  if (report.auc) text += fmt::format("  AUC {:.4f}", *report.auc);
  if (const auto& errors = report.errors) {
    text += fmt::format("  MAE {:.6g}  RMSE {:.6g}", errors->mae, errors->rmse);
    if (errors->r2) text += fmt::format("  R² {:.4f}", *errors->r2);
  }
  for (const auto& [name, value] : report.own) text += fmt::format("  {} {:.6g}", name, value);
  return text;
}

std::string title_of(const TrainConfig& config, const data::Dataset& dataset, int ranks, std::uint64_t global_batch,
                     const std::string& device, DeviceKind kind) {
  const std::string parts = config.shards > 0      ? fmt::format(" in {} shards", config.shards)
                            : config.local_sgd > 0 ? fmt::format(", averaged every {} steps", config.local_sgd)
                                                   : "";
  return fmt::format("training {} on {} ({}) with {} rank{}, global batch {}{}, {}{}", config.model.name,
                     dataset.name(), data::samples_text(dataset), ranks, ranks == 1 ? "" : "s", global_batch, parts,
                     device, note_of(config.precision, kind));
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

std::string text_of(const Summary& s) {
  const double rate = s.train_s > 0 ? static_cast<double>(s.samples) / s.train_s : 0.0;
  const std::string steps = s.steps_here == s.final.steps ? fmt::to_string(s.final.steps)
                                                          : fmt::format("{} of {}", s.steps_here, s.final.steps);
  std::string text = fmt::format("params_sha256 {}\n", s.final.params_sha256);
  if (!s.final.ema_params_sha256.empty()) text += fmt::format("ema_params_sha256 {}\n", s.final.ema_params_sha256);
  std::string result(trim(figures_of({.accuracy = s.final.accuracy, .auc = s.final.auc, .errors = s.final.errors})));
  if (!result.empty()) result += "  ";
  if (!std::isnan(s.final.loss)) result += fmt::format("loss {}  ", loss_text(s.final.loss));
  text += fmt::format("{}{} steps in {:.1f} s on {} rank{}  {}  waiting for communication {:.2f} s ({:.1f} %)\n",
                      result, steps, s.final.wall_s, s.final.world_size, s.final.world_size == 1 ? "" : "s",
                      rate_text(rate), s.comm_wait_s, s.train_s > 0 ? 100.0 * s.comm_wait_s / s.train_s : 0.0);
  if (const auto& best = s.final.best)
    text += fmt::format("best {} {:.6g}, at step {}{}\n", best->metric, best->value, best->step,
                        s.final.gave_up ? ": none of the evaluations since was better, so the run ended" : "");
  if (!s.final.kept.empty()) text += fmt::format("checkpoints of the best evaluations: {}\n", describe(s.final.kept));
  if (const auto& scaling = s.final.scaling)
    text += fmt::format("losses scaled by {:g} in the end  skipped_steps {}\n", scaling->scale, scaling->skipped_steps);
  if (s.final.audits > 0)
    text +=
        fmt::format("{} step{} audited: no rank computed otherwise\n", s.final.audits, s.final.audits == 1 ? "" : "s");
  if (s.final.skipped > 0)
    text += fmt::format("{} step{} left out for bad batches\n", s.final.skipped, s.final.skipped == 1 ? "" : "s");
  if (s.final.rewinds > 0)
    text += fmt::format("went back to a checkpoint {} time{} after divergence\n", s.final.rewinds,
                        s.final.rewinds == 1 ? "" : "s");
  if (s.final.hook) text += describe(*s.final.hook) + '\n';
  for (const auto& straggler : s.stragglers) text += fmt::format("straggler: {}\n", straggler.text);
  return text;
}

}  // namespace lockstep::trainer
