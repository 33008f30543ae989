// Gradients of LibTorch's parameters as the slots of a reducer.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/torch/module_state.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/reducer.h"

namespace lockstep::torch {

/// Whoever wants to know that a backward pass has added to a parameter's gradient.
class AccumulationListener {
 public:
  virtual ~AccumulationListener() = default;
  /// All of this backward pass is in it.
  virtual void accumulated(std::size_t slot) = 0;
};

/// What the gradients of parameters of this type are summed in; nothing where they are not.
std::optional<::torch::Dtype> summed_in(::torch::Dtype type);

/// Copies gradients into the reducer's slots and the sums back, and calls a listener after each accumulation. Backward
/// does not write into the slots itself: grad() may be undefined, replaced or moved into place at any time, and a copy
/// costs less than accumulation into memory that exists does. With as_views, the sums are not copied back: grad() is
/// the slot then, and what backward adds to it there need not be copied either.
class GradientSlots {
 public:
  struct Options {
    ddp::Reducer::Options reducer = {};
    double scale = 1;  // of sums, when they become gradients
    bool as_views = false;
  };
  /// Collective.
  GradientSlots(comm::ProcessGroup& group, std::vector<NamedTensor> parameters, const ddp::BucketLimits& limits,
                const Options& options);
  ~GradientSlots();
  GradientSlots(const GradientSlots&) = delete;
  GradientSlots& operator=(const GradientSlots&) = delete;

  /// After the hooks that parameters have already, which stay; they are in place again when this ends.
  void install_hooks(const std::shared_ptr<AccumulationListener>& listener);
  /// Whether another one's hook is there.
  static bool is_hooked(const ::torch::Tensor& parameter);

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<::torch::Tensor>& parameters() const { return parameters_; }
  ddp::Reducer& reducer() { return *reducer_; }
  const ddp::Reducer& reducer() const { return *reducer_; }

  /// This rank's gradient is complete: its slot is ready. Throws UsageError for one that is not summed.
  void send(std::size_t slot);
  /// Those that are not decided yet and have a gradient: from passes before, of this rank alone.
  void send_held();
  bool any_held() const;
  /// Ends the reducer's step: gradients become the sums. Collective after the first step with samples.
  void finish();

  /// Before a forward pass: buckets take the order that the ranks have come to.
  void apply_order();
  /// By names; empty while the ranks have not come to one.
  std::vector<std::string> order() const;

 private:
  void find_sums();
  bool is_view(std::size_t slot) const;
  void receive(std::size_t slot);
  void check_gradient(std::size_t slot, const ::torch::Tensor& gradient) const;

  comm::ProcessGroup& group_;
  std::vector<std::string> names_;
  std::vector<::torch::Tensor> parameters_;
  std::shared_ptr<ddp::Reducer> reducer_;  // views of its slots keep it too
  double scale_;
  bool as_views_;
  std::vector<::torch::Tensor> sums_;  // views of the reducer's slots, laid out as the parameters
  std::vector<const void*> hooks_;     // ours, by slot
  std::vector<std::size_t> next_order_;
  bool agreed_ = false, settled_ = false;
};

}  // namespace lockstep::torch
