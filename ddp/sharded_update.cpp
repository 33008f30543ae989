#include "lockstep/ddp/sharded_update.h"

#include <algorithm>

namespace lockstep::ddp {

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
