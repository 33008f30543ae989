// DistributedDataParallel, as PyTorch's tutorials call it.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/misuse.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/bound_gradients.h"

namespace lockstep::parallel {

class ShardedParameters;

inline constexpr double kMostBucketMib = 1 << 20;  // 1 TiB

/// A module whose gradients are summed over the ranks of a group while backward computes them. A loop over it:
///
///   DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
///   const auto optimizer = nn::make_sgd(ddp.parameters(), {});
///   for (…) {
///     optimizer->zero_grad();  // here, or anywhere before backward
///     const nn::Var y = ddp(tape, x);
///     const nn::Loss loss = nn::cross_entropy(tape, y, labels, 1.0f / all_ranks_samples);
///     tape.backward(loss.value);  // collectives start while it runs; after it, gradients are the sums
///     optimizer->step(lr);
///     tape.reset();
///   }
///
/// Note [Sums]
/// Gradients are summed, where PyTorch's are averaged. A loss that is scaled by 1 / samples of all ranks gives the
/// global batch's gradient, however many samples each rank has; one scaled by 1 / (own samples · group.size()) gives
/// PyTorch's average of averages.
///
/// Note [Steps in shards]
/// With Options::tree a step has the same bits at any number of ranks: the global batch is that tree's number of
/// shards, of which this rank computes ReductionTree::run_of(its rank), each by a pass of its own:
///
///   const comm::ReductionTree& tree = group.define_tree(8);
///   DistributedDataParallel ddp(model, group, {.tree = &tree});
///   for (…) {
///     optimizer->zero_grad();
///     ddp.run_shards(tape, all_shards_samples, samples_of, [&](const DistributedDataParallel::ShardPass& pass) {
///       return nn::cross_entropy(pass.tape, pass.module(pass.tape, x_of(pass.shard)), labels_of(pass.shard),
///                                1.0f / all_shards_samples).value;
///     });
///     optimizer->step(lr);
///   }
///
/// Kernels must then have the same bits for the same shard wherever it is computed: the same number of threads, the
/// same instruction set. With Options::shards_at_once a rank computes several of them at a time, each on a thread of
/// its own with a copy of the module that shares the parameters' memory: the loss is then called on these threads too,
/// at the same time. Statistics of batch normalisation are each shard's own; running ones become the
/// mean of the shards', by their samples.
///
/// Note [ZeRO]
/// With Options::zero each rank updates its slice of every bucket (ddp: Note [Sharded updates]), with an optimizer that
/// remembers nothing of the rest:
///
///   DistributedDataParallel ddp(model, group, {.zero = 1});
///   const auto optimizer = nn::make_adamw(ddp.parameters(), {}, {}, ddp.share());
///
/// The loop is the same, and so are parameters, to the bit, but where NCCL sums. Then step() is collective; after
/// backward a gradient holds sums in this rank's slice alone, so zero_grad() comes before each backward that begins a
/// step, and an optimizer that was made without share() is a UsageError. A loop that calls Optimizer::update() by
/// itself (set_bucket_callback()) reads parameters after the next pass has begun, or wait_for_parameters(); with
/// start_gathering_parameters() they come from the other ranks during its next pass. From its first update of a step
/// until then parameters may be half-written: where ranks share memory, the others write into them.
/// Parameters lie in memory of the group as long as the DistributedDataParallel is there, so group and backend must
/// outlive it, and not its last pass alone. A step() after it is a UsageError.
///
/// It is a module itself, whose child is named "module"; nn::state_of() takes that off, as it does for DataParallel. A
/// pass that is not recorded computes and nothing else, but for buffers (see broadcast_buffers); to evaluate on some of
/// the ranks alone, call module(). A pass through the module itself that is recorded and walked backwards is a
/// UsageError: its gradients would be summed by nobody. Module, group and the backend must outlive its last pass, and
/// it the tape's next reset or backward; where they do not, that is a UsageError. Several may share a group, but
/// neither a module nor the tape of a pass.
///
/// One thread at a time uses it: a call from another one is a UsageError from when a pass begins that is recorded until
/// its backward has returned, or its tape is reset.
///
/// `lockstep train` is a loop over it (trainer/step.h).
class DistributedDataParallel final : public nn::Module, private nn::BackwardListener {
 public:
  struct Options {
    /// At most one: the index of the device that the module is on. Empty: whichever that is.
    std::vector<int> device_ids = {};
    /// The same; results stay on the module's device.
    std::optional<int> output_device = std::nullopt;
    /// Before the first pass, and the first pass after each that is recorded without a NoSync (whether or not it is
    /// walked), rank 0's buffers (running statistics) become everyone's: a collective.
    bool broadcast_buffers = true;
    /// A pass may leave out parameters, on some ranks or on all. Parameters that no rank has used have no gradient
    /// then, and Optimizer::step() skips them. Without this option, Tape::backward() throws a UsageError on every rank
    /// and names them.
    bool find_unused_parameters = false;
    /// Each pass leaves out the same parameters on a rank: they are found in the first step, and later steps do not
    /// wait for that. A pass with another graph is a UsageError on every rank, with the changed parameters. In place of
    /// find_unused_parameters; not with a tree.
    bool static_graph = false;
    /// Gradients are parts of the buckets, and end with the DistributedDataParallel. Without it they have memory of
    /// their own, and never move: for code that keeps them or binds them elsewhere. That is as much memory again, and
    /// two copies per step. Not with a tree.
    bool gradient_as_bucket_view = true;
    /// MiB; default: ProcessGroup::preferred_bucket_bytes().
    std::optional<double> bucket_mb = std::nullopt;
    /// Instead of bucket_mb: the first steps, some 30 to 90, try several sizes and keep the fastest (ddp: Note
    /// [Bucket tuning], bucket_choice()). Not with zero, whose parameters lie in the buckets.
    bool tune_bucket_mb = false;
    double first_bucket_mb = 1.0;
    /// On a device, backward returns before the host knows whether a parameter was unused: the caller reads
    /// unused_count() and calls refuse_unused(). Not with find_unused_parameters, with which backward always waits.
    bool defer_unused_check = false;
    /// The group's (ProcessGroup::define_tree()), along which shards are summed (Note [Steps in shards]); nullptr:
    /// ranks are summed. Not with a module that is a DataParallel, that synchronises batch normalisations, or without
    /// broadcast_buffers.
    const comm::ReductionTree* tree = nullptr;
    /// 1: updates and what optimizers remember are sharded over the ranks (Note [ZeRO]). Not with a module that is a
    /// DataParallel, nor with a communication hook. 0: every rank updates all.
    int zero = 0;
    /// Of this rank's shards, with a tree, on the CPU: more than one for a module that has a factory (nn::build), which
    /// builds copies on what `shard_backend` makes. The constructor calls both once for each copy, on its own thread;
    /// they issue no collectives, and what they throw ends it on all ranks.
    int shards_at_once = 1;
    std::function<std::unique_ptr<nn::Backend>()> shard_backend = nullptr;
  };

