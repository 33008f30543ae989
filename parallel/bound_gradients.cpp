#include "lockstep/parallel/bound_gradients.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"

namespace lockstep::parallel {
namespace {

std::vector<ddp::SlotSpec> slots_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<ddp::SlotSpec> slots;
  for (const auto& [name, parameter] : parameters)
    slots.push_back({name, static_cast<std::size_t>(parameter->value().count()), parameter->value().dtype()});
  return slots;
}

}  // namespace

BoundGradients::BoundGradients(comm::ProcessGroup& group, nn::Backend& backend,
                               std::vector<nn::NamedParameter> parameters, const ddp::BucketLimits& limits,
                               const ddp::Reducer::Options& options)
    : group_(group),
      backend_(backend),
      parameters_(std::move(parameters)),
      reducer_(group, slots_of(parameters_), limits, options) {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    lifetimes_.push_back(parameters_[slot].parameter->lifetime());
    parameters_[slot].parameter->on_ready = [this, slot] {
      if (reducing_)
        reducer_.mark_ready(slot);
      else if (refuse_strays_)
        refuse_stray(slot);
    };
  }
  bind();
}

BoundGradients::~BoundGradients() {
  for (std::size_t slot = 0; slot < lifetimes_.size(); ++slot)
    if (lifetimes_[slot].alive()) parameters_[slot].parameter->on_ready = nullptr;
}

void BoundGradients::bind() {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) bind(slot);
}

void BoundGradients::bind(std::size_t slot) {
  auto& parameter = *parameters_[slot].parameter;
  parameter.bind_gradient(
      nn::Tensor::view_of(reducer_.storage(slot).data(), parameter.value().shape(), parameter.value().dtype()));
}

void BoundGradients::refuse_stray(std::size_t slot) const {
  throw UsageError(
      fmt::format("{} got a gradient in a pass that DistributedDataParallel knows nothing of: it would not "
                  "be summed over the ranks",
                  parameters_[slot].name),
      "call the DistributedDataParallel and not the module in it (ddp(tape, x), not net(tape, x)); for "
      "gradients of this rank alone, do so while no_sync() is there");
}

void BoundGradients::apply_order() {
  if (settled_ || !agreed_) return;
  settled_ = true;
  std::vector<nn::Tensor> held(parameters_.size());
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const nn::Parameter& parameter = *parameters_[slot].parameter;
    if (!parameter.has_gradient()) continue;
    held[slot] = backend_.empty(parameter.value().shape());
    backend_.pointwise().copy(parameter.gradient(), held[slot]);
  }
  if (!reducer_.rebuild_buckets(std::exchange(next_order_, {}))) return;
  bind();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (!held[slot].defined()) continue;
    backend_.pointwise().copy(held[slot], parameters_[slot].parameter->gradient());
    parameters_[slot].parameter->mark_grad_valid();
  }
}

std::vector<std::string> BoundGradients::order() const {
  std::vector<std::string> names;
  if (!agreed_) return names;
  for (const std::size_t slot : settled_ ? reducer_.order() : next_order_) names.push_back(parameters_[slot].name);
  return names;
}

void BoundGradients::set_order(const std::vector<std::string>& names) {
  std::map<std::string, std::size_t> slots;
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) slots[parameters_[slot].name] = slot;
  std::vector<std::size_t> order;
  for (const auto& name : names)
    if (const auto node = slots.extract(name); !node.empty()) order.push_back(node.mapped());
  if (order.size() != parameters_.size() || names.size() != order.size()) return;
  agreed_ = settled_ = true;
  if (reducer_.rebuild_buckets(std::move(order))) bind();
}

void BoundGradients::begin_reduction(std::int64_t step) {
  reducer_.begin_step(step);
  reducing_ = true;
}

void BoundGradients::mark_unreached() {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const nn::Parameter& parameter = *parameters_[slot].parameter;
    if (parameter.awaits_backward()) continue;
    parameter.has_gradient() ? reducer_.mark_ready(slot) : reducer_.mark_slot_unused(slot);
  }
}

void BoundGradients::contribute_held() {
  const bool nothing =
      std::ranges::none_of(parameters_, [](const auto& named) { return named.parameter->has_gradient(); });
  if (nothing) return reducer_.contribute_nothing();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    parameters_[slot].parameter->has_gradient() ? reducer_.mark_ready(slot) : reducer_.mark_slot_unused(slot);
}

void BoundGradients::begin_shard() {
  reducer_.begin_shards();
  bind();
}

void BoundGradients::end_shard() {
  mark_held();
  reducer_.end_shards();
  for (const auto& [name, parameter] : parameters_) parameter->clear_grad();
}

void BoundGradients::mark_held() {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    if (!reducer_.decided(slot) && parameters_[slot].parameter->has_gradient()) reducer_.mark_ready(slot);
}

void BoundGradients::finish(FunctionRef<void(std::span<const std::size_t>)> on_bucket) {
  mark_held();
  const bool in_shards = reducer_.in_shards();
  reducing_ = false;
  reducer_.finish(backend_.stream(), [&](std::span<const std::size_t> slots) {
    for (const std::size_t slot : slots) {
      if (in_shards) bind(slot);  // the last shard's are elsewhere
      parameters_[slot].parameter->mark_grad_valid();
    }
    on_bucket(slots);
  });
  if (agreed_) return;
  // Here, where all ranks are: what they do until the next backward is the caller's affair.
  next_order_ = reducer_.observed_order();
  agreed_ = !next_order_.empty();
}

void BoundGradients::abandon() {
  reducer_.abandon_step();
  reducing_ = false;
}

void BoundGradients::keep_sums_once() {
  if (group_.rank() == 0) return;
  for (const auto& [name, parameter] : parameters_)
    if (parameter->has_gradient()) backend_.pointwise().fill(parameter->gradient(), 0.0f);
}

void BoundGradients::mark_partial() {
  for (const auto& [name, parameter] : parameters_)
    if (parameter->has_gradient()) parameter->mark_partial();
}

}  // namespace lockstep::parallel
