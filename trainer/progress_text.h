// What progress says of a run, as text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoints.h"
#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"
#include "lockstep/data/dataset.h"
#include "lockstep/trainer/config.h"
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

/// How far a run is.
struct Standing {
  std::int64_t epoch = 0, epochs = 0, step = 0, steps = 0;
  double loss = 0;
  std::optional<double> seconds_left = {}, epoch_seconds = {};
  double samples_per_s = 0;
  std::string evaluated = {}, best = {};  // "accuracy 97.22 %", "best 97.50 %"; empty: there was no evaluation
};

/// A line of at most so many columns. Where they are few, the bar is left out first, then the rate, the time per epoch,
/// the last evaluation, the best one, and where even the rest is too long, the epoch and the step. What is left begins
/// in the same way, so a terminal that cuts the line off takes away the same.
std::string bar_line(const Standing& standing, int columns);

/// The line of a log: "epoch 1/10  step 50/230  loss 0.2513  lr 0.001  1234 samples/s  4.1 s/epoch  elapsed 0:12  ETA
/// 1:23".
std::string line_of(const Standing& standing, double lr, double elapsed_seconds);

/// A value of evaluations by its name: "97.22 %" of an accuracy, others as they are.
std::string value_text(const std::string& metric, double value);
/// "0:07", "1:02:03".
std::string duration_text(double seconds);
/// Small losses keep their digits.
std::string loss_text(double loss);
std::string rate_text(double samples_per_s);
std::string epoch_text(double seconds);
/// "  elapsed 0:12  ETA 1:23".
std::string times_text(double elapsed_seconds, const std::optional<double>& seconds_left);
/// "  accuracy 97.22 %  top-5 99.90 %", "  MAE 41.2  RMSE 53.1  R² 0.4912": what there is beside the loss.
std::string figures_of(const EvalReport& report);
/// "bf16: a rank sends 1.2 MB of gradients in a step in place of 2.4 MB (50.0 %)".
std::string describe(const HookReport& hook);
/// What a run's checkpoints in `directory` have taken of its `seconds`.
std::string describe(const checkpoint::Checkpoints::Summary& checkpoints, const std::string& directory, double seconds);
/// "training cnn on digits (1437 samples) with 2 ranks, global batch 64, cpu, 1 thread".
std::string title_of(const TrainConfig& config, const data::Dataset& dataset, int ranks, std::uint64_t global_batch,
                     const std::string& device, DeviceKind kind);
/// What follows the description of a device: nothing for f32, ", bf16 (AVX512-BF16)" for a CPU that computes it so.
std::string note_of(Precision precision, DeviceKind kind);
/// The lines at the end of a run, each with its newline.
std::string text_of(const Summary& summary);

}  // namespace lockstep::trainer
