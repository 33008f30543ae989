// What a person sees while it trains: a bar on a terminal, plain lines elsewhere, nothing on other ranks than 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoints.h"
#include "lockstep/base/deadline.h"
#include "lockstep/trainer/metrics.h"
#include "trainer/stragglers.h"

namespace lockstep::trainer {

struct Summary {
  FinalReport final;
  std::int64_t steps_here = 0;  // of final.steps, those that this process has done
  std::int64_t samples = 0;     // trained on, by all ranks
  double train_s = 0;           // in training steps
  double comm_wait_s = 0;       // of it, rank 0 stood waiting for collectives
  std::vector<Straggler> stragglers = {};
};

/// "bf16: a rank sends 1.2 MB of gradients in a step in place of 2.4 MB (50.0 %)".
std::string describe(const HookReport& hook);
/// What a run's checkpoints in `directory` have taken of its `seconds`.
std::string describe(const checkpoint::Checkpoints::Summary& checkpoints, const std::string& directory, double seconds);
/// What follows the description of a device: nothing for f32, ", bf16 (AVX512-BF16)" for a CPU that computes it so.
std::string note_of(Precision precision, DeviceKind kind);

/// Only one may exist at a time: log lines take its bar off the terminal first. While it lives, the thread that uses it
/// is the only one that logs.
/// "  accuracy 97.22 %  top-5 99.90 %", "  MAE 41.2  RMSE 53.1  R² 0.4912": what there is beside the loss.
std::string figures_of(const EvalReport& report);

class Progress {
 public:
  enum class Style { kNone, kLines, kBar };

  /// kBar on a terminal (or under a launcher that says it draws on one), kLines elsewhere; kNone for rank > 0 or quiet.
  static Style style_for(int rank, bool quiet);

  /// `first_steps`: how many of them an earlier process has done.
  Progress(Style style, std::int64_t total_steps, std::int64_t epochs, std::int64_t log_every,
           std::int64_t first_steps = 0);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// A line that stays: "training cnn on digits …".
  void announce(const std::string& line);
  void step(const StepReport& report);
  void evaluation(const EvalReport& report, std::int64_t epoch);
  /// At most one in ten seconds; the metrics file has all.
  void checkpoint(const CheckpointReport& report);
  void summary(const Summary& summary);

 private:
  void draw(const StepReport& report);
  void clear();
  static void clear_current();

  Style style_;
  std::int64_t total_steps_, epochs_, log_every_, first_steps_;
  std::atomic<bool> drawn_ = false;  // data workers warn too, which clears it
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_{};
  Clock::time_point next_checkpoint_{};  // when a line may follow the one before
};

}  // namespace lockstep::trainer
