// One training step: forward, backward, and the update as the sums arrive.
#pragma once

#include <atomic>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/data/loader.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/trainer/forward.h"
#include "lockstep/trainer/metrics.h"
#include "trainer/carried_state.h"
#include "trainer/in_flight.h"
#include "trainer/step_graphs.h"
#include "trainer/trace.h"

namespace lockstep::trainer {

/// The most samples of all ranks together in a step: up to here f32, in which they are counted, has every integer.
inline constexpr std::int64_t kMostSamples = std::int64_t{1} << 24;

/// Sums over the global batch.
struct StepTotals {
  double loss = 0;
  double correct = 0;
  double count = 0;
  double stops = 0;   // ranks that want to stop
  double unused = 0;  // gradients that are missing, where none may be
};

/// A step that the device has been given.
struct StepInFlight {
  std::int64_t step = 0;
  sampler::StepPlan plan;
  double lr = 0;
  std::optional<double> momentum = {};
  double targets = 0;  // of all ranks: what the loss is the mean of
  Clock::time_point begin;
  Clock::duration waited{};  // stood waiting for collectives
  bool norm = false;         // whether it finds the gradients' norm
};

/// TrainingStep::Options::norm_every, for those who follow a run: a CPU reads the gradients once more for it, which is
/// 4 % of a step of mlp; a GPU does it in passing, and its steps repeat what one of them has captured.
constexpr std::int64_t norm_interval(Device device) { return device.kind == DeviceKind::kCpu ? 20 : 1; }

/// What a training loop repeats, over a DistributedDataParallel, whose bucket callback and scalars it takes. Backend,
/// `ddp`, graphs, carried state and trace must outlive it; one thread uses it.
class TrainingStep {
 public:
  struct Options {
    nn::LossFunction loss = nn::make_loss();
    double clip_norm = 0;   // 0: no clipping
    double clip_value = 0;  // likewise
    // In the first step and each of so many, the gradients' norm is found also without clipping; 0: in none. With
    // graphs 0 or 1; of slices the same on all ranks.
    std::int64_t norm_every = 0;
    Trace* trace = nullptr;           // nullptr: none
    DType activations = DType::kF32;  // or kBF16 or kF16, where the backend computes in it
    bool dropout = false;             // whether the module has any; `seed` says what it drops
    std::uint64_t seed = 1;
    float loss_scale = 1;                      // of a loss that is the mean over the global batch
    std::optional<std::int32_t> ignored = {};  // the label of which the loss takes no account
    int accumulate = 1;                        // parts in which a rank's share of a step is computed
    bool in_step = false;  // every rank runs every part, also of no samples: there are collectives in it
    const comm::ReductionTree* tree = nullptr;  // `ddp`'s, along whose shards a step is computed; nullptr: none
    nn::MovingAverage* average = nullptr;       // of `ddp`'s parameters, which follows each step; nullptr: none
    nn::GradScaler* scaler = nullptr;           // of the losses, and the optimizer's; nullptr: they are not scaled
    /// On the CPU: of a step whose loss is not finite nothing stays but running statistics and the optimizer's count
    /// (forget_step()).
    bool skips_losses = false;
    bool late = false;                // parameters move all at once, after the last bucket's sums
    CarriedState* carried = nullptr;  // what the module carries from step to step, within an epoch; nullptr: nothing
  };

  TrainingStep(nn::Backend& backend, parallel::DistributedDataParallel& ddp, std::shared_ptr<nn::Optimizer> optimizer,
               SampleFormat format, const Options& options);
  ~TrainingStep() { ddp_.set_bucket_callback(nullptr); }
  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;

  /// Steps that repeat are captured in `graphs`, where the device can; nullptr (the beginning), and with a trace: none
  /// are.
  void set_graphs(StepGraphs* graphs) { graphs_ = graphs; }

  /// Gives the batch to the device. Valid as long as Backend::stage() says; undefined where the batch is empty.
  Inputs upload(const data::Batch& batch);
  /// Collective: step `step` (from 1) with learning rate `lr` and `momentum` (nn::StepOptions). Parameters stay as they
  /// were where the loss is not finite, or, with a scaler, the gradients; no rank returns before it has taken part in
  /// all collectives. On a device the step may still be under way then. Not while outcome_due().
  void run(std::int64_t step, const data::Batch& batch, double lr, std::optional<double> momentum = {});
  /// The same on inputs that have been uploaded.
  void run(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan, double lr);

  /// Collective, between steps: DistributedDataParallel::set_tree(). Gradients of the last step are gone.
  void set_tree(const comm::ReductionTree& tree);

