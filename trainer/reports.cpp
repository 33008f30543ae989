#include "trainer/reports.h"

#include <chrono>

#include "base/kernel.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "trainer/status_server.h"
#include "trainer/survivor.h"
#include "trainer/tensorboard.h"

namespace lockstep::trainer {
namespace {

class MetricsFile final : public Follower {
 public:
  explicit MetricsFile(Metrics metrics) : metrics_(std::move(metrics)) {}
  using Follower::write;
  void write(const RunReport& report) override {
    metrics_.write(report);
    metrics_.take_warnings();
  }
  void write(const ResumeReport& report) override { metrics_.write(report); }
  void write(const RestartReport& report) override { metrics_.write(report); }
  void write(const RewindReport& report) override { metrics_.write(report); }
  void write(const data::DataSplits& splits) override { metrics_.write(splits); }
  void write(const StepReport& report) override { metrics_.write(report); }
  void write(const EvalReport& report) override { metrics_.write(report); }
  void write(const CheckpointReport& report) override { metrics_.write(report); }
  void write(const BalanceReport& report) override { metrics_.write(report); }
  void write(const SkippedReport& report) override { metrics_.write(report); }
  void write(const FinalReport& report) override { metrics_.write(report); }
  void flush() override { metrics_.flush(); }
  std::int64_t last_step() const override { return metrics_.last_step(); }
  void look_for_gap(std::int64_t step, bool restarted) override { metrics_.look_for_gap(step, restarted); }
  std::string failure() const override { return metrics_.failure(); }

 private:
  Metrics metrics_;
};

/// If the launcher has started this job again, as it says.
std::optional<RestartReport> restart() {
  const auto attempt = launcher_attempt();
  if (attempt < 1) return std::nullopt;
  return RestartReport{.attempt = attempt, .cause = env("LOCKSTEP_RESTART_CAUSE").value_or("")};
}

}  // namespace

bool follows_run(const TrainConfig& config) {
  return !config.metrics.empty() || !config.tensorboard.empty() || config.status_port;
}

Reports::Reports(const TrainConfig& config, const RunReport& run, const std::optional<checkpoint::Resumed>& resumed,
                 const data::DataSplits& splits, const StepReport* last, const RewindReport* rewound) {
  const std::int64_t done = resumed ? resumed->manifest.step : 0;
  if (config.status_port) followers_.push_back(make_status_server(config, done));
  if (!config.metrics.empty())
    followers_.push_back(std::make_unique<MetricsFile>(
        resumed || rewound != nullptr ? Metrics::resumed(config.metrics, done) : Metrics(config.metrics)));
  if (!config.tensorboard.empty()) followers_.push_back(make_tensorboard_follower(config.tensorboard, done));
  write(run);
  if (const auto again = restart()) write(*again);
  if (rewound != nullptr) write(*rewound);
  if (resumed) write(ResumeReport{.step = done, .world_size = static_cast<int>(std::ssize(run.ranks))});
  write(splits);
  if (!resumed) return;
  for (const auto& follower : followers_) {
    follower->look_for_gap(last != nullptr ? done - 1 : done, launcher_attempt() > 0);
    if (last != nullptr && follower->last_step() < done) follower->write(*last);
  }
}

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string Reports::failure() const {
  for (const auto& follower : followers_)
    if (auto failure = follower->failure(); !failure.empty()) return failure;
  return {};
}

CheckpointReport report_of(const checkpoint::Checkpoints::Written& written) {
  return {.step = written.step,
          .bytes = written.bytes,
          .write_ms = 1e3 * written.write_seconds,
          .held_up_ms = 1e3 * written.held_seconds};
}

std::int64_t Reports::memory_bytes(nn::Backend& backend, Clock::time_point now) {
  if (now < next_look_) return memory_bytes_;
  next_look_ = now + std::chrono::milliseconds(100);
  memory_bytes_ = backend.device().kind == DeviceKind::kCpu
                      ? resident_bytes()
                      : static_cast<std::int64_t>(backend.allocator().stats().bytes_held);
  return memory_bytes_;
}

}  // namespace lockstep::trainer
