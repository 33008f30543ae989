// Loss and accuracy over an evaluation set, shared out among the ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// What a module returned for samples, in their order, and their targets, one each: labels, or numbers.
struct SampleOutputs {
  std::vector<float> outputs;  // (samples, K)
  std::vector<float> targets;
};

/// Of an evaluation on one rank, on the host: what the module's one output is of so many samples, row by row, and their
/// targets, numbers or labels.
struct EvaluatedBatch {
  std::size_t samples = 0;
  std::span<const float> outputs, targets;
  std::span<const std::int32_t> labels;
};

/// A metric of a program's own: sums over samples, added up over batches and ranks in f64, and what is made of them.
/// Sums of whole numbers are exact on any number of ranks. Both functions are called on the evaluation's thread, and
/// what they throw comes out of it.
struct OwnMetric {
  std::string name;      // of letters, digits and '_': in reports, the metrics file and --save-best
  std::size_t sums = 1;  // how many
  std::function<void(const EvaluatedBatch& batch, std::span<double> sums)> add = {};
  std::function<double(std::span<const double> sums)> value = {};  // NaN: it has none
  bool largest_is_best = true;
};

/// Runs a module over a data set. Every sample is looked at by exactly one rank, none twice. The group and the backend
/// must outlive it. The thread that uses the group uses it.
class Evaluator {
 public:
  /// Collective. `group`'s arenas are host memory. `dataset` is not nullptr. `batch`: samples of a forward pass on this
  /// rank, at least 1. `activations`: see with_activations(). `loss` is copied, and called as nn::LossFunction says.
  Evaluator(comm::ProcessGroup& group, nn::Backend& backend, std::shared_ptr<const data::Dataset> dataset,
            std::int64_t batch, int workers, DType activations = DType::kF32, nn::LossFunction loss = nn::make_loss());

  /// Reports also say how often the label is among the five likeliest classes, where samples have one label. The module
  /// then has one output, the logits; else run() throws UsageError.
  void count_top5() { top5_ = dataset_->targets_per_sample() == 1; }

  /// Reports also say what samples of each class are taken for, where samples have one label. The module then has one
  /// output, the logits. Throws UsageError for other data, and for more than kMostConfused classes.
  void count_confusion();
  static constexpr int kMostConfused = 1000;

  /// Reports also have the errors, where targets are numbers, and the area under the ROC curve, where samples have one
  /// label of two. The module then has one output, of as many numbers as there are targets, or the logits.
  void measure();

  /// Reports also have these, each with its functions and at least one sum. The module then has one output.
  void add_metrics(std::vector<OwnMetric> metrics) { metrics_ = std::move(metrics); }

  /// run() keeps what the module returns, where samples have one target; outputs() then has that of all ranks' samples,
  /// on rank 0. The module has one output, and memory holds all of them.
  void keep_outputs() { keeps_outputs_ = dataset_->targets_per_sample() == 1; }
  const SampleOutputs& outputs() const { return outputs_; }

  /// Samples and tokens of this label count for nothing, as the loss has it: neither in means nor in what else is
  /// reported.
  void ignore(std::optional<std::int32_t> label) { ignored_ = label; }

  /// The same result at any number of ranks, to the bit: passes are over the same samples then, whoever computes them,
  /// and their sums are added along a tree (comm: Note [Reduction tree]).
  void add_along_tree() { along_tree_ = true; }

  /// Collective. The module, which is on the backend, is in evaluation mode meanwhile and back in training mode
  /// afterwards: a fused one is a UsageError. Ranks have different numbers of batches: of a DistributedDataParallel
  /// give the module(). `step` is only passed on to the report. Where stops are deferred, a rank that is asked to stop
  /// looks at no further samples, and every rank's report says `stopped`.
  ///
  /// What the data set, the module or the loss throws comes out on this rank, before its part of the sums: the module
  /// stays in evaluation mode, and with other ranks the process must end then.
  EvalReport run(nn::Module& module, std::int64_t step);

 private:
  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  std::shared_ptr<const data::Dataset> dataset_;
  std::int64_t batch_;
  int workers_;
  DType activations_;
  nn::LossFunction loss_;
  bool top5_ = false;
  bool confusion_ = false;
  bool errors_ = false, ranking_ = false, keeps_outputs_ = false;
  std::vector<OwnMetric> metrics_;
  SampleOutputs outputs_;
  bool along_tree_ = false;
  std::optional<std::int32_t> ignored_;
  nn::Tape tape_;
  std::unique_ptr<comm::Arena> sums_;
};

}  // namespace lockstep::trainer
