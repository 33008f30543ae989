// Which samples a rank sees at each step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/sampler/permutation.h"
#include "lockstep/sampler/slice.h"

namespace lockstep::sampler {

/// What happens to the samples at the end of an epoch that do not fill a global batch.
enum class Tail {
  kExact,  // the last step is short: every sample once
  kPad,    // PyTorch's DistributedSampler with drop_last=False: the epoch is filled up to a multiple of the world size
           // with its own first samples, so that the last, short step is equally long on all ranks
  kDrop,   // only whole global batches: up to global_batch - 1 samples of an epoch are not seen
};

/// In which order an epoch's samples come.
enum class Order {
  kShuffled,    // another one in each epoch
  kSequential,  // the data set's own
  kColumns,     // each place of the global batch, a column, reads consecutive samples: Note [Columns]
};

/// Note [Columns]
/// For models that carry a state from one sample to the next, whose samples are consecutive rows of one text. The data
/// set is cut into as many stretches as the global batch has places, of equal length but for one sample; place g of
/// each step reads the next sample of stretch g (for truncated backpropagation through time, as batchify() of PyTorch's
/// word language model example, which has them in columns). A rank has the same places in all steps:
/// slice_of(global_batch, rank, world_size). Where the stretches differ, an epoch's last step has the places of the
/// longer ones, the first, alone, and some ranks may have none of these. With Tail::kDrop all are equally long, and
/// what is left at the data set's end is not seen.

/// The same on every rank.
struct SamplerConfig {
  std::uint64_t length = 0;        // samples in the data set
  std::uint64_t seed = 1;          // of the order
  std::uint64_t global_batch = 1;  // samples of a step, over all ranks
  Tail tail = Tail::kExact;
  Order order = Order::kShuffled;
  /// Parts of a step, of which each rank has a run, slice_of(shards, rank, world_size): with them, who has which sample
  /// depends on their number alone (shard_of()). 0: a rank has one part of its own. Tail::kPad fills up to a multiple
  /// of their number then. Not with Order::kColumns.
  std::uint64_t shards = 0;
  /// Of each rank, in their order, for ranks that are not equally fast: how many of the shards it has, one or more;
  /// without shards, its weight in the number of samples, below 2^32 together. Empty: all the same. Neither with
  /// Order::kColumns nor, without shards, with Tail::kPad.
  std::vector<std::uint32_t> shares = {};
};

/// How far a run has come; independent of the world size, so that it resumes at any.
struct SamplerState {
  std::uint64_t epoch = 0;
  std::uint64_t cursor = 0;  // samples that all ranks together have consumed in this epoch

  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

/// One step. Ranges are positions in the epoch's order; the local one lies within the global one.
struct StepPlan {
  std::uint64_t epoch = 0;
  std::uint64_t step_in_epoch = 0;
  std::uint64_t global_begin = 0;
  std::uint64_t global_count = 0;  // at least 1: the divisor of the step's mean
  std::uint64_t local_begin = 0;
  std::uint64_t local_count = 0;  // may be 0: such a rank contributes zeros
  bool last_of_epoch = false;

  friend bool operator==(const StepPlan&, const StepPlan&) = default;
};

/// The places of shard `shard` among the `count` of a step. Requires config.shards > shard.
constexpr Slice shard_of(const SamplerConfig& config, std::uint64_t count, std::uint64_t shard) {
  return slice_of(count, shard, config.shards);
}

/// Throws unless the three can go together. IoError for an empty data set. UsageError for
/// - a rank outside the world, more than 2^63 - 1 samples, a global batch of 0;
/// - shards fewer than ranks or more than the global batch, or with columns;
/// - Tail::kPad with a global batch that is no multiple of the world size (of the shards, if there are any), or with
///   columns, which no sample may be added to; Tail::kDrop with a global batch above the length;
/// - shares that are zero, not one for each rank, not `shards` together, or go with what they exclude.
void check(const SamplerConfig& config, int rank, int world_size);

// The pure functions below require arguments that passed check(); plan_step looks again.

/// The end of an epoch's positions: the length, with Tail::kPad rounded up to a multiple of the world size (of the
/// shards, if there are any).
std::uint64_t epoch_end(const SamplerConfig& config, int world_size);

/// `state`, or the start of the next epoch if its epoch has no further step. So the epoch advances by itself, also if a
/// run resumes with another tail, batch or world size at a cursor beyond the new end.
SamplerState normalized(const SamplerConfig& config, const SamplerState& state, int world_size);

/// The step that starts at `state`, which must be normalized (else UsageError): positions [cursor, cursor +
/// global_batch), cut at epoch_end; of these, `rank` takes slice_of(count, rank, world_size), or those of its columns,
/// shards or share.
StepPlan plan_step(const SamplerConfig& config, const SamplerState& state, int rank, int world_size);

/// Walks one rank through the steps. A small value: copy it to look ahead. Const members may run concurrently.
class DistributedSampler {
 public:
  /// Throws what check() throws.
  DistributedSampler(const SamplerConfig& config, int rank, int world_size);

  const SamplerConfig& config() const { return config_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  /// Steps of an epoch that starts at cursor 0; the same on all ranks.
  std::uint64_t steps_per_epoch() const;
  /// An upper bound of local_count, for buffers.
  std::uint64_t max_local_count() const;

  /// The step that comes next.
  StepPlan plan() const;
  /// Writes the step's samples for this rank, each below config().length. out.size() must be plan.local_count, else
  /// UsageError. `plan` is of this rank, from plan() or plan_step(); one of another epoch takes longer, and memory for
  /// that epoch's order.
  void indices(const StepPlan& plan, std::span<std::uint64_t> out) const;
  /// Goes to the following step, in the next epoch after the last one.
  void advance();

  SamplerState state() const { return state_; }
  /// Continues from `state`. Throws UsageError if the cursor cannot come from a data set of this length.
  void restore(const SamplerState& state);

 private:
  void move_to(const SamplerState& state);

  SamplerConfig config_;
  int rank_;
  int world_size_;
  SamplerState state_;                // normalized
  std::optional<Permutation> order_;  // of state_.epoch; nothing without shuffling
};

}  // namespace lockstep::sampler
