// Which part of each step this rank computes, and its batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/comm/reduction_tree.h"
#include "lockstep/data/loader.h"
#include "lockstep/sampler/sampler.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/config.h"
#include "trainer/balance.h"
#include "trainer/memory_estimate.h"

namespace lockstep::trainer {

/// Its samples, and with --shards its run of the tree; with --balance they change between steps (Note [Balance]). The
/// configuration and the session outlive it.
class StepShares {
 public:
  /// Collective. Throws UsageError for shares that cannot be.
  StepShares(const TrainConfig& config, session::Session& session);
  /// The sampler. Throws what sampler::check() throws.
  void open(std::shared_ptr<const data::Dataset> dataset);
  /// The batches, from the sampler's state on.
  void start();

  /// Once it is open; follow() makes another one.
  sampler::DistributedSampler& sampler() { return *sampler_; }
  /// Likewise: that of the rank that has run `position` of the tree (or of that rank, without one), at the beginning.
  sampler::DistributedSampler sampler_of(int position) const;
  const std::shared_ptr<const data::Dataset>& dataset() const { return dataset_; }
  /// Once it has started. The batch before gives its memory back.
  const data::Batch& next();
  /// Along which shards are summed; nullptr: there are none.
  const comm::ReductionTree* tree() const { return tree_; }
  /// Of its shards, as many as this rank has cores for.
  int shards_at_once() const { return at_once_; }
  /// What a rank with `devices` does in a step, whatever --balance may find.
  MemoryPlan memory_plan(std::size_t devices) const;
  /// The most samples that a rank computes with at a time, where all ranks have equal shares.
  std::int64_t samples_at_once() const;

  /// With which shares a run begins, where they are not equal.
  const std::optional<BalanceReport>& first() const { return first_; }
  /// Collective where it finds something: after `step`, and `position` is where to continue. `window` is of all
  /// ranks, or empty. The last batch is gone then.
  std::optional<BalanceReport> follow(std::span<const StepTimes> window, std::int64_t step, std::int64_t steps_left,
                                      const sampler::SamplerState& position);
  /// Collective. How long it took this rank to take them.
  void change_took(double seconds);

 private:
  std::size_t places() const;  // for gradients, that its sums take
  std::int64_t most_at_once() const;
  void make_sampler();
  void take_shares();

  const TrainConfig& config_;
  comm::ProcessGroup& group_;      // of the host's numbers
  comm::ProcessGroup& gradients_;  // which are summed along the tree
  nn::Backend& backend_;
  const comm::ReductionTree* tree_ = nullptr;
  int at_once_ = 1;
  std::optional<Balance> balance_;  // nothing: shares are equal
  std::optional<BalanceReport> first_;
  bool follows_ = false;
  std::set<std::vector<std::uint32_t>> taken_;  // shares that there were
  std::shared_ptr<const data::Dataset> dataset_;
  std::optional<sampler::DistributedSampler> sampler_;
  std::optional<data::Loader> loader_;
};

/// "shards 11, 5 (were 8, 8): rank 1 takes 2.1 times as long for one".
std::string describe(const BalanceReport& report, bool of_shards);

}  // namespace lockstep::trainer
