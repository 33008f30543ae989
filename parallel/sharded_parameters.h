// Parameters whose updates are sharded over the ranks (ddp: Note [Sharded updates]).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/ddp/sharded_update.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/optimizer.h"

namespace lockstep::parallel {

/// The values of a DistributedDataParallel's parameters, in an arena with the layout of the gradients' buckets, and
/// what joins the ranks' optimizers of slices. Until close() group, backend and parameters must be there; afterwards
/// the parameters' values are in memory of their own again, and an optimizer that comes here is a UsageError. One
/// thread uses it.
///
/// Note [Gathers during forward]
/// On the CPU the buckets' gathers are issued together, after all updates, by start_gathers(): the last bucket first,
/// which has the first layers. Nobody waits for them there: the parameters expect their values (nn::ValueSource), so a
/// pass waits for a layer's parameters when it comes to that layer, while those of later layers are on their way. All
/// who read a parameter come by Parameter::value() and wait likewise; who keeps a tensor of it calls finish(). Waiting
/// is no operation of the group, so ranks may come to parameters in any order. On a device a stream waits at once,
/// which costs the host nothing, and a step that is captured ends with all of it.
///
/// Note [Direct writes]
/// Where all ranks see each other's copy of the parameters (comm: Note [Copies of other ranks]), nothing is gathered:
/// the kernel that moves a slice stores it into every rank's copy. Two barriers in a step say when:
///
///   backward          a rank reads its own copy, as in every pass
///   the first update  barrier: all ranks have come to their updates, so none reads any more
///   updates           owners write into all copies, in whatever order
///   start_gathers()   barrier: all owners have written. Parameters expect their values until it is complete
///   forward           waits for it where it reads the first parameter
///
/// When the sums of a bucket are complete, other ranks may still read its parameters: a layer hands its gradients over
/// before it multiplies by its weights (nn::Tape::parameters_done()), with shards other threads are in the same layer,
/// and a loop that calls step() may look at parameters between it and backward. Hence the first barrier, in which ranks
/// wait for the slowest one, as they do for the last bucket. Updates after a start_gathers() have a first barrier of
/// their own, also without a pass in between: two steps by the same gradients.
///
/// Between the two barriers all ranks are in their updates, so a rank that ends there leaves half-written parameters to
/// ranks that are about to wait for it in the second one: they end with that error before they read, compare or save a
/// parameter.
class ShardedParameters final : public nn::SliceExchange, private nn::ValueSource {
 public:
  /// Collective: takes the values along. The reducer keeps its order of buckets.
  ShardedParameters(comm::ProcessGroup& group, nn::Backend& backend, std::vector<nn::NamedParameter> parameters,
                    const ddp::BucketPlan& plan);
  ~ShardedParameters() override { close(); }
  void close() noexcept;

  /// A bucket's limits with which no rank cuts a block (nn: Note [Norm blocks]).
  static ddp::BucketLimits limits(ddp::BucketLimits limits, int ranks);

  /// This rank's, by parameter.
  const std::vector<nn::ParameterSlice>& slices() const { return slices_of(group_.rank()); }
  const std::vector<nn::ParameterSlice>& slices_of(int rank) const { return slices_[static_cast<std::size_t>(rank)]; }

  void begin_sum(std::span<const nn::Tensor> parts) override;
  void end_sum(std::span<const nn::Tensor> parts) override;
  void before_update(std::span<const std::size_t> indices) override;
  std::span<const std::ptrdiff_t> replicas() const override { return replicas_; }
  void after_update(std::span<const std::size_t> indices) override;
  void finish() override;
  /// Collective: what has been updated begins to come.
  void start_gathers();

  /// DistributedDataParallel::gather_moments() and scatter_moments().
  std::vector<std::vector<std::byte>> gather_moments(const nn::Optimizer& optimizer, int root);
  void scatter_moments(const nn::Optimizer& optimizer, const std::vector<std::vector<std::byte>>& whole, int root);

 private:
  void check_open() const;
  void check_optimizer(const nn::Optimizer& optimizer) const;
  void mark(std::span<const std::size_t> indices);
  void find_replicas();
  bool writes_directly() const { return !replicas_.empty(); }
  void gather(std::size_t bucket);
  void wait(std::size_t bucket);
  void expect(std::size_t bucket, bool expected);
  nn::Tensor place_of_sum(const nn::Tensor& part, std::int64_t at) const;
  void wait_for_values(std::size_t bucket) override { wait(bucket); }

  comm::ProcessGroup& group_;
  Lifetime::Ref group_lifetime_;
  Device device_;
  nn::Backend& backend_;
  std::vector<nn::NamedParameter> parameters_;
  std::vector<Lifetime::Ref> lifetimes_;  // theirs
  ddp::BucketPlan plan_;
  std::vector<std::vector<nn::ParameterSlice>> slices_;  // by rank and parameter
  std::unique_ptr<comm::Arena> arena_, sums_;            // nullptr: closed
  std::vector<std::ptrdiff_t> replicas_;  // floats from a parameter to each other rank's; empty: they are gathered
  bool may_write_ = false;                // into those: all ranks have come to their updates
  comm::Work sum_;
  comm::Work written_;                 // with direct writes: the last barrier after them
  std::vector<comm::Work> gathers_;    // by bucket; with direct writes the barrier after them
  std::vector<bool> due_, under_way_;  // by bucket: its gather
  std::vector<bool> touched_;          // by bucket: parameters of one call
};

}  // namespace lockstep::parallel