  /// Collective: checks the arguments on all ranks, compares modules and options, and rank 0's parameters and buffers
  /// become everyone's. Throws UsageError for a module without parameters to train, for one that is wrapped already or
  /// not wholly on the group's device, and for impossible options; OutOfStepError, naming the difference and the ranks,
  /// if ranks differ; PeerError on the others.
  DistributedDataParallel(nn::Module& module, comm::ProcessGroup& group, const Options& options);
  DistributedDataParallel(nn::Module& module, comm::ProcessGroup& group)
      : DistributedDataParallel(module, group, Options()) {}

  /// Issues nothing. With zero it waits for parameters that are on their way, unless an exception unwinds.
  ~DistributedDataParallel() override;

  nn::Module& module() const { return module_; }
  comm::ProcessGroup& group() const { return group_; }
  /// Those that are trained: for the optimizer. Their names are those of module(), and of the module inside if that is
  /// a DataParallel.
  const std::vector<nn::NamedParameter>& parameters() const { return gradients_->parameters(); }
  /// For the optimizer of parameters(): this rank's slices (Note [ZeRO]); without zero empty, which means all of each.
  /// The exchange in it may outlive this, and refuses its optimizer then.
  nn::OptimizerShare share() const;
  /// With zero (else UsageError), those of rank `rank`, by parameter.
  const std::vector<nn::ParameterSlice>& slices_of(int rank) const;
  /// Collective, after all updates of a step, for a loop that calls Optimizer::update() by itself: what optimizers of
  /// slices have moved begins to come from all ranks. Parameter::value() waits for it, and so does a pass, layer by
  /// layer (parallel: Note [Gathers during forward]). At the latest the next pass begins it.
  void start_gathering_parameters() const;
  /// Parameters are complete, for tensors too that were taken of them before: what optimizers of slices have moved has
  /// come from all ranks. Collective.
  void wait_for_parameters() const;
  /// Collective: what the optimizers of slices remember, as a whole on rank `root`, nothing elsewhere: in the order of
  /// Optimizer::moments(), each in the parameter's layout. Throws UsageError without zero, and for an optimizer of
  /// other parameters or slices.
  std::vector<std::vector<std::byte>> gather_moments(const nn::Optimizer& optimizer, int root) const;
  /// Collective: the reverse, into each rank's moments. `whole` is rank `root`'s, of the sizes that gather_moments()
  /// returns; other ranks' is not looked at.
  void scatter_moments(nn::Optimizer& optimizer, const std::vector<std::vector<std::byte>>& whole, int root) const;
  const ddp::Reducer& reducer() const { return gradients_->reducer(); }

