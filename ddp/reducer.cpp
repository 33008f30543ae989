#include "ddp/reducer.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/text.h"

namespace lockstep::ddp {

// The arena: [tail | bucket 0 | bucket 1 | …]. The tail and bucket 0 are one region, so the tail costs no collective of
// its own.
namespace {
constexpr std::size_t kTailBytes = Reducer::kTailFloats * sizeof(float);
static_assert(kTailBytes % comm::kArenaAlignment == 0);
}  // namespace

Reducer::Reducer(comm::ProcessGroup& group, std::vector<SlotSpec> slots, const BucketLimits& limits)
    : group_(group), slots_(std::move(slots)), limits_(limits), is_ready_(slots_.size(), false) {
  for (const auto& slot : slots_)
    check_usage(slot.dtype == DType::kF32, "gradients of other types than f32 are not reduced");
  std::vector<std::size_t> reversed(slots_.size());
  std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
  lay_out(std::move(reversed));
  arena_ = group_.allocate(kTailBytes + plan_.bytes);
  ready_order_.reserve(slots_.size());
}

void Reducer::lay_out(std::vector<std::size_t> order) {
  order_ = std::move(order);
  plan_ = plan_buckets(slots_, order_, limits_);
  if (plan_.buckets.empty()) plan_.buckets.emplace_back();  // nothing to train: the tail still travels
  missing_.resize(plan_.buckets.size());
  works_.resize(plan_.buckets.size());
  timeline_.buckets.resize(plan_.buckets.size());
}

std::span<std::byte> Reducer::storage(std::size_t slot) const {
  return arena_->view<std::byte>(kTailBytes + plan_.slot_offset_bytes[slot],
                                 slots_[slot].count * size_of(slots_[slot].dtype));
}

std::span<std::byte> Reducer::tail() const { return arena_->view<std::byte>(0, kTailBytes); }

comm::Region Reducer::bytes_at(std::size_t offset, std::size_t count) const {
  return {.arena = arena_.get(), .offset_bytes = offset, .count = count, .dtype = DType::kU8};
}

comm::Region Reducer::region_of(std::size_t bucket) const {
  const auto& b = plan_.buckets[bucket];
  const std::size_t lead = bucket == 0 ? kTailBytes : 0;
  return {.arena = arena_.get(),
          .offset_bytes = kTailBytes + b.offset_bytes - lead,
          .count = (b.bytes + lead) / size_of(b.dtype),
          .dtype = b.dtype};
}

void Reducer::begin_step(std::int64_t step) {
  LOCKSTEP_ASSERT(started_ == finished_, "a step begins while {} buckets are under way", started_ - finished_);
  group_.set_step(step);
  group_.zero(bytes_at(0, kTailBytes));
  std::fill(is_ready_.begin(), is_ready_.end(), false);
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) missing_[b] = plan_.buckets[b].slots.size();
  ready_order_.clear();
  started_ = finished_ = ready_count_ = 0;
  timeline_.begin = Clock::now();
  waited_ = {};
}

void Reducer::mark_ready(std::size_t slot) {
  LOCKSTEP_ASSERT(slot < slots_.size(), "slot {} of {}", slot, slots_.size());
  if (is_ready_[slot])
    throw UsageError(fmt::format("the gradient of {} became ready twice in one step", slots_[slot].name),
                     "run backward once between begin_step and finish");
  note_finished();  // before this gradient counts as ready, so that the timeline shows what was done by then
  is_ready_[slot] = true;
  ready_order_.push_back(slot);
  const auto now = Clock::now();
  const std::size_t bucket = plan_.slot_bucket[slot];
  if (--missing_[bucket] == 0) timeline_.buckets[bucket].ready = now;
  if (++ready_count_ == slots_.size()) timeline_.last_ready = now;
  start_full_buckets();
}

void Reducer::contribute_nothing() {
  LOCKSTEP_ASSERT(started_ == 0 && ready_count_ == 0, "zeros after {} gradients", ready_count_);
  group_.zero(bytes_at(kTailBytes, plan_.bytes));
  std::fill(is_ready_.begin(), is_ready_.end(), true);
  std::fill(missing_.begin(), missing_.end(), std::size_t{0});
  ready_count_ = slots_.size();
  timeline_.last_ready = Clock::now();
  for (auto& bucket : timeline_.buckets) bucket.ready = timeline_.last_ready;
  start_full_buckets();
}

// Note [Bucket order]
// A bucket starts only when all before it have: ranks may finish their gradients in different orders, their
// collectives must not.
void Reducer::start_full_buckets() {
  while (started_ < plan_.buckets.size() && missing_[started_] == 0) {
    const auto region = region_of(started_);
    timeline_.buckets[started_].bytes = region.bytes();
    timeline_.buckets[started_].start = Clock::now();
    works_[started_] = group_.all_reduce(region, comm::ReduceOp::kSum);
    ++started_;
  }
}

void Reducer::note_finished() {
  while (finished_ < started_ && works_[finished_].done()) timeline_.buckets[finished_++].end = Clock::now();
}

void Reducer::poll() {
  group_.poll();
  note_finished();
}

void Reducer::finish(StreamView stream, FunctionRef<void(std::span<const std::size_t>)> on_bucket) {
  if (slots_.empty() && started_ == 0) start_full_buckets();
  if (started_ < plan_.buckets.size()) {
    std::vector<std::string> names;
    for (std::size_t slot = 0; slot < slots_.size(); ++slot)
      if (!is_ready_[slot]) names.push_back(slots_[slot].name);
    throw UsageError(fmt::format("no gradient for {} in this step", join(names, ", ")),
                     "use every parameter in the forward pass, or freeze it");
  }
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    if (b >= finished_) {
      const auto from = Clock::now();
      works_[b].wait(stream);
      const auto now = Clock::now();
      timeline_.buckets[b].end = works_[b].done() ? now : Clock::time_point{};
      waited_ += now - from;
      finished_ = b + 1;
    }
    on_bucket(plan_.buckets[b].slots);
  }
}

bool Reducer::adopt_ready_order() {
  const std::vector<std::uint64_t> mine(ready_order_.begin(), ready_order_.end());
  const auto all = group_.all_gather_objects(std::as_bytes(std::span(mine)));
  const auto first = std::find_if(all.begin(), all.end(), [](const auto& bytes) { return !bytes.empty(); });
  if (first == all.end()) return false;
  std::vector<std::uint64_t> agreed(slots_.size());
  LOCKSTEP_ASSERT(first->size() == agreed.size() * sizeof(std::uint64_t));
  std::memcpy(agreed.data(), first->data(), first->size());
  return adopt_order({agreed.begin(), agreed.end()});
}

bool Reducer::adopt_order(std::vector<std::size_t> order) {
  if (order == order_) return false;
  lay_out(std::move(order));
  // What was a gradient may be padding now, and padding is summed with the rest: it must be zero.
  group_.zero(bytes_at(0, arena_->bytes()));
  return true;
}

}  // namespace lockstep::ddp
