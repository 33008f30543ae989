// Where a hook finds the slots of a bucket, and what it keeps of each.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/comm_hook.h"

namespace lockstep::ddp {

/// The reducer's slots and buckets.
class HookLayout {
 public:
  void set(std::span<const SlotSpec> slots, const BucketPlan& plan) {
    slots_.assign(slots.begin(), slots.end());
    plan_ = plan;
  }
  std::span<const SlotSpec> slots() const { return slots_; }
  const BucketPlan& plan() const { return plan_; }
  /// CommHook::bytes_sent() of an allreduce of two bytes for each element and `more` bytes; nothing before there are
  /// buckets.
  std::optional<double> bytes_sent_as_halves(std::size_t bucket, int ranks, std::size_t more = 0) const {
    if (bucket >= plan_.buckets.size()) return std::nullopt;
    return bytes_sent_by_all_reduce(static_cast<double>(plan_.buckets[bucket].bytes / 2 + more), ranks);
  }
  /// Where `slot` begins in its bucket, in elements.
  std::size_t begin_of(std::size_t slot) const {
    const auto& bucket = plan_.buckets[plan_.slot_bucket[slot]];
    return (plan_.slot_offset_bytes[slot] - bucket.offset_bytes) / sizeof(float);
  }
  std::span<float> values_of(const GradBucket& bucket, std::size_t slot) const {
    return floats_of(bucket).subspan(begin_of(slot), slots_[slot].count);
  }
  static std::span<float> floats_of(const GradBucket& bucket) {
    return bucket.gradients.arena->view<float>(bucket.gradients.offset_bytes, bucket.gradients.count);
  }
  /// Where the bucket is in `arena`, which has an element of `dtype` for each of the buckets' elements, in their
  /// places.
  comm::Region region_in(const comm::Arena& arena, const GradBucket& bucket, DType dtype) const {
    return {.arena = &arena,
            .offset_bytes = plan_.buckets[bucket.index].offset_bytes / sizeof(float) * size_of(dtype),
            .count = bucket.gradients.count,
            .dtype = dtype};
  }

 private:
  // Copies: a hook may outlive its reducer.
  std::vector<SlotSpec> slots_;
  BucketPlan plan_;
};

/// What is kept of each slot from step to step, in f32. Slots have their places whatever the order of buckets.
class SlotMemory {
 public:
  /// `count_of(slot)` zeros for each of `slots` slots.
  template <class CountOf>
  void allocate(std::size_t slots, const CountOf& count_of) {
    begins_.clear();
    std::size_t at = 0;
    for (std::size_t slot = 0; slot < slots; ++slot) {
      begins_.push_back(at);
      at += count_of(slot);
    }
    begins_.push_back(at);
    values_.assign(at, 0.0f);
  }
  std::span<float> of(std::size_t slot) {
    return std::span(values_).subspan(begins_[slot], begins_[slot + 1] - begins_[slot]);
  }
  std::span<float> all() { return values_; }

 private:
  std::vector<std::size_t> begins_;  // by slot, and the end
  std::vector<float> values_;
};

/// What a bucket has for `slots`, which nobody uses, is owed again: by each of `ranks` ranks the same share.
inline void owe_again(const HookLayout& layout, const GradBucket& bucket, std::span<const std::size_t> slots, int ranks,
                      SlotMemory& owed) {
  const float share = 1.0f / static_cast<float>(ranks);
  for (const std::size_t slot : slots) {
    const auto kept = owed.of(slot);
    const auto dropped = layout.values_of(bucket, slot);
    for (std::size_t i = 0; i < kept.size(); ++i) kept[i] += dropped[i] * share;
  }
}

/// For hooks whose arithmetic is the host's.
inline void check_on_cpu(const CommHook& hook, const comm::ProcessGroup& group) {
  if (group.device().kind == DeviceKind::kCpu) return;
  throw UsageError(fmt::format("communication hook {} on {}: its arithmetic is the CPU's, and a GPU would wait for the "
                               "host in every bucket",
                               hook.name(), to_string(group.device())),
                   "leave it out there, or train on the CPU");
}

}  // namespace lockstep::ddp
