// A module's gradients as the slots of a reducer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/layers/module.h"

namespace lockstep::ddp {
class BucketTuner;
}

namespace lockstep::parallel {

/// A slot for each parameter.
std::vector<ddp::SlotSpec> slots_of(const std::vector<nn::NamedParameter>& parameters);

/// Of the gradients that the parameters have: 64 bits that differ, but for rare accidents, where any of their bits do.
/// On the CPU.
std::uint64_t hash_of_gradients(const std::vector<nn::NamedParameter>& parameters);

/// Binds each trained parameter's gradient to the reducer's arena, or to memory of its own, which is copied there and
/// back, and marks it ready from the tape's hook, so that collectives run during backward. Group, backend, parameters
/// and the tree of `options` must outlive its last step; one thread uses it. Gradients in the arena end with it. A step
/// that an exception cuts short leaves collectives under way: end the process then (ddp::Reducer).
class BoundGradients {
 public:
  /// Collective: allocates the arena. `parameters` are the slots, whose Parameter::on_ready it takes until it ends.
  /// Without `as_views` gradients stay where they are: for whoever keeps them. Not with shards.
  BoundGradients(comm::ProcessGroup& group, nn::Backend& backend, std::vector<nn::NamedParameter> parameters,
                 const ddp::BucketLimits& limits, const ddp::Reducer::Options& options, bool as_views = true);
  ~BoundGradients();
  BoundGradients(const BoundGradients&) = delete;
  BoundGradients& operator=(const BoundGradients&) = delete;

  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }
  ddp::Reducer& reducer() { return reducer_; }
  const ddp::Reducer& reducer() const { return reducer_; }

  /// Before a backward pass writes gradients: buckets take the order and the size that the ranks have come to, and
  /// gradients that parameters hold move along.
  void apply_layout();
  /// Gradients are where they will stay: from the second step with samples on, or when the size of buckets is chosen.
  bool settled() const { return settled_ && !tuning_ && !next_bytes_; }
  /// The order of buckets, by parameters' names; empty while the ranks have not come to one.
  std::vector<std::string> order() const;
  /// Before the first step: the order that an earlier run has come to. Ignored unless it names these parameters, each
  /// once.
  void set_order(const std::vector<std::string>& names);

  /// Before the first step: the size of buckets is chosen in the first steps after the order (ddp: Note [Bucket
  /// tuning]).
  void tune_bucket_bytes() { tuning_ = true; }
  bool tunes_bucket_bytes() const { return tuning_; }
  /// Instead of that: the choice of an earlier run.
  void set_bucket_bytes(std::size_t bytes);
  /// What was measured; nothing before the choice.
  const std::optional<ddp::BucketChoice>& bucket_choice() const { return choice_; }

  /// Instead of that, the order stays as it is.
  void keep_order() { agreed_ = settled_ = true; }

  /// From here to finish(), gradients that become ready are reduced. Those that parameters hold already are added to.
  void begin_reduction(std::int64_t step);
  bool reducing() const { return reducing_; }
  /// Before the last backward pass of a reduction: parameters that it does not reach delay no bucket.
  void mark_unused();
  /// Instead of that pass: this rank contributes only the gradients that its parameters hold, perhaps none.
  void contribute_held();
  /// For reductions in shards (ddp: Note [Sums along a tree]): another module with the same parameters, which is number
  /// 1, 2, … in the order of these calls, for what further shards of a turn are computed with; number 0 is the one that
  /// is there. It must outlive the last step.
  void add_copy(std::vector<nn::NamedParameter> parameters);
  /// Collective, between steps, when no parameter has a gradient: ddp::Reducer::set_tree().
  void set_tree(const comm::ReductionTree& tree);
  /// After begin_reduction(): from here on module `i` writes the gradients of the turn's shard number i, and none are
  /// there yet. What it says are the turn's shards.
  comm::TreeNode begin_turn();
  void skip_shard(std::size_t shard);
  /// Likewise, for this turn: hash_of_gradients() of each of its shards, which were 0 before. Empty: none are found.
  void set_hashes(std::span<std::uint64_t> hashes) { hashes_ = hashes; }
  /// Passes of the shards that were not skipped begin, number 0's on this thread and each other one on a thread of its
  /// own.
  void begin_passes();
  /// On this thread, now and then during them: what all of them have is reduced.
  void reduce_ready();
  bool is_last_turn() const { return reducer_.was_last_turn(); }
  /// After the passes of a turn: after the last one comes finish().
  void end_turn();

  /// Waits for the sums, bucket by bucket (ddp::Reducer::finish). In `on_bucket(slots)`, and from then on until they
  /// are cleared, those parameters' gradients are sums over all ranks. `slots` are valid during that call. Collective
  /// after the first step with samples.
  void finish(FunctionRef<void(std::span<const std::size_t>)> on_bucket);
  /// A reduction that was captured and not run is forgotten.
  void abandon();

  /// Before gradients that finish() has summed are added to: only rank 0 keeps them, for the next sum.
  void keep_sums_once();
  /// While true, a gradient that becomes ready outside of a reduction is a UsageError out of Tape::backward(): nobody
  /// would sum it.
  void refuse_strays(bool wanted) { refuse_strays_ = wanted; }
  /// Gradients that parameters hold are this rank's alone: Parameter::mark_partial(), until finish().
  void mark_partial();

 private:
  void bind();
  void bind(std::size_t slot);
  nn::Tensor in_arena(std::size_t slot) const;
  void hand_over(std::size_t slot);
  void pass_has(std::size_t slot, std::size_t module);
  void settle_turn();
  [[noreturn]] void refuse_stray(std::size_t slot) const;
  void tune();

  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  std::vector<nn::NamedParameter> parameters_;  // the reducer's slots
  std::vector<Lifetime::Ref> lifetimes_;        // theirs
  ddp::Reducer reducer_;
  std::vector<std::size_t> next_order_;  // agreed, and not applied yet
  bool agreed_ = false, settled_ = false;
  bool tuning_ = false;                        // the size of buckets is to be chosen
  std::unique_ptr<ddp::BucketTuner> tuner_;    // while it is
  std::optional<Clock::time_point> step_end_;  // of the step before, while it is
  std::optional<std::size_t> next_bytes_;      // of the next step's buckets, where they change
  std::optional<ddp::BucketChoice> choice_;
  bool reducing_ = false;
  bool refuse_strays_ = false;
  std::vector<nn::Tensor> own_;  // by slot; empty: gradients are views of the arena

  // In shards:
  std::vector<std::vector<nn::NamedParameter>> copies_;  // of the module, from number 1 on
  std::vector<Lifetime::Ref> copies_lifetimes_;          // of their parameters, one after the other
  std::vector<bool> computes_;                           // by module, in this turn
  std::unique_ptr<std::atomic<int>[]> missing_;          // by slot: passes that have not written it
  std::vector<std::size_t> mine_;                        // slots that module 0's pass has written, as it has
  std::size_t reduced_ = 0;                              // of those
  std::span<std::uint64_t> hashes_;                      // by module
};

}  // namespace lockstep::parallel
