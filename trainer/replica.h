// A model whose gradients are summed over the ranks: where nn and ddp meet.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "comm/process_group.h"
#include "ddp/reducer.h"
#include "ddp/replicate.h"
#include "nn/layers/module.h"
#include "nn/optim/optimizer.h"

namespace lockstep::trainer {

/// One rank's copy of a module. Binds each parameter's gradient to the reducer's arena and marks it ready from the
/// tape's hook, so that collectives run while backward does. Group, module and backend must outlive it.
class Replica {
 public:
  /// Collective: rank 0's parameters and buffers become everyone's. `group`'s arenas are on `backend`'s device.
  Replica(comm::ProcessGroup& group, nn::Backend& backend, nn::Module& module, const ddp::BucketLimits& limits);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }
  ddp::Reducer& reducer() { return reducer_; }

  /// The most samples of all ranks together in a step: up to here f32, in which they are counted, has every integer.
  static constexpr std::int64_t kMostSamples = std::int64_t{1} << 24;

  /// Sums over the global batch.
  struct Totals {
    double loss = 0;
    double correct = 0;
    double count = 0;
    double stops = 0;  // see count_stops()
    /// From what totals() holds.
    static Totals from(std::span<const std::byte> bytes);
  };
  static constexpr std::size_t kTotalsBytes = ddp::Reducer::kTailFloats * sizeof(float);

  /// Before the first step: the order of buckets that an earlier run has come to, by parameters' names. Others than
  /// these parameters, each once, mean nothing.
  void adopt_order(const std::vector<std::string>& names);
  /// The order of buckets; empty while it is not settled.
  std::vector<std::string> order() const;

  /// From the next step on, totals().stops is the number of ranks that have asked to stop.
  void count_stops();
  /// Before each step then: whether this rank asks.
  void ask_to_stop(bool mine);

  /// Collective in the second step. Opens step `step`; then either backward() or contribute_nothing(), then finish().
  void begin_step(std::int64_t step);
  /// Runs `loss` backwards. `loss.totals()` of `count` local samples join the sums.
  void backward(nn::Tape& tape, const nn::Loss& loss, std::int64_t count);
  /// This rank has no samples in this step.
  void contribute_nothing();
  /// Waits for the sums, bucket by bucket, as Reducer::finish() does. In `on_bucket(indices)`, and from then on until
  /// the next begin_step, those parameters' gradients hold the sum over all ranks, and so do, from the first call on,
  /// totals(). It may throw, which leaves collectives under way: see Reducer.
  void finish(FunctionRef<void(std::span<const std::size_t>)> on_bucket);
  /// Gradients are where they will stay: from the second step on, unless that one had no samples on any rank.
  bool settled() const { return order_adopted_; }
  /// Of ProcessGroup: the step between the two is recorded, not done.
  void begin_capture() { group_.begin_capture(); }
  std::uint64_t end_capture() { return group_.end_capture(); }
  /// Step `step` was given to the device as a recording with that many collectives, in place of begin_step … finish.
  void replayed(std::int64_t step, std::uint64_t operations);
  /// Collective: whether `mine` is true on every rank.
  bool on_all(bool mine);
  /// A step that was only recorded, and not to its end, is forgotten: begin_step() follows.
  void abandon_step() { reducer_.abandon_step(); }

  /// kTotalsBytes on the device: its first element is the summed loss.
  nn::Tensor totals() const;

  /// Collective: rank 0's buffers (running statistics) become everyone's; before they are used or saved.
  void broadcast_buffers();
  /// Collective: throws OutOfStepError unless all ranks' parameters are bitwise equal.
  void check() const;

 private:
  std::vector<ddp::NamedBytes> parameter_bytes() const;
  std::vector<ddp::NamedBytes> buffer_bytes() const;
  void bind_gradients();

  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  nn::Module& module_;
  std::vector<nn::NamedParameter> parameters_;  // those that are trained; the reducer's slots
  ddp::Reducer reducer_;
  nn::Tensor stop_;           // () f32 on the device; undefined: nobody counts
  bool order_known_ = false;  // a step has shown in which order gradients become ready
  bool order_adopted_ = false;
};

}  // namespace lockstep::trainer