  nn::Var forward(nn::Tape& tape, nn::Var x) override;
  nn::Vars forward_all(nn::Tape& tape, const nn::Vars& inputs) override;
  /// On the devices of a DataParallel, if that is what the module is.
  nn::Loss forward_loss(nn::Tape& tape, const nn::Vars& inputs, const nn::Tensor& targets, const nn::LossFunction& loss,
                        float scale) override;
  std::string type_name() const override { return "DistributedDataParallel"; }
  using nn::Module::lifetime;

  /// In place of a step's forward and backward, on a rank that has no samples in it, or none for its last part.
  void contribute_nothing();

  /// What all ranks have in a step (join()).
  struct JoinedStep {
    std::int64_t samples = 0;  // of all ranks together; 0: none has any left
    int ranks = 0;             // that have some
    explicit operator bool() const { return samples > 0; }
  };
  /// Collective, before each step, for ranks whose inputs last for different numbers of steps, which no sampler has
  /// made even (PyTorch's Join): of each rank, how many samples it has in the step. A loop over it ends on all ranks at
  /// once, and gradients are those of all samples that the step has:
  ///
  ///   while (const auto step = ddp.join(batch.count())) {
  ///     optimizer->zero_grad();
  ///     if (batch.count() > 0)
  ///       tape.backward(nn::cross_entropy(tape, ddp(tape, batch.x), batch.labels, 1.0f / step.samples).value);
  ///     else
  ///       ddp.contribute_nothing();
  ///     optimizer->step(lr);
  ///     batch = next();
  ///   }
  ///
  /// A loss scaled by 1 / (own samples · step.ranks) gives the average over ranks that have any, as Join's
  /// divide_by_initial_world_size=False. Throws UsageError on every rank where one has fewer than 0.
  JoinedStep join(std::int64_t own_samples);

  /// What a shard is computed with, valid during the call.
  struct ShardPass {
    std::uint32_t shard;        // of all of the step's
    nn::Tape& tape;             // empty
    nn::Module& module;         // this rank's, or a copy with the same parameters
    nn::Backend& backend;       // the module's
    const nn::Tensor& scalars;  // (kScalars) f32, zero: numbers of this shard that are summed along with gradients
  };
  /// With a tree, in place of a step's forward and backward: calls `loss` for each of this rank's shards that has
  /// samples, Options::shards_at_once of them at a time, and walks what it returns backwards. Afterwards, and from the
  /// bucket callback on, gradients are the sums over all shards. The passes on the calling thread are on `tape`. What
  /// scalars() hold is this rank's beside its shards' own. `samples_of(shard)` are known to all ranks. If `loss`
  /// throws, the shards under way end first, and the first one's error comes out; the process must end then. Throws
  /// UsageError where gradients of the last step are still there.
  void run_shards(nn::Tape& tape, std::int64_t all_samples, FunctionRef<std::int64_t(std::uint32_t shard)> samples_of,
                  FunctionRef<nn::Var(const ShardPass& pass)> loss);
  /// Collective, between steps, after zero_grad(): from now on ranks have the runs of `tree`, the group's, over as many
  /// shards (ProcessGroup::define_tree() with other shares): the same bits, computed by others. What runs before on a
  /// device has ended. Storage of gradients may move and grow. Throws UsageError without a tree, with one of other
  /// shards, and where gradients are still there.
  void set_tree(const comm::ReductionTree& tree);

