#include "lockstep/parallel/bound_gradients.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "ddp/bucket_tuner.h"
#include "lockstep/comm/agree.h"

namespace lockstep::parallel {
namespace {

// A convolution's are its output channels, as in PyTorch's PowerSGD.
std::size_t rows_of(const nn::Shape& shape) {
  return shape.dims().size() < 2 ? 1 : static_cast<std::size_t>(shape.dims()[0]);
}

/// What a gradient adds to the sum for all of them, which does not depend on their order.
std::uint64_t hash_of(std::size_t slot, const nn::Parameter& parameter) {
  const nn::Tensor& gradient = parameter.gradient();
  Hash64 hash;
  hash.update({static_cast<const std::byte*>(gradient.raw()), gradient.bytes()});
  return mixed(slot + 1, hash.finish());
}

}  // namespace

std::uint64_t hash_of_gradients(const std::vector<nn::NamedParameter>& parameters) {
  std::uint64_t hash = 0;
  for (std::size_t slot = 0; slot < parameters.size(); ++slot)
    if (parameters[slot].parameter->has_gradient()) hash += hash_of(slot, *parameters[slot].parameter);
  return hash;
}

std::vector<ddp::SlotSpec> slots_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<ddp::SlotSpec> slots;
  for (const auto& [name, parameter] : parameters)
    slots.push_back({.name = name,
                     .count = static_cast<std::size_t>(parameter->value().count()),
                     .dtype = parameter->value().dtype(),
                     .rows = rows_of(parameter->value().shape())});
  return slots;
}

BoundGradients::BoundGradients(comm::ProcessGroup& group, nn::Backend& backend,
                               std::vector<nn::NamedParameter> parameters, const ddp::BucketLimits& limits,
                               const ddp::Reducer::Options& options, bool as_views)
    : group_(group),
      backend_(backend),
      parameters_(std::move(parameters)),
      reducer_(group, slots_of(parameters_), limits, options) {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    lifetimes_.push_back(parameters_[slot].parameter->lifetime());
    parameters_[slot].parameter->on_ready = [this, slot] {
      if (reducing_ && reducer_.in_shards())
        pass_has(slot, 0);
      else if (reducing_)
        hand_over(slot);
      else if (refuse_strays_)
        refuse_stray(slot);
    };
  }
  if (options.tree != nullptr) {
    missing_ = std::make_unique<std::atomic<int>[]>(parameters_.size());
    mine_.reserve(parameters_.size());
  }
  if (!as_views)
    for (const auto& [name, parameter] : parameters_)
      own_.push_back(backend_.empty(parameter->value().shape(), parameter->value().dtype()));
  bind();
}

BoundGradients::~BoundGradients() {
  const auto let_go = [this](nn::Parameter& parameter) {
    parameter.on_ready = nullptr;
    if (own_.empty()) parameter.unbind_gradient();  // from the arena, which ends
  };
  for (std::size_t slot = 0; slot < lifetimes_.size(); ++slot)
    if (lifetimes_[slot].alive()) let_go(*parameters_[slot].parameter);
  auto alive = copies_lifetimes_.begin();
  for (const auto& copy : copies_)
    for (const auto& [name, parameter] : copy)
      if ((alive++)->alive()) let_go(*parameter);
}

void BoundGradients::bind() {
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) bind(slot);
}

void BoundGradients::bind(std::size_t slot) {
  parameters_[slot].parameter->bind_gradient(own_.empty() ? in_arena(slot) : own_[slot]);
}

nn::Tensor BoundGradients::in_arena(std::size_t slot) const {
  const nn::Tensor& value = parameters_[slot].parameter->value();
  return nn::Tensor::view_of(reducer_.storage(slot).data(), value.shape(), value.dtype());
}

void BoundGradients::hand_over(std::size_t slot) {
  if (!own_.empty()) backend_.pointwise().copy(own_[slot], in_arena(slot));
  reducer_.mark_ready(slot);
}

