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
  void gather(std::size_t bucket);
  void wait(std::size_t bucket);
  void expect(std::size_t bucket, bool expected);
  nn::Tensor place_of_sum(const nn::Tensor& part, std::int64_t at) const;
  void wait_for_values(std::size_t bucket) override { wait(bucket); }

  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  std::vector<nn::NamedParameter> parameters_;
  std::vector<Lifetime::Ref> lifetimes_;  // theirs
  ddp::BucketPlan plan_;
  std::vector<std::vector<nn::ParameterSlice>> slices_;  // by rank and parameter
  std::unique_ptr<comm::Arena> arena_, sums_;            // nullptr: closed
  comm::Work sum_;
  std::vector<comm::Work> gathers_;    // by bucket
  std::vector<bool> due_, under_way_;  // by bucket: its gather
  std::vector<bool> touched_;          // by bucket: parameters of one call
};

}  // namespace lockstep::parallel
