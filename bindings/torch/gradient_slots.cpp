#include "bindings/torch/gradient_slots.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::torch {
namespace {

namespace autograd = ::torch::autograd;

class SlotHook final : public autograd::PostAccumulateGradHook {
 public:
  SlotHook(std::weak_ptr<AccumulationListener> listener, std::size_t slot,
           std::unique_ptr<autograd::PostAccumulateGradHook> before)
      : listener_(std::move(listener)), slot_(slot), before_(std::move(before)) {}

  void operator()(const autograd::Variable& parameter) override {
    if (before_ != nullptr) (*before_)(parameter);
    if (const auto listener = listener_.lock()) listener->accumulated(slot_);
  }
  bool is_live() const { return !listener_.expired(); }
  const autograd::PostAccumulateGradHook* before() const { return before_.get(); }
  std::unique_ptr<autograd::PostAccumulateGradHook> take_before() { return std::move(before_); }

 private:
  std::weak_ptr<AccumulationListener> listener_;
  std::size_t slot_;
  std::unique_ptr<autograd::PostAccumulateGradHook> before_;
};

std::vector<ddp::SlotSpec> slots_of(const std::vector<NamedTensor>& parameters) {
  std::vector<ddp::SlotSpec> slots;
  for (const auto& [name, tensor] : parameters)
    slots.push_back({.name = name,
                     .count = static_cast<std::size_t>(tensor.numel()),
                     .dtype = summed_in(tensor.scalar_type()) == ::torch::kFloat64 ? DType::kF64 : DType::kF32,
                     .rows = tensor.dim() < 2 ? 1 : static_cast<std::size_t>(tensor.size(0))});
  return slots;
}

}  // namespace

std::optional<::torch::Dtype> summed_in(::torch::Dtype type) {
  switch (type) {
    case ::torch::kFloat32:
    case ::torch::kBFloat16:
    case ::torch::kFloat16: return ::torch::kFloat32;
    case ::torch::kFloat64: return ::torch::kFloat64;
    default: return std::nullopt;
  }
}

GradientSlots::GradientSlots(comm::ProcessGroup& group, std::vector<NamedTensor> parameters,
                             const ddp::BucketLimits& limits, const Options& options)
    : group_(group),
      reducer_(std::make_shared<ddp::Reducer>(group, slots_of(parameters), limits, options.reducer)),
      scale_(options.scale),
      as_views_(options.as_views),
      hooks_(parameters.size()) {
  for (auto& [name, tensor] : parameters) {
    names_.push_back(std::move(name));
    parameters_.push_back(std::move(tensor));
  }
  find_sums();
}

GradientSlots::~GradientSlots() {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const auto& current = autograd::impl::post_acc_grad_hooks(parameters_[slot]);
    if (current == nullptr || current.get() != hooks_[slot]) continue;  // another one is around it, and calls it
    autograd::impl::set_post_acc_grad_hooks(parameters_[slot], static_cast<SlotHook&>(*current).take_before());
  }
}

void GradientSlots::install_hooks(const std::shared_ptr<AccumulationListener>& listener) {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    auto hook =
        std::make_unique<SlotHook>(listener, slot, std::move(autograd::impl::post_acc_grad_hooks(parameters_[slot])));
    hooks_[slot] = hook.get();
    autograd::impl::set_post_acc_grad_hooks(parameters_[slot], std::move(hook));
  }
}

bool GradientSlots::is_hooked(const ::torch::Tensor& parameter) {
  const autograd::PostAccumulateGradHook* hook = autograd::impl::post_acc_grad_hooks(parameter).get();
  while (const auto* const ours = dynamic_cast<const SlotHook*>(hook)) {
    if (ours->is_live()) return true;
    hook = ours->before();
  }
  return false;
}

