// This rank's copy of a module of LibTorch among those of the other ranks.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/torch/gradient_slots.h"
#include "bindings/torch/module_state.h"
#include "lockstep/base/misuse.h"
#include "lockstep/torch/distributed_data_parallel.h"

namespace lockstep::torch::detail {

/// What DistributedDataParallel is made of: passes, walks backwards from them, and the reducer's steps. Hooks of the
/// graph refer to it weakly, since they may outlive it.
class Replica final : public AccumulationListener, public std::enable_shared_from_this<Replica> {
 public:
  using Options = DistributedDataParallelOptions;

  /// Collective.
  static std::shared_ptr<Replica> make(std::shared_ptr<::torch::nn::Module> module, comm::ProcessGroup& group,
                                       const Options& options);

  comm::ProcessGroup& group() const { return group_; }
  GradientSlots& gradients() { return *gradients_; }
  const GradientSlots& gradients() const { return *gradients_; }

  std::shared_ptr<Pass> begin_pass();
  void end_pass(const std::shared_ptr<Pass>& pass, const std::vector<::torch::Tensor*>& outputs);
  void contribute_nothing();
  void hold_sync(int change) { no_syncs_ += change; }

  ::torch::Tensor scalars();
  ::torch::Tensor summed_scalars() const;
  void set_step(std::int64_t step) { step_ = step - 1; }
  void check(bool buffers) const;
  void broadcast_buffers();

  /// Backward has come to an output of `pass`.
  void reached(Pass& pass);
  void accumulated(std::size_t slot) override;

 private:
  enum class Walk { kNone, kLocal, kSumming };  // the backward that runs

  Replica(std::shared_ptr<::torch::nn::Module> module, comm::ProcessGroup& group, const Options& options);
  void check_group() const;
  void check_intact() const;
  void check_parameters() const;
  bool accumulates() const;
  void begin_walk(Pass& pass);
  void begin_without_output(std::size_t slot);
  void begin_step();
  ::torch::Tensor tail() const;
  void begin_step_of_backward(Pass& pass);
  void keep_sums_once();
  void finish();
  [[noreturn]] void refuse_stray(std::size_t slot) const;

  std::shared_ptr<::torch::nn::Module> module_;
  comm::ProcessGroup& group_;
  Lifetime::Ref group_lifetime_;
  ProducerStream stream_;
  Options options_;
  std::vector<NamedTensor> all_;  // parameters, trained or not
  struct Form {
    ::torch::Dtype type;
    std::vector<std::int64_t> sizes;
    std::string text;
  };
  std::vector<Form> forms_;    // of those, when this was made
  std::vector<bool> trained_;  // likewise
  std::optional<GradientSlots> gradients_;
  std::optional<SharedBuffers> buffers_;
  ::torch::Tensor scalars_;  // undefined: nobody has asked for them
  std::array<float, DistributedDataParallelBase::kScalars> summed_scalars_{};

  int no_syncs_ = 0;  // that live
  Walk walk_ = Walk::kNone;
  std::shared_ptr<Pass> last_pass_;
  bool buffers_due_ = true;
  bool sums_held_ = false;  // gradients may still be those that finish() has summed
  std::int64_t step_ = 0;
};

}  // namespace lockstep::torch::detail
