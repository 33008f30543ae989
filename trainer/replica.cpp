#include "trainer/replica.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "comm/agree.h"
#include "trainer/module_manifest.h"

namespace lockstep::trainer {
namespace {

// Places in the reducer's tail.
enum TailPlace : std::size_t { kLoss, kCorrect, kCount, kUnused, kStops };

std::vector<nn::NamedParameter> trained(const nn::Module& module) {
  auto all = module.named_parameters();
  std::erase_if(all, [](const auto& named) { return !named.parameter->requires_grad(); });
  return all;
}

std::vector<nn::NamedParameter> frozen(const nn::Module& module) {
  auto all = module.named_parameters();
  std::erase_if(all, [](const auto& named) { return named.parameter->requires_grad(); });
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

int synchronised_norms(nn::Module& module) {
  int count = 0;
  for (const auto& [name, child] : module.named_modules()) {
    const auto* const norm = dynamic_cast<const nn::BatchNorm*>(child);
    if (norm != nullptr && norm->synchronised()) ++count;
  }
  return count;
}

// Everything that collectives depend on, before the first of them does.
void compare_modules(comm::ProcessGroup& group, nn::Module& module, const ddp::BucketLimits& limits,
                     const Replica::Options& options) {
  comm::Manifest manifest = manifest_of(module);
  const comm::Manifest how = {
      {"bytes of a bucket", fmt::to_string(limits.bytes)},
      {"bytes of the first bucket", fmt::to_string(limits.first_bytes)},
      {"broadcast_buffers", options.broadcast_buffers ? "true" : "false"},
      {"find_unused_parameters", options.find_unused ? "true" : "false"},
      {"synchronised batch normalisations", fmt::to_string(synchronised_norms(module))},
  };
  manifest.insert(manifest.end(), how.begin(), how.end());
  comm::compare_manifests(group, manifest);
}

std::vector<nn::NamedParameter> compared(comm::ProcessGroup& group, nn::Module& module, const ddp::BucketLimits& limits,
                                         const Replica::Options& options) {
  compare_modules(group, module, limits, options);
  return trained(module);
}

}  // namespace

// Where batch normalisations sum in the middle of backward, gradients that are absent on some ranks would have buckets
// start at other places among those sums.
Replica::Replica(comm::ProcessGroup& group, nn::Backend& backend, nn::Module& module, const ddp::BucketLimits& limits,
                 Options options)
    : group_(group),
      backend_(backend),
      module_(module),
      options_(options),
      parameters_(compared(group, module, limits, options)),
      frozen_(frozen(module)),
      module_lifetime_(module.lifetime()),
      group_lifetime_(group.lifetime()),
      reducer_(group, slots_of(parameters_), limits,
               {.find_unused = options.find_unused,
                .start_late = options.find_unused && synchronised_norms(module) > 0,
                .wait_for_unused = options.wait_for_unused}) {
  ddp::broadcast_state(group_, parameter_bytes(), 0);
  broadcast_buffers();
  for (const auto& [name, parameter] : module_.named_parameters()) parameter->changed();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    lifetimes_.push_back(parameters_[slot].parameter->lifetime());
    parameters_[slot].parameter->on_ready = [this, slot] {
      if (summing_)
        reducer_.mark_ready(slot);
      else if (refuse_strays_)
        refuse_stray(slot);
    };
  }
  bind_gradients();
  if (options_.broadcast_buffers) share_buffers();
}

void Replica::share_buffers() {
  const auto buffers = module_.named_buffers();
  if (group_.size() == 1 || buffers.empty()) return;
  std::size_t bytes = 0;
  for (const auto& buffer : buffers) bytes += comm::align_up(buffer.tensor->bytes());
  buffer_arena_ = group_.allocate(bytes);
  std::size_t at = 0;
  for (const auto& buffer : buffers) {
    nn::Tensor& mine = *buffer.tensor;
    buffers_.push_back({&mine, nn::Tensor::view_of(buffer_arena_->data() + at, mine.shape(), mine.dtype())});
    at += comm::align_up(mine.bytes());
  }
}

Replica::~Replica() {
  for (std::size_t slot = 0; slot < lifetimes_.size(); ++slot)
    if (lifetimes_[slot].alive()) parameters_[slot].parameter->on_ready = nullptr;
}

void Replica::refuse_stray(std::size_t slot) const {
  throw UsageError(
      fmt::format("{} got a gradient in a pass that DistributedDataParallel knows nothing of: it would not "
                  "be summed over the ranks",
                  parameters_[slot].name),
      "call the DistributedDataParallel and not the module in it (ddp(tape, x), not net(tape, x)); for "
      "gradients of this rank alone, do so while no_sync() is there");
}

void Replica::mark_partial() {
  for (const auto& [name, parameter] : parameters_)
    if (parameter->has_gradient()) parameter->mark_partial();
}

void Replica::check_intact() const {
  check_usage(module_lifetime_.alive(), "DistributedDataParallel of a module that is gone",
              "keep the module as long as what wraps it");
  check_usage(group_lifetime_.alive(), "DistributedDataParallel over a group that is gone",
              "keep the group (the session) as long as what sums over it");
  for (const auto& [name, parameter] : frozen_)
    if (parameter->requires_grad())
      throw UsageError(fmt::format("{} is trained now, and was not when DistributedDataParallel was made: its gradient "
                                   "would not be summed",
                                   name),
                       "call set_requires_grad(true) before, or make the DistributedDataParallel anew");
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

void Replica::rebuild_buckets() {
  if (!order_known_ || std::exchange(rebuilt_, true)) return;
  std::vector<nn::Tensor> held(parameters_.size());
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const nn::Parameter& parameter = *parameters_[slot].parameter;
    if (!parameter.has_gradient()) continue;
    held[slot] = backend_.empty(parameter.value().shape());
    backend_.pointwise().copy(parameter.gradient(), held[slot]);
  }
  if (!reducer_.rebuild_buckets()) return;
  bind_gradients();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (!held[slot].defined()) continue;
    backend_.pointwise().copy(held[slot], parameters_[slot].parameter->gradient());
    parameters_[slot].parameter->mark_grad_valid();
  }
}