void GradientSlots::find_sums() {
  sums_.clear();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const auto& parameter = parameters_[slot];
    const auto type = parameter.options().dtype(summed_in(parameter.scalar_type()).value()).requires_grad(false);
    void* const data = reducer_->storage(slot).data();
    // With the parameter's strides, which are its gradient's, copies are of whole memory.
    const auto keep = [reducer = reducer_](void*) {};
    sums_.push_back(parameter.is_non_overlapping_and_dense()
                        ? ::torch::from_blob(data, parameter.sizes(), parameter.strides(), keep, type)
                        : ::torch::from_blob(data, parameter.sizes(), keep, type));
  }
}

void GradientSlots::check_gradient(std::size_t slot, const ::torch::Tensor& gradient) const {
  const auto refuse = [&](const std::string& what, const char* remedy) {
    throw UsageError("the gradient of " + names_[slot] + " " + what, remedy);
  };
  if (gradient.layout() != ::torch::kStrided)
    refuse("is sparse", "only dense gradients are summed: build the embedding without sparse(true)");
  if (gradient.requires_grad())
    refuse("is to be differentiated again",
           "call backward() without create_graph, or torch::autograd::grad() for such");
  if (gradient.sizes() != sums_[slot].sizes() || gradient.device() != sums_[slot].device() ||
      summed_in(gradient.scalar_type()) != sums_[slot].scalar_type())
    refuse("is " + described({"", gradient}).substr(1) + " on " + gradient.device().str() +
               ", which the parameter was not when DistributedDataParallel was made",
           "change a module's type, shape or device before it is wrapped");
}

void GradientSlots::send(std::size_t slot) {
  const auto& gradient = parameters_[slot].grad();
  check_gradient(slot, gradient);
  const ::torch::NoGradGuard guard;
  if (!is_view(slot)) sums_[slot].copy_(gradient);
  reducer_->mark_ready(slot);
}

bool GradientSlots::is_view(std::size_t slot) const {
  const auto& gradient = parameters_[slot].grad();
  return as_views_ && gradient.defined() && gradient.is_alias_of(sums_[slot]);
}

void GradientSlots::send_held() {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    if (!reducer_->decided(slot) && parameters_[slot].grad().defined()) send(slot);
}

bool GradientSlots::any_held() const {
  return std::ranges::any_of(parameters_, [](const auto& parameter) { return parameter.grad().defined(); });
}

void GradientSlots::receive(std::size_t slot) {
  auto& sum = sums_[slot];
  if (as_views_ && sum.scalar_type() == parameters_[slot].scalar_type()) {
    if (scale_ != 1.0) sum.mul_(scale_);
    if (!is_view(slot)) parameters_[slot].mutable_grad() = sum.detach();
    return;
  }
  auto& gradient = parameters_[slot].mutable_grad();
  if (!gradient.defined()) gradient = ::torch::empty_like(parameters_[slot]);
  if (scale_ == 1.0)
    gradient.copy_(sum);
  else if (gradient.scalar_type() == sum.scalar_type())
    at::mul_out(gradient, sum, ::torch::scalar_tensor(scale_, sum.options()));
  else
    gradient.copy_(sum * scale_);
}

void GradientSlots::finish() {
  send_held();
  const ::torch::NoGradGuard guard;
  reducer_->finish(group_.producer_stream(), [&](std::span<const std::size_t> slots) {
    for (const std::size_t slot : slots) receive(slot);
  });
  if (agreed_) return;
  // Here, where all ranks are: what they do until the next backward is the caller's affair.
  next_order_ = reducer_->observed_order();
  agreed_ = !next_order_.empty();
}

void GradientSlots::apply_order() {
  if (settled_ || !agreed_) return;
  settled_ = true;
  const ::torch::NoGradGuard guard;
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    if (is_view(slot)) parameters_[slot].mutable_grad() = parameters_[slot].grad().clone();
  if (reducer_->rebuild_buckets(std::exchange(next_order_, {}))) find_sums();
}

std::vector<std::string> GradientSlots::order() const {
  std::vector<std::string> names;
  if (!agreed_) return names;
  for (const std::size_t slot : settled_ ? reducer_->order() : next_order_) names.push_back(names_[slot]);
  return names;
}

}  // namespace lockstep::torch
