// DistributedDataParallel, as PyTorch's tutorials call it: for training loops of one's own.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "trainer/replica.h"

namespace lockstep::trainer {

/// A module whose gradients are summed over the ranks of a group while backward computes them. A loop over it:
///
///   DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
///   const auto optimizer = nn::make_sgd(ddp.parameters(), {});
///   for (…) {
///     optimizer->zero_grad();  // here, or anywhere in front of backward
///     const nn::Var y = ddp(tape, x);
///     const nn::Loss loss = nn::cross_entropy(tape, y, labels, 1.0f / all_ranks_samples);
///     tape.backward(loss.value);  // collectives start while it runs; behind it, gradients are the sums
///     optimizer->step(lr);
///     tape.reset();
///   }
///
/// Note [Sums]
/// Gradients are summed, where PyTorch's are averaged. A loss that is scaled by 1 / samples of all ranks gives the
/// global batch's gradient, however many samples each rank has; one scaled by 1 / (own samples · group.size()) gives
/// PyTorch's average of averages.
///
/// It is a module itself, whose child is named "module"; nn::state_of() takes that off, as it does for DataParallel. A
/// pass that is not recorded computes and nothing else, but for buffers (see broadcast_buffers); to evaluate on some of
/// the ranks alone, call module(). A pass through the module itself that is recorded and walked backwards is a
/// UsageError: its gradients would be summed by nobody. Module, group and the backend must outlive its last pass, and
/// it the tape's next reset or backward; where they do not, that is a UsageError. Several may share a group, but
/// neither a module nor the tape of a pass. One thread uses it.
class DistributedDataParallel final : public nn::Module, private nn::BackwardListener {
 public:
  struct Options {
    /// At most one: the index of the device that the module is on. Empty: whichever that is.
    std::vector<int> device_ids = {};
    /// The same; results stay on the module's device.
    std::optional<int> output_device = std::nullopt;
    /// Before the first pass, and the first pass behind each whose backward sums, rank 0's buffers (running statistics)
    /// become everyone's: a collective.
    bool broadcast_buffers = true;
    /// Parameters may be left out of a pass, on some ranks or on all. Those that no rank has used have no gradient
    /// then, and Optimizer::step() leaves them alone. Without it, that is a UsageError on every rank, out of
    /// Tape::backward(), which names them. Either way backward ends when the sums are there, on a GPU too.
    bool find_unused_parameters = false;
    /// MiB; default: ProcessGroup::preferred_bucket_bytes().
    std::optional<double> bucket_cap_mb = std::nullopt;
    double first_bucket_mb = 1.0;
  };

  /// Collective: checks the arguments on all ranks, compares modules and options, and rank 0's parameters and buffers
  /// become everyone's. Throws UsageError for a module without parameters to train, or that another one wraps, or that
  /// is not as a whole on one device, the group's; OutOfStepError where ranks differ, naming what and which; PeerError
  /// on the others.
  DistributedDataParallel(nn::Module& module, comm::ProcessGroup& group, const Options& options);
  DistributedDataParallel(nn::Module& module, comm::ProcessGroup& group)
      : DistributedDataParallel(module, group, Options()) {}

  nn::Module& module() const { return module_; }
  /// Those that are trained: for the optimizer.
  const std::vector<nn::NamedParameter>& parameters() const { return replica_->parameters(); }
  const ddp::Reducer& reducer() const { return replica_->reducer(); }

  nn::Var forward(nn::Tape& tape, nn::Var x) override;
  nn::Var operator()(nn::Tape& tape, nn::Var x) { return forward(tape, x); }
  std::string type_name() const override { return "DistributedDataParallel"; }
  using nn::Module::lifetime;

  /// In place of a step's forward and backward, on a rank that has no samples in it, or none for its last part.
  void contribute_nothing();

  /// While one lives, passes begun by forward() only add to this rank's gradients: of a global batch in several parts,
  /// all but the last. Several may live at once, and end in any order. An optimizer refuses such gradients until a pass
  /// has summed them.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(DistributedDataParallel& ddp) : ddp_(ddp), lifetime_(ddp.lifetime()) { ++ddp.no_syncs_; }
    ~NoSync() {
      if (lifetime_.alive()) --ddp_.no_syncs_;
    }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DistributedDataParallel& ddp_;
    Lifetime::Ref lifetime_;
  };
  NoSync no_sync() { return NoSync(*this); }

  /// Collective: throws OutOfStepError unless all ranks' parameters are bitwise equal: now and then, and before they
  /// are saved.
  void check() const { replica_->check(); }

  /// The loop's own number of the step that comes next, the same on all ranks: messages name it, and ranks compare it,
  /// so that one that leaves out a step is found, instead of its gradients going into the sums of other steps. Without
  /// it steps are counted here, which tells the ranks' loops apart at their end alone.
  void set_step(std::int64_t step) { step_ = step - 1; }

 private:
  void begin_pass();
  void begin_gradients();
  void finish();
  void backward_begins() override;
  void node_walked() override;
  void backward_ended() override;

  nn::Module& module_;
  std::optional<Replica> replica_;
  int no_syncs_ = 0;        // that live
  bool pass_syncs_ = true;  // of the pass that forward() has begun
  bool buffers_due_ = true;
  bool sums_held_ = false;  // gradients may still be those that finish() has summed
  std::int64_t step_ = 0;
};

}  // namespace lockstep::trainer