void BoundGradients::refuse_stray(std::size_t slot) const {
  throw UsageError(
      fmt::format("{} got a gradient in a pass that DistributedDataParallel knows nothing of: it would not "
                  "be summed over the ranks",
                  parameters_[slot].name),
      "call the DistributedDataParallel and not the module in it (ddp(tape, x), not net(tape, x)); for "
      "gradients of this rank alone, do so while no_sync() is there");
}

void BoundGradients::apply_layout() {
  const bool reorders = agreed_ && !settled_;
  if (!reorders && !next_bytes_) return;
  const std::size_t bytes = std::exchange(next_bytes_, std::nullopt).value_or(reducer_.limits().bucket_bytes);
  auto order = reorders ? std::exchange(next_order_, {}) : reducer_.order();
  settled_ = true;
  if (!own_.empty()) {
    reducer_.rebuild_buckets(std::move(order), bytes);
    return;
  }
  std::vector<nn::Tensor> held(parameters_.size());
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const nn::Parameter& parameter = *parameters_[slot].parameter;
    if (!parameter.has_gradient()) continue;
    held[slot] = backend_.empty(parameter.value().shape());
    backend_.pointwise().copy(parameter.gradient(), held[slot]);
  }
  if (!reducer_.rebuild_buckets(std::move(order), bytes)) return;
  bind();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (!held[slot].defined()) continue;
    backend_.pointwise().copy(held[slot], parameters_[slot].parameter->gradient());
    parameters_[slot].parameter->mark_grad_valid();
  }
}

void BoundGradients::set_bucket_bytes(std::size_t bytes) {
  tuning_ = false;
  choice_ = {.bucket_bytes = bytes, .trials = {}, .steps = 0};
  if (reducer_.rebuild_buckets(reducer_.order(), bytes) && own_.empty()) bind();
}

// Times are from the end of a step to the end of the next one: the optimizer's are in them, wherever the loop calls it.
void BoundGradients::tune() {
  if (tuner_ == nullptr) {
    const ddp::BucketLimits& limits = reducer_.limits();
    tuner_ = std::make_unique<ddp::BucketTuner>(group_.size() == 1
                                                    ? std::vector<std::size_t>{limits.bucket_bytes}
                                                    : ddp::sizes_to_try(reducer_.specs(), reducer_.order(), limits),
                                                limits.bucket_bytes);
  }
  if (group_.device().kind != DeviceKind::kCpu) {  // a step ends when the device has done it
    std::vector<std::byte> count(reducer_.unused_count().size());
    backend_.download(nn::Tensor::view_of(reducer_.unused_count().data(), {1}), count);
  }
  const auto now = Clock::now();
  if (step_end_ && !tuner_->done() && tuner_->add_step(seconds_between(*step_end_, now))) {
    tuner_->settle(comm::largest_of_ranks(group_, tuner_->medians()));
  }
  if (tuner_->bytes() != reducer_.limits().bucket_bytes) next_bytes_ = tuner_->bytes();
  if (tuner_->done()) {
    choice_ = tuner_->choice();
    tuning_ = false;
    tuner_.reset();
  }
  step_end_ = Clock::now();
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
  if (reducer_.rebuild_buckets(std::move(order)) && own_.empty()) bind();
}

void BoundGradients::begin_reduction(std::int64_t step) {
  reducer_.begin_step(step);
  reducing_ = true;
}

void BoundGradients::mark_unused() {
  // Of shards that are computed at a time, another pass may reach it.
  if (reducer_.in_shards() && computes_.size() > 1) return;
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    const nn::Parameter& parameter = *parameters_[slot].parameter;
    if (parameter.awaits_backward()) continue;
    parameter.has_gradient() ? hand_over(slot) : reducer_.mark_slot_unused(slot);
  }
}

void BoundGradients::contribute_held() {
  const bool nothing =
      std::ranges::none_of(parameters_, [](const auto& named) { return named.parameter->has_gradient(); });
  if (nothing) return reducer_.contribute_nothing();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
    parameters_[slot].parameter->has_gradient() ? hand_over(slot) : reducer_.mark_slot_unused(slot);
}

