// Which part of a region each rank owns in reduce_scatter and allgather.
#pragma once

#include <cstddef>

namespace lockstep::comm {

struct Slice {
  std::size_t begin = 0;  // elements
  std::size_t count = 0;
};

/// Rank `rank`'s slice of `count` elements of `element_bytes` bytes: contiguous, in rank order, covering all, with
/// boundaries at multiples of 64 bytes (so that two ranks never write one cache line). Trailing slices of small
/// regions may be empty.
constexpr Slice slice_of(std::size_t count, std::size_t element_bytes, int rank, int world_size) {
  const std::size_t unit = 64 / element_bytes;
  const std::size_t units = (count + unit - 1) / unit;
  const auto r = static_cast<std::size_t>(rank);
  const auto n = static_cast<std::size_t>(world_size);
  const std::size_t per = units / n, extra = units % n;
  const auto first_unit = [&](std::size_t k) { return per * k + (k < extra ? k : extra); };
  const std::size_t begin = first_unit(r) * unit < count ? first_unit(r) * unit : count;
  const std::size_t end = first_unit(r + 1) * unit < count ? first_unit(r + 1) * unit : count;
  return {begin, end - begin};
}

}  // namespace lockstep::comm