  /// With a tree, on the CPU: whether, from the next step on, run_shards() finds a hash of each shard's gradients
  /// before they are added: it costs a reading of them. Throws UsageError otherwise.
  void hash_shards(bool wanted);
  /// Of the last step, for this rank's shards in their order: hash_of_gradients(); 0: it had no samples, or they were
  /// not wanted.
  std::span<const std::uint64_t> shard_hashes() const { return shard_hashes_; }
  /// Another module with the same parameters, in the same memory, and with buffers of its own. Whoever changes a value
  /// calls changed() of both. Throws UsageError for a module without a factory (nn::build), or whose factory builds
  /// another one.
  std::unique_ptr<nn::Module> copy_of_module(nn::Backend& backend) const;

  /// While one lives, passes begun by forward() only add to this rank's gradients: of a global batch in several parts,
  /// all but the last. Several may live at once, and end in any order, also after the DistributedDataParallel. An
  /// optimizer refuses such gradients until a pass has summed them.
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

  /// Called within backward() and contribute_nothing() for each bucket in order, when work given to the backend's
  /// stream finds its sums: an optimizer may move those parameters (indices into parameters()) while later buckets are
  /// still on their way. Parameters that no rank has used come in no bucket. The indices are valid during the call.
  /// What it throws ends backward; the process must end then (ddp::Reducer). It stays, with what it refers to, until
  /// the next set_bucket_callback(); nullptr: none.
  void set_bucket_callback(std::function<void(std::span<const std::size_t>)> callback) {
    on_bucket_ = std::move(callback);
  }

  /// (kScalars) f32 on the module's device, zero at first: numbers of this rank, a loss or a count, that are summed
  /// over the ranks along with the gradients. What it holds when a backward that sums begins is sent; it keeps its
  /// content.
  static constexpr std::int64_t kScalars = ddp::Reducer::kTailFloats;
  const nn::Tensor& scalars();
  /// Their sums: from the first bucket's callback until the next step begins. A view of the buckets' memory, as is
  /// unused_count(): copy what is read later, or after this has ended.
  nn::Tensor summed_scalars() const;

  /// Collective, before the first step, once: `hook` carries the buckets, in place of an allreduce. It is this one's
  /// alone. Throws UsageError for nullptr, a second one, one with zero or a tree, and what CommHook::check() refuses;
  /// OutOfStepError where ranks name different ones.
  void register_comm_hook(std::shared_ptr<ddp::CommHook> hook);

  /// Collective: throws OutOfStepError unless all ranks' parameters are bitwise equal: now and then, and before they
  /// are saved.
  void check() const;
  /// The same of the buffers too, for where broadcast_buffers() has made them equal.
  void check_with_buffers() const;
  /// Collective: rank 0's buffers become everyone's now; before they are used or saved.
  void broadcast_buffers();
  /// Collective: its parameters too, for whoever has changed them on rank 0 between two passes (a checkpoint that was
  /// read).
  void broadcast_state();
  /// What rank 0 sends of them to each of the others in a step.
  std::size_t buffer_bytes() const { return buffer_arena_ != nullptr ? buffer_arena_->bytes() : 0; }

  /// The loop's own number of the next step, the same on all ranks. Messages name it, and ranks compare it: so a rank
  /// that leaves out a step is found, and its gradients do not go into sums of other steps. Without this call steps are
  /// counted here, and a difference between the ranks' loops shows only at their end.
  void set_step(std::int64_t step) { step_ = step - 1; }

  /// The order of buckets, by parameters' names: the order in which gradients became ready in the first step; empty
  /// before it, and with zero.
  std::vector<std::string> bucket_order() const;
  /// Before the first step: the order of an earlier run. Ignored unless it names these parameters, each once,
  /// and with zero.
  void set_bucket_order(const std::vector<std::string>& names);

  /// With Options::tune_bucket_mb, once it is chosen.
  const std::optional<ddp::BucketChoice>& bucket_choice() const { return gradients_->bucket_choice(); }
  bool choosing_buckets() const { return gradients_->tunes_bucket_bytes(); }
  /// Before the first step, with tune_bucket_mb (else UsageError): an earlier run's choice, BucketChoice::bucket_bytes,
  /// above 0. Nothing is tried then.
  void set_bucket_choice(std::size_t bytes);

  /// Whether it is the caller who checks for unused parameters: Options::defer_unused_check, on a device.
  bool defers_unused_check() const { return defers_unused_check_; }
  /// (1) f32 on the device: the number of missing gradients of all ranks together in the last step.
  nn::Tensor unused_count() const;
  /// Collective: throws the UsageError that names them.
  [[noreturn]] void refuse_unused() { gradients_->reducer().refuse_unused(); }