void BoundGradients::add_copy(std::vector<nn::NamedParameter> parameters) {
  LOCKSTEP_ASSERT(reducer_.in_shards() && parameters.size() == parameters_.size(), "a copy of {} of {} parameters",
                  parameters.size(), parameters_.size());
  const std::size_t module = copies_.size() + 1;
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    copies_lifetimes_.push_back(parameters[slot].parameter->lifetime());
    parameters[slot].parameter->on_ready = [this, slot, module] { pass_has(slot, module); };
  }
  copies_.push_back(std::move(parameters));
}

void BoundGradients::set_tree(const comm::ReductionTree& tree) {
  if (reducer_.set_tree(tree)) bind();
}

comm::TreeNode BoundGradients::begin_turn() {
  const comm::TreeNode shards = reducer_.begin_shards();
  bind();
  for (std::size_t i = 1; i < shards.count; ++i)
    for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
      nn::Parameter& parameter = *copies_[i - 1][slot].parameter;
      parameter.bind_gradient(
          nn::Tensor::view_of(reducer_.storage(slot, i).data(), parameter.value().shape(), parameter.value().dtype()));
    }
  computes_.assign(shards.count, true);
  hashes_ = {};
  mine_.clear();
  reduced_ = 0;
  return shards;
}

void BoundGradients::skip_shard(std::size_t shard) {
  computes_[shard] = false;
  reducer_.skip_shard(shard);
}

void BoundGradients::begin_passes() {
  const auto passes = static_cast<int>(std::ranges::count(computes_, true));
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) missing_[slot].store(passes, std::memory_order_relaxed);
}

// On the thread of that pass.
void BoundGradients::pass_has(std::size_t slot, std::size_t module) {
  if (!hashes_.empty())
    hashes_[module] += hash_of(slot, *(module == 0 ? parameters_ : copies_[module - 1])[slot].parameter);
  missing_[slot].fetch_sub(1, std::memory_order_release);
  if (module != 0) return;
  mine_.push_back(slot);
  reduce_ready();
}

// In the order of this thread's pass: what another pass has not written yet waits, and so does all after it.
void BoundGradients::reduce_ready() {
  while (reduced_ < mine_.size() && missing_[mine_[reduced_]].load(std::memory_order_acquire) == 0)
    reducer_.mark_ready(mine_[reduced_++]);
}

void BoundGradients::settle_turn() {
  reduce_ready();
  for (std::size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (reducer_.decided(slot)) continue;
    const auto has = [&](std::size_t module) {
      return (module == 0 ? parameters_[slot] : copies_[module - 1][slot]).parameter->has_gradient();
    };
    bool any = false;
    for (std::size_t module = 0; module < computes_.size(); ++module) any = any || (computes_[module] && has(module));
    if (!any) {
      reducer_.mark_slot_unused(slot);
      continue;
    }
    for (std::size_t module = 0; module < computes_.size(); ++module)
      if (computes_[module] && !has(module)) reducer_.note_unused(slot, module);
    reducer_.mark_ready(slot);
  }
}

void BoundGradients::end_turn() {
  settle_turn();
  if (is_last_turn()) return;
  reducer_.end_shards();
  for (const auto& [name, parameter] : parameters_) parameter->clear_grad();
}

void BoundGradients::finish(FunctionRef<void(std::span<const std::size_t>)> on_bucket) {
  if (!reducer_.in_shards()) {
    for (std::size_t slot = 0; slot < parameters_.size(); ++slot)
      if (!reducer_.decided(slot) && parameters_[slot].parameter->has_gradient()) hand_over(slot);
  }
  const bool in_shards = reducer_.in_shards();
  reducing_ = false;
  reducer_.finish(backend_.stream(), [&](std::span<const std::size_t> slots) {
    for (const std::size_t slot : slots) {
      if (in_shards) bind(slot);  // the last shard's are elsewhere
      if (!own_.empty()) backend_.pointwise().copy(in_arena(slot), own_[slot]);
      parameters_[slot].parameter->mark_grad_valid();
    }
    on_bucket(slots);
  });
  if (tuning_ && settled_) tune();
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
