// How a batch is cut along one axis, and put together again.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/nn/ops/backend.h"

namespace lockstep::parallel {

/// Entries [begin, begin + count) of an axis.
struct Chunk {
  std::int64_t begin = 0, count = 0;
  friend bool operator==(const Chunk&, const Chunk&) = default;
};

/// torch.chunk's rule: pieces of ceil(total / most), the last one smaller where that does not come out even, so there
/// may be fewer than `most`: 10 over 3 is 4, 4, 2, and 5 over 4 is 2, 2, 1. Of nothing there is one empty piece.
/// `most` is at least 1.
std::vector<Chunk> chunks_of(std::int64_t total, std::int64_t most);

/// The axis that `dim` names, counted from the end where it is negative. Throws UsageError where `shape` has none such.
int axis_of(const nn::Shape& shape, int dim);

/// These entries of x's axis: its own memory where they lie there in one piece, else a copy on `backend`, which x is
/// on.
nn::Tensor narrow(nn::Backend& backend, const nn::Tensor& x, int axis, const Chunk& chunk);

/// Copies `part`, which is on `source`, to these entries of y's axis, which is on `target`.
void put(nn::Backend& target, const nn::Tensor& y, int axis, const Chunk& chunk, const nn::Tensor& part,
         nn::Backend& source);

}  // namespace lockstep::parallel