  // For steps that a device captures as a graph.
  /// Addresses stay from here on, and no step waits on the host for what is unused.
  bool settled() const { return gradients_->settled() && !reducer().finds_unused(); }
  /// A step that was captured, and not to its end, is forgotten.
  void abandon_step() { gradients_->abandon(); }

 private:
  void share_buffers();
  void sync_buffers();
  int buffers_root() const;
  void list_statistics();
  void make_shard_copies(const Options& options);
  void begin_sharded_step();
  void check_cleared(const char* what) const;
  void run_turn(nn::Tape& tape, FunctionRef<std::int64_t(std::uint32_t)> samples_of,
                FunctionRef<nn::Var(const ShardPass&)> loss);
  void run_shard(nn::Tape& tape, std::uint32_t shard, std::size_t number, std::int64_t samples,
                 FunctionRef<nn::Var(const ShardPass&)> loss);
  void finish_sharded_step(std::int64_t all_samples);
  void check_intact() const;
  void begin_pass();
  void begin_pass(nn::Tape& tape);
  void begin_gradients();
  void begin_reduction();
  void finish();
  void backward_begins() override;
  void node_walked() override;
  void backward_ended() override;

  nn::Module& module_;
  comm::ProcessGroup& group_;
  nn::Backend* backend_ = nullptr;
  std::vector<nn::NamedParameter> frozen_;  // the module's that are not trained
  Lifetime::Ref module_lifetime_, group_lifetime_;
  std::optional<BoundGradients> gradients_;
  std::shared_ptr<ShardedParameters> sharded_;  // nullptr: every rank updates all
  std::function<void(std::span<const std::size_t>)> on_bucket_;
  nn::Tensor scalars_;  // undefined: nobody has asked for them

  struct SharedBuffer {
    nn::Tensor* mine;
    nn::Tensor sent;  // its place in the arena
  };
  std::unique_ptr<comm::Arena> buffer_arena_;  // nullptr: there is nothing to send
  std::vector<SharedBuffer> buffers_;

  // With a tree:
  struct ShardCopy;
  struct Statistic {
    std::size_t buffer = 0;  // of the module's
    nn::Tensor before;       // its value before the step
    std::size_t place = 0;   // of its sum over shards: floats into the reducer's tail; 0: it counts steps
  };
  const comm::ReductionTree* tree_;
  std::vector<nn::NamedBuffer> module_buffers_;
  std::vector<Statistic> statistics_;
  std::size_t statistics_floats_ = 0;
  std::vector<std::unique_ptr<ShardCopy>> shard_copies_;  // for the second, third, … shard at a time
  std::vector<std::int64_t> samples_of_turn_;             // by shard
  std::vector<std::exception_ptr> shard_errors_;          // likewise
  bool hashes_shards_ = false;
  std::vector<std::uint64_t> shard_hashes_;  // of the last step's
  std::size_t counted_by_ = 0;               // whose buffers have counted the step: 0, or a copy's number
  bool in_shards_ = false;                   // run_shards() is at it

  ThreadId owner_thread_ = nullptr;  // that has pass_ under way
  Lifetime::Ref pass_;               // the tape's, until backward has walked it
  int no_syncs_ = 0;                 // that live
  bool pass_syncs_ = true;           // of the pass that forward() has begun
  bool buffers_due_ = true;
  bool defers_unused_check_;
  bool sums_held_ = false;  // gradients may still be those that finish() has summed
  std::int64_t step_ = 0;
};

/// What ranks compare of a module before they train it together: how many parameters and buffers there are; then each
/// one's place, name, dtype and shape, and of a parameter whether it is trained.
std::vector<std::pair<std::string, std::string>> manifest_of(const nn::Module& module);

/// Batch normalisation over all ranks' samples: what torch.nn.SyncBatchNorm.convert_sync_batchnorm does, in place.
/// Collective: from now on, in training mode, all BatchNorm layers of `module` take mean and variance over the samples
/// of all ranks, in forward and in backward, so that ranks compute what one process would on the global batch. The
/// ranks run the same passes in the same order, also a rank that has no samples: with inputs of no rows. `group`, whose
/// arenas are on the module's device, must outlive the module's training (a pass without it is a UsageError), and not
/// the module; its other collectives have to keep their places among these (comm Note [Same order]). Returns how many
/// layers there are. Where ranks have different ones, one throws OutOfStepError and the others PeerError.
int convert_sync_batchnorm(nn::Module& module, comm::ProcessGroup& group);

}  // namespace lockstep::parallel