void Replica::rebuild_buckets(const std::vector<std::string>& names) {
  std::map<std::string, std::size_t> slots;
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) slots[parameters_[slot].name] = slot;
  std::vector<std::size_t> order;
  for (const auto& name : names)
    if (const auto node = slots.extract(name); !node.empty()) order.push_back(node.mapped());
  if (order.size() != parameters_.size() || names.size() != order.size()) return;
  order_known_ = rebuilt_ = true;
  if (reducer_.rebuild_buckets(std::move(order))) bind_gradients();
}

std::vector<std::string> Replica::order() const {
  std::vector<std::string> names;
  if (!rebuilt_) return names;
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

void Replica::sync_buffers() {
  if (buffer_arena_ == nullptr) return;
  constexpr int kRoot = 0;
  nn::PointwiseKernels& kernels = backend_.pointwise();
  if (group_.rank() == kRoot)
    for (const auto& [mine, sent] : buffers_) kernels.copy(*mine, sent);
  group_.broadcast({.arena = buffer_arena_.get(), .count = buffer_arena_->bytes(), .dtype = DType::kU8}, kRoot)
      .wait(backend_.stream());
  if (group_.rank() != kRoot)
    for (const auto& [mine, sent] : buffers_) kernels.copy(sent, *mine);
}

void Replica::begin_step(std::int64_t step) {
  for (const auto& [name, parameter] : parameters_) parameter->clear_grad();
  rebuild_buckets();  // not at the end of the first step, when there would be gradients to move
  group_.set_step(step);
  sync_buffers();
  begin_reduction(step);
}

void Replica::begin_reduction(std::int64_t step) {
  reducer_.begin_step(step);
  if (stop_.defined()) backend_.pointwise().copy(stop_, totals().slice(kStops, kStops + 1));
  reducing_ = true;
  contributed_ = 0;
}

void Replica::backward(nn::Tape& tape, const nn::Loss& loss, std::int64_t count, bool last) {
  const nn::Tensor tail = totals();
  contributed_ += count;
  backend_.pointwise().add_to(loss.totals(), 1.0f, tail.slice(kLoss, kCount));
  backend_.pointwise().fill(tail.slice(kCount, kCount + 1), static_cast<float>(contributed_));
  if (last) mark_unused();
  tape.set_node_hook([this] { reducer_.poll(); });
  tape.backward(loss.value);
}

void Replica::mark_unused() {
  summing_ = true;
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const nn::Parameter& parameter = *parameters_[slot].parameter;
    if (parameter.awaits_backward()) continue;
    parameter.has_gradient() ? reducer_.mark_ready(slot) : reducer_.mark_slot_unused(slot);
  }
}

void Replica::contribute_nothing() {
  const bool nothing =
      std::ranges::none_of(parameters_, [](const auto& named) { return named.parameter->has_gradient(); });
  if (nothing) return reducer_.contribute_nothing();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    parameters_[slot].parameter->has_gradient() ? reducer_.mark_ready(slot) : reducer_.mark_slot_unused(slot);
}

void Replica::keep_sums_once() {
  if (group_.rank() == 0) return;
  for (const auto& [name, parameter] : parameters_)
    if (parameter->has_gradient()) backend_.pointwise().fill(parameter->gradient(), 0.0f);
}

void Replica::finish(FunctionRef<void(std::span<const std::size_t>)> on_bucket) {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    if (!reducer_.decided(slot) && parameters_[slot].parameter->has_gradient()) reducer_.mark_ready(slot);
  summing_ = reducing_ = false;
  reducer_.finish(backend_.stream(), [&](std::span<const std::size_t> slots) {
    for (const std::size_t slot : slots) parameters_[slot].parameter->mark_grad_valid();
    on_bucket(slots);
  });
  order_known_ = true;
  if (backend_.device().kind == DeviceKind::kCpu || options_.find_unused) return;
  backend_.pointwise().copy(nn::Tensor::view_of(reducer_.unused_count().data(), {1}),
                            totals().slice(kUnused, kUnused + 1));
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
          .unused = static_cast<double>(tail[kUnused]),
          .stops = static_cast<double>(tail[kStops])};
}

void Replica::broadcast_buffers() { ddp::broadcast_state(group_, buffer_bytes(), 0); }

void Replica::check() const { ddp::check_replicas(group_, parameter_bytes()); }

void Replica::check_with_buffers() const {
  auto pieces = parameter_bytes();
  for (auto& buffer : buffer_bytes()) pieces.push_back(std::move(buffer));
  ddp::check_replicas(group_, pieces);
}

}  // namespace lockstep::trainer