  /// Collective, before hash_shards() that comes ahead of run() with this batch: losses are scaled as they will be
  /// there.
  void expect(const data::Batch& batch);
  /// On the CPU, with a tree and with the parameters that step `step` begins with: hashes of the gradients of `shards`,
  /// which `batch` has (DistributedDataParallel::shard_hashes()), computed on `copy`, a copy of the module; 0 for a
  /// shard without samples.
  std::vector<std::uint64_t> hash_shards(std::int64_t step, const data::Batch& batch, const comm::TreeNode& shards,
                                         nn::Module& copy, nn::Tape& tape);

  /// On the CPU, after a step: whether the losses of this rank's own samples were finite.
  bool own_loss_is_finite() const { return own_finite_; }
  /// On the CPU, after step `step` of `batch`: what of this rank's part is the first that is not finite
  /// (not_finite.h), in its passes or, with `gradients`, in the gradients that they leave. Computes them again; with
  /// `gradients` no step may follow. Empty: nothing is, or it is not known, as of gradients of shards.
  std::string first_not_finite(std::int64_t step, const data::Batch& batch, bool gradients);
  /// The optimizer does not count the last step, which has changed nothing.
  void forget_step() { optimizer_->set_steps(optimizer_->steps() - 1); }

  const nn::Optimizer& optimizer() const { return *optimizer_; }

  /// Before a step: whether this rank wants all to stop. Ranks that want it are in the step's totals.
  void ask_to_stop(bool mine);

  struct Outcome : StepInFlight {
    StepTotals totals;                                            // over the global batch
    double grad_norm = std::numeric_limits<double>::quiet_NaN();  // L2, before clipping; NaN where it is not found
    std::optional<LossScaling> scaling = {};
  };
  /// Outcomes come in the order of the steps, each to be taken once. How many have not been.
  std::size_t outcomes_waiting() const { return in_flight_.waiting(); }
  /// Whether one must be taken before the next run(): on the CPU after each, on a device one step later.
  bool outcome_due() const { return in_flight_.full(); }
  /// The oldest; waits for it. Throws what the step has failed with.
  Outcome take_outcome();

 private:
  void run(StepInFlight step, const Inputs& inputs);
  bool run_captured(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan);
  void compute(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan);
  void compute_part(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan, const sampler::Slice& part,
                    bool last);
  void compute_shards(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan);
  sampler::Slice shard_of(const sampler::StepPlan& plan, std::uint32_t shard) const;
  nn::Loss forward_shard(std::int64_t step, const Inputs& inputs, const sampler::StepPlan& plan, std::uint32_t shard,
                         nn::Module& module, nn::Tape& tape, nn::Backend& backend);
  double targets_of(const sampler::StepPlan& plan);
  void set_scale(double targets);
  Inputs rows_of(const Inputs& inputs, const sampler::Slice& part);
  void write_dropout_state(nn::Backend& backend, const nn::Tensor& to, std::int64_t step, const sampler::StepPlan& plan,
                           const sampler::Slice& part) const;
  void look_at(const nn::Loss& loss);
  void begin_update();
  void update_bucket(std::span<const std::size_t> slots);
  void clip_values(std::span<const std::size_t> slots);
  void end_update();
  bool finds_norm(std::int64_t step) const;
  /// All parameters after the last bucket's sums, and not each bucket's after its own.
  bool updates_late() const { return options_.late || needs_norm(); }
  bool needs_norm() const { return options_.clip_norm > 0 || options_.scaler != nullptr; }

  nn::Backend& backend_;
  parallel::DistributedDataParallel& ddp_;
  std::shared_ptr<nn::Optimizer> optimizer_;
  SampleFormat format_;
  Options options_;
  nn::Tape tape_;
  std::unique_ptr<LayerTrace> layers_;
  StepGraphs* graphs_ = nullptr;
  nn::Tensor dropout_state_;         // (3) i64; undefined without dropout
  std::uint64_t counted_ = 0;        // targets of the batch that was uploaded last, without those that are ignored
  float scale_ = 1;                  // of the losses of the step under way
  std::vector<std::size_t> summed_;  // parameters whose sums have come, of the update under way
  bool first_bucket_ = true;         // of that
  bool norm_ = false;                // whether that finds the gradients' norm
  bool choice_reported_ = false;     // DistributedDataParallel::bucket_choice()
  std::atomic<bool> own_finite_ = true;
  Clock::time_point waiting_since_;

  // What the host wants to know of a step: the sums of scalars over all ranks, then the gradients' squares (f64) and
  // what the scaler knows.
  nn::Tensor numbers_, squares_, scaling_;
  InFlight<StepInFlight> in_flight_;
};

/// Of a step that took so long: all but samples and memory, which the run knows.
StepReport report_of(const TrainingStep::Outcome& outcome, double seconds);

}  // namespace lockstep::trainer
