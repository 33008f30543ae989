#include "trainer/replica.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

namespace lockstep::trainer {
namespace {

// Places in the reducer's tail.
enum TailPlace : std::size_t { kLoss, kCorrect, kCount, kStops = 4 };

std::vector<nn::NamedParameter> trained(const nn::Module& module) {
  auto all = module.named_parameters();
  std::erase_if(all, [](const auto& named) { return !named.parameter->requires_grad(); });
  return all;
}

std::vector<ddp::SlotSpec> slots_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<ddp::SlotSpec> slots;
  for (const auto& [name, parameter] : parameters)
    slots.push_back({name, static_cast<std::size_t>(parameter->value().count()), parameter->value().dtype()});
  return slots;
}

ddp::NamedBytes bytes_of(const std::string& name, const nn::Tensor& tensor) {
  return {name, {static_cast<std::byte*>(tensor.raw()), tensor.bytes()}};
}

}  // namespace

Replica::Replica(comm::ProcessGroup& group, nn::Backend& backend, nn::Module& module, const ddp::BucketLimits& limits)
    : group_(group),
      backend_(backend),
      module_(module),
      parameters_(trained(module)),
      reducer_(group, slots_of(parameters_), limits) {
  ddp::broadcast_state(group_, parameter_bytes(), 0);
  broadcast_buffers();
  for (const auto& [name, parameter] : module_.named_parameters()) parameter->changed();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    parameters_[slot].parameter->on_ready = [this, slot] { reducer_.mark_ready(slot); };
  bind_gradients();
}

Replica::~Replica() {
  for (const auto& [name, parameter] : parameters_) parameter->on_ready = nullptr;
}

void Replica::bind_gradients() {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    auto& parameter = *parameters_[slot].parameter;
    parameter.bind_gradient(
        nn::Tensor::view_of(reducer_.storage(slot).data(), parameter.value().shape(), parameter.value().dtype()));
  }
}

std::vector<ddp::NamedBytes> Replica::parameter_bytes() const {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& [name, parameter] : module_.named_parameters()) pieces.push_back(bytes_of(name, parameter->value()));
  return pieces;
}

std::vector<ddp::NamedBytes> Replica::buffer_bytes() const {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& buffer : module_.named_buffers()) pieces.push_back(bytes_of(buffer.name, *buffer.tensor));
  return pieces;
}

void Replica::begin_step(std::int64_t step) {
  // Not at the end of the first step: its gradients stay readable until the second begins.
  if (order_known_ && !std::exchange(order_adopted_, true) && reducer_.adopt_ready_order()) bind_gradients();
  for (const auto& [name, parameter] : parameters_) parameter->forget_gradient();
  reducer_.begin_step(step);
  if (stop_.defined()) backend_.pointwise().copy(stop_, totals().slice(kStops, kStops + 1));
}

void Replica::adopt_order(const std::vector<std::string>& names) {
  std::map<std::string, std::size_t> slots;
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) slots[parameters_[slot].name] = slot;
  std::vector<std::size_t> order;
  for (const auto& name : names)
    if (const auto node = slots.extract(name); !node.empty()) order.push_back(node.mapped());
  if (order.size() != parameters_.size() || names.size() != order.size()) return;
  order_known_ = order_adopted_ = true;
  if (reducer_.adopt_order(std::move(order))) bind_gradients();
}

std::vector<std::string> Replica::order() const {
  std::vector<std::string> names;
  if (!order_adopted_) return names;
  for (const std::size_t slot : reducer_.order()) names.push_back(parameters_[slot].name);
  return names;
}

void Replica::count_stops() {
  stop_ = backend_.empty({1});
  ask_to_stop(false);
}

void Replica::ask_to_stop(bool mine) {
  const float value = mine ? 1.0f : 0.0f;
  backend_.write(std::as_bytes(std::span(&value, 1)), stop_);
}

void Replica::backward(nn::Tape& tape, const nn::Loss& loss, std::int64_t count) {
  const nn::Tensor tail = totals();
  backend_.pointwise().copy(loss.totals(), tail.slice(kLoss, kCount));
  backend_.pointwise().fill(tail.slice(kCount, kCount + 1), static_cast<float>(count));
  tape.set_node_hook([this] { reducer_.poll(); });
  tape.backward(loss.value);
}

void Replica::contribute_nothing() { reducer_.contribute_nothing(); }

void Replica::finish(FunctionRef<void(std::span<const std::size_t>)> on_bucket) {
  reducer_.finish(backend_.stream(), on_bucket);
  order_known_ = true;
}

bool Replica::on_all(bool mine) {
  const auto all = group_.all_gather_numbers(mine ? 1 : 0);
  return std::ranges::find(all, 0) == all.end();
}

void Replica::replayed(std::int64_t step, std::uint64_t operations) {
  group_.set_step(step);
  group_.replayed(operations);
}

nn::Tensor Replica::totals() const {
  return nn::Tensor::view_of(reducer_.tail().data(), {ddp::Reducer::kTailFloats}, DType::kF32);
}

Replica::Totals Replica::Totals::from(std::span<const std::byte> bytes) {
  std::array<float, ddp::Reducer::kTailFloats> tail{};
  LOCKSTEP_ASSERT(bytes.size() == sizeof tail, "{} bytes of totals", bytes.size());
  std::memcpy(tail.data(), bytes.data(), sizeof tail);
  return {.loss = static_cast<double>(tail[kLoss]),
          .correct = static_cast<double>(tail[kCorrect]),
          .count = static_cast<double>(tail[kCount]),
          .stops = static_cast<double>(tail[kStops])};
}

void Replica::broadcast_buffers() { ddp::broadcast_state(group_, buffer_bytes(), 0); }

void Replica::check() const { ddp::check_replicas(group_, parameter_bytes()); }

}  // namespace lockstep::trainer
