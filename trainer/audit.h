// Whether ranks compute rightly: some steps are computed twice, each part by two ranks, and compared bit by bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/session/session.h"
#include "trainer/step.h"
#include "trainer/step_shares.h"

namespace lockstep::trainer {

/// Note [Audits]
/// A bit that flips in memory, or a core that multiplies wrongly, gives gradients that look like any others. With
/// --shards a shard's gradients have the same bits whoever computes them. So with --audit P, in one of each ⌈1/P⌉
/// steps, at a random place, and in those that end with a checkpoint, every rank first computes the shards of the next
/// run as well (of the rank that has it: ReductionTree::order()), on a copy of the module that shares its parameters,
/// and keeps a hash of each shard's gradients. Then comes the step as always, which finds the same hashes on the way,
/// before shards are added. After it all ranks compare: every shard has been computed by two of them, and all
/// parameters are compared, too.
///
/// Where two ranks differ in a shard, a third one computes it again from a copy of the parameters that the step began
/// with: who differs from the two others computes wrongly. Of two ranks both compute it again: who then finds what the
/// other had found before has computed wrongly. The run ends before the step's checkpoint; the newest one is of a step
/// that was verified itself, or is older.
///
/// A rank that always computes wrongly, or whose parameters or moments have changed, is found within 2 / P steps,
/// since no rank's part of an audited step is left out; a single wrong step with probability P. Places are random so
/// that a fault with a period of its own is not missed for ever. What is not seen: what
/// all ranks get alike (a wrong sample on a disk), statistics of batch normalisation, and, with --zero, moments and
/// parameters that a rank has updated wrongly for all. An audited step computes twice: a share of P of the run.

/// The same calls on all ranks. What the constructor is given outlives it.
class Audit {
 public:
  /// Collective. `share` of the steps, above 0. Throws UsageError on a GPU and for a module without a factory.
  Audit(double share, session::Session& session, parallel::DistributedDataParallel& ddp, StepShares& shares);

  /// Whether step `step` is audited; `checkpoint`: one is taken after it.
  bool due(std::int64_t step, bool checkpoint) const;
  /// Collective, before that step, whose batch `position` has as the next one.
  void begin(std::int64_t step, const data::Batch& batch, const sampler::SamplerState& position,
             TrainingStep& training);
  /// Collective, after it: whether one had begun, after which the caller compares the replicas. Throws DeviceError on
  /// the rank that computes wrongly and PeerError on the others; OutOfStepError on all where it is not known which of
  /// two does.
  bool end(TrainingStep& training);

  /// Steps that were, and with which no rank has differed.
  std::int64_t count() const { return count_; }

 private:
  std::vector<std::uint64_t> compute(int position, const comm::TreeNode& shards, TrainingStep& training);
  /// A shard, by the number of its run and its place in it.
  struct Difference {
    int position = 0;
    std::size_t place = 0;
    std::uint64_t owners = 0, auditors = 0;  // hashes
  };
  std::optional<Difference> compare() const;
  void accuse(const Difference& found, TrainingStep& training);
  std::string where(int rank) const;

  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  parallel::DistributedDataParallel& ddp_;
  StepShares& shares_;
  const std::int64_t every_;
  bool on_ = false;
  std::unique_ptr<nn::Module> copy_;
  std::optional<nn::Tape> tape_;
  std::vector<nn::Tensor> before_;      // the parameters that the step began with
  std::vector<std::string> places_;     // by rank: host and processors
  std::optional<std::int64_t> step_;    // under way
  sampler::SamplerState position_;      // its
  std::vector<std::uint64_t> audited_;  // hashes of the next run's shards
  std::int64_t count_ = 0, verified_ = 0;
};

}  // namespace lockstep::trainer
