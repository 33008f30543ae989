#include "lockstep/ddp/bucket_plan.h"

#include <algorithm>

#include "base/error.h"
#include "lockstep/comm/arena.h"
#include "lockstep/ddp/sharded_update.h"

namespace lockstep::ddp {
namespace {

/// The last bucket gets no more slots.
void close(BucketPlan& plan, const BucketLimits& limits) {
  Bucket& last = plan.buckets.back();
  const std::size_t padding = comm::align_up(last.bytes, limits.bucket_multiple) - last.bytes;
  last.bytes += padding;
  plan.bytes += padding;
}

}  // namespace

BucketPlan plan_buckets(std::span<const SlotSpec> slots, std::span<const std::size_t> order,
                        const BucketLimits& limits) {
  constexpr const char* kOnce = "name each slot once";
  if (order.size() != slots.size())
    throw UsageError(fmt::format("{} slots in an order of {}", slots.size(), order.size()), kOnce);
  check_usage(limits.slot_alignment > 0 && limits.bucket_multiple > 0, "slots or buckets of a multiple of 0 bytes",
              "leave BucketLimits::slot_alignment and bucket_multiple at 64, or give multiples of it");
  constexpr std::size_t kUnplaced = static_cast<std::size_t>(-1);
  BucketPlan plan;
  plan.slot_offset_bytes.assign(slots.size(), 0);
  plan.slot_bucket.assign(slots.size(), kUnplaced);
  for (const std::size_t slot : order) {
    if (slot >= slots.size() || plan.slot_bucket[slot] != kUnplaced)
      throw UsageError(fmt::format("an order in which slot {} of {} is unknown or stands twice", slot, slots.size()),
                       kOnce);
    const std::size_t bytes = comm::align_up(slots[slot].count * size_of(slots[slot].dtype), limits.slot_alignment);
    const std::size_t limit = plan.buckets.size() <= 1 ? limits.first_bucket_bytes : limits.bucket_bytes;
    if (plan.buckets.empty() || plan.buckets.back().dtype != slots[slot].dtype ||
        plan.buckets.back().bytes + bytes > limit) {
      if (!plan.buckets.empty()) close(plan, limits);
      plan.buckets.push_back({.slots = {}, .offset_bytes = plan.bytes, .bytes = 0, .dtype = slots[slot].dtype});
    }
    Bucket& bucket = plan.buckets.back();
    plan.slot_offset_bytes[slot] = plan.bytes;
    plan.slot_bucket[slot] = plan.buckets.size() - 1;
    bucket.slots.push_back(slot);
    bucket.bytes += bytes;
    plan.bytes += bytes;
  }
  if (!plan.buckets.empty()) close(plan, limits);
  return plan;
}

std::vector<SlotSlice> slices_of_rank(const BucketPlan& plan, std::span<const SlotSpec> slots, int rank, int ranks) {
  std::vector<SlotSlice> slices(slots.size());
  for (const Bucket& bucket : plan.buckets) {
    const std::size_t element = size_of(bucket.dtype);
    const comm::Slice own = comm::slice_of(bucket.bytes / element, element, rank, ranks);
    for (const std::size_t slot : bucket.slots) {
      const std::size_t first = (plan.slot_offset_bytes[slot] - bucket.offset_bytes) / element;
      const std::size_t begin = std::clamp(own.begin, first, first + slots[slot].count);
      const std::size_t end = std::clamp(own.begin + own.count, first, first + slots[slot].count);
      if (begin < end) slices[slot] = {.begin = begin - first, .count = end - begin};
    }
  }
  return slices;
}

}  // namespace lockstep::ddp
