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
#include "nn/layers/layers.h"
#include "nn/optim/optimizer.h"

namespace lockstep::trainer {

/// One rank's copy of a module. Binds each parameter's gradient to the reducer's arena and marks it ready from the
/// tape's hook, so that collectives run while backward does. Group, module and backend must outlive its last step.
class Replica {
 public:
  struct Options {
    bool broadcast_buffers = true;  // rank 0's buffers are everyone's from the beginning of each step
    bool find_unused = false;       // parameters may have no gradient in a step: see ddp::Reducer::Options
    bool wait_for_unused = false;   // those that must not: finish() waits for the device to know of them
  };

  /// Collective: compares the ranks' modules and options (OutOfStepError, comm::compare_manifests), and then rank 0's
  /// parameters and buffers become everyone's. `group`'s arenas are on `backend`'s device.
  Replica(comm::ProcessGroup& group, nn::Backend& backend, nn::Module& module, const ddp::BucketLimits& limits,
          Options options);
  Replica(comm::ProcessGroup& group, nn::Backend& backend, nn::Module& module, const ddp::BucketLimits& limits)
      : Replica(group, backend, module, limits, Options()) {}
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }
  ddp::Reducer& reducer() { return reducer_; }
  const ddp::Reducer& reducer() const { return reducer_; }

  /// The most samples of all ranks together in a step: up to here f32, in which they are counted, has every integer.
  static constexpr std::int64_t kMostSamples = std::int64_t{1} << 24;

  /// Sums over the global batch.
  struct Totals {
    double loss = 0;
    double correct = 0;
    double count = 0;
    double unused = 0;  // gradients that were missing and must not be: refuse_unused() is due
    double stops = 0;   // see count_stops()
    /// From what totals() holds.
    static Totals from(std::span<const std::byte> bytes);
  };
  static constexpr std::size_t kTotalsBytes = ddp::Reducer::kTailFloats * sizeof(float);

  /// Before the first step: the order of buckets that an earlier run has come to, by parameters' names. Others than
  /// these parameters, each once, mean nothing.
  void rebuild_buckets(const std::vector<std::string>& names);
  /// The order of buckets; empty while it is not settled.
  std::vector<std::string> order() const;

  /// From the next step on, totals().stops is the number of ranks that have asked to stop.
  void count_stops();
  /// Before each step then: whether this rank asks.
  void ask_to_stop(bool mine);

  /// Collective. Opens step `step`; then backward() for each part of the local samples, the last one with `last`, or
  /// contribute_nothing(); then finish().
  void begin_step(std::int64_t step);
  /// Runs `loss` backwards. `loss.totals()` of `count` local samples join the sums. Gradients of all parts add up; the
  /// ranks' sums start with the last one, while it runs.
  void backward(nn::Tape& tape, const nn::Loss& loss, std::int64_t count, bool last = true);
  /// This rank has no samples in this step, or no more.
  void contribute_nothing();
  /// Waits for the sums, bucket by bucket, as Reducer::finish() does. In `on_bucket(indices)`, and from then on until
  /// the next begin_step, those parameters' gradients hold the sum over all ranks, and so do, from the first call on,
  /// totals(). Parameters that no rank has used come in no bucket, if that may be. It may throw, which leaves
  /// collectives under way: see Reducer.
  void finish(FunctionRef<void(std::span<const std::size_t>)> on_bucket);
  /// Gradients are where they will stay: from the second step on, unless that one had no samples on any rank.
  bool settled() const { return rebuilt_; }
  /// Of ProcessGroup: the step between the two is recorded, not done.
  void begin_capture() { group_.begin_capture(); }
  std::uint64_t end_capture() { return group_.end_capture(); }
  /// Step `step` was given to the device as a recording with that many collectives, in place of begin_step … finish.
  void replayed(std::int64_t step, std::uint64_t operations);
  /// Collective: whether `mine` is true on every rank.
  bool on_all(bool mine);
  /// A step that was only recorded, and not to its end, is forgotten: begin_step() follows.
  void abandon_step() {
    reducer_.abandon_step();
    summing_ = reducing_ = false;
  }

  /// Collective: throws what Reducer::refuse_unused() does. On the CPU, and with wait_for_unused, finish() has.
  [[noreturn]] void refuse_unused() { reducer_.refuse_unused(); }

  // The parts of a step, for DistributedDataParallel, whose steps begin where the caller's loop lets them begin.

  /// Collective at the first call behind a finish(), later nothing: buckets follow the order in which gradients became
  /// ready. Gradients that parameters hold move along. Between steps alone.
  void rebuild_buckets();
  /// Collective: rank 0's buffers become everyone's, in the order of the backend's work.
  void sync_buffers();
  /// What that sends to each of the others.
  std::size_t shared_buffer_bytes() const { return buffer_arena_ != nullptr ? buffer_arena_->bytes() : 0; }
  /// From here to finish(), gradients that become ready are summed. Those that parameters hold already are added to.
  void begin_reduction(std::int64_t step);
  /// In front of the last backward pass of a reduction: parameters that it does not reach hold up no bucket.
  void mark_unused();
  bool reducing() const { return reducing_; }
  /// Before gradients that finish() has summed are added to: only rank 0 keeps them, for the next sum.
  void keep_sums_once();
  /// While true, a gradient that becomes ready outside of a reduction is a UsageError out of Tape::backward(), before
  /// others follow: nobody would sum it.
  void refuse_strays(bool wanted) { refuse_strays_ = wanted; }
  /// Gradients that parameters hold are this rank's alone: Parameter::mark_partial(), until finish().
  void mark_partial();
  /// Throws UsageError where module or group are gone, or a parameter is trained that was frozen in the beginning.
  void check_intact() const;
  comm::ProcessGroup& group() const { return group_; }

  /// kTotalsBytes on the device: its first element is the summed loss.
  nn::Tensor totals() const;

  /// Collective: rank 0's buffers (running statistics) become everyone's; before they are used or saved.
  void broadcast_buffers();
  /// Collective: ddp::check_replicas() of all parameters.
  void check() const;
  /// Of the buffers too, for where broadcast_buffers() has made them equal.
  void check_with_buffers() const;

 private:
  [[noreturn]] void refuse_stray(std::size_t slot) const;
  std::vector<ddp::NamedBytes> parameter_bytes() const;
  std::vector<ddp::NamedBytes> buffer_bytes() const;
  void bind_gradients();
  void share_buffers();

  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  nn::Module& module_;
  Options options_;
  std::vector<nn::NamedParameter> parameters_;  // those that are trained; the reducer's slots
  std::vector<Lifetime::Ref> lifetimes_;        // theirs
  std::vector<nn::NamedParameter> frozen_;      // the module's others
  Lifetime::Ref module_lifetime_, group_lifetime_;
  ddp::Reducer reducer_;
  nn::Tensor stop_;           // () f32 on the device; undefined: nobody counts
  bool order_known_ = false;  // a step has shown in which order gradients become ready
  bool rebuilt_ = false;
  bool reducing_ = false;
  bool refuse_strays_ = false;
  bool summing_ = false;          // the backward pass that runs is the last one of the step
  std::int64_t contributed_ = 0;  // local samples of this step

  struct SharedBuffer {
    nn::Tensor* mine;
    nn::Tensor sent;  // its place in the arena
  };
  std::unique_ptr<comm::Arena> buffer_arena_;  // nullptr: there is nothing to send
  std::vector<SharedBuffer> buffers_;
};

}  // namespace lockstep::trainer
