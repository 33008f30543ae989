// How a run of things is cut into contiguous slices, one for each rank: the one formula that everything uses.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::sampler {

/// The half-open range [begin, begin + count).
struct Slice {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;

  std::uint64_t end() const { return begin + count; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

/// Slices [first, last) of those below, as one. Requires first ≤ last ≤ parts < 2^32.
constexpr Slice slice_between(std::uint64_t count, std::uint64_t first, std::uint64_t last, std::uint64_t parts) {
  // count·k/parts without overflow: the quotient's part is a whole number for every k.
  const std::uint64_t whole = count / parts;
  const std::uint64_t rest = count % parts;
  const std::uint64_t begin = whole * first + rest * first / parts;
  const std::uint64_t end = whole * last + rest * last / parts;
  return {begin, end - begin};
}

/// Slice `part` of `count` things cut into `parts`: [⌊count·part/parts⌋, ⌊count·(part+1)/parts⌋). The slices cover
/// everything once, in order; their sizes differ by at most one and may be zero. If b divides a, then the slices of a
/// cut into b are unions of neighbouring slices of a finer cut into a. Requires part < parts < 2^32.
constexpr Slice slice_of(std::uint64_t count, std::uint64_t part, std::uint64_t parts) {
  return slice_between(count, part, part + 1, parts);
}

/// The samples of an evaluation set that `rank` looks at. Over all ranks: each sample exactly once, no padding. Throws
/// UsageError for a rank outside the world.
constexpr Slice eval_slice(std::uint64_t length, int rank, int world_size) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw UsageError("rank " + std::to_string(rank) + " of a world of " + std::to_string(world_size),
                     "ranks count from 0 to the world size less one");
  return slice_of(length, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(world_size));
}

}  // namespace lockstep::sampler
