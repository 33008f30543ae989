#include "parallel/pass.h"

#include <algorithm>

#include "base/error.h"
#include "lockstep/nn/ops/transfer.h"

namespace lockstep::parallel {
namespace {

/// A tensor as (outer, extent, inner) round an axis.
struct Extents {
  std::int64_t outer = 1, extent = 1, inner = 1;
};

Extents extents_of(const nn::Shape& shape, int axis) {
  Extents extents{.extent = shape[axis]};
  for (int i = 0; i < axis; ++i) extents.outer *= shape[i];
  for (int i = axis + 1; i < shape.size(); ++i) extents.inner *= shape[i];
  return extents;
}

nn::Tensor in_one_piece(const nn::Tensor& x, const Extents& extents, const Chunk& chunk, const nn::Shape& shape) {
  return x.reshaped({extents.extent, extents.inner}).slice(chunk.begin, chunk.begin + chunk.count).reshaped(shape);
}

/// Between entries of an axis of `whole` and all of `part`, of the same backend.
void copy_entries(nn::Backend& backend, const nn::Tensor& whole, const Extents& extents, const Chunk& chunk,
                  const nn::Tensor& part, bool into_part) {
  const nn::Tensor rows = whole.reshaped({extents.outer * extents.extent, extents.inner});
  const nn::Tensor packed = part.reshaped({extents.outer * chunk.count, extents.inner});
  for (std::int64_t i = 0; i < extents.outer; ++i) {
    const std::int64_t first = i * extents.extent + chunk.begin;
    const nn::Tensor there = rows.slice(first, first + chunk.count);
    const nn::Tensor here = packed.slice(i * chunk.count, (i + 1) * chunk.count);
    backend.pointwise().copy(into_part ? there : here, into_part ? here : there);
  }
}

}  // namespace

std::vector<Chunk> chunks_of(std::int64_t total, std::int64_t most) {
  LOCKSTEP_ASSERT(total >= 0 && most >= 1, "{} in {} pieces", total, most);
  const std::int64_t each = (total + most - 1) / most;
  std::vector<Chunk> chunks;
  for (std::int64_t begin = 0; begin < total; begin += each) chunks.push_back({begin, std::min(each, total - begin)});
  if (chunks.empty()) chunks.push_back({});
  return chunks;
}

int axis_of(const nn::Shape& shape, int dim) {
  const int axis = dim < 0 ? dim + shape.size() : dim;
  if (axis < 0 || axis >= shape.size())
    throw UsageError(fmt::format("axis {} of {}", dim, to_string(shape)),
                     "choose a dim that the input and the output of the module have");
  return axis;
}

nn::Tensor narrow(nn::Backend& backend, const nn::Tensor& x, int axis, const Chunk& chunk) {
  nn::Shape shape = x.shape();
  shape[axis] = chunk.count;
  const Extents extents = extents_of(x.shape(), axis);
  if (chunk.count == extents.extent) return x;
  if (extents.outer == 1) return in_one_piece(x, extents, chunk, shape);
  nn::Tensor part = backend.empty(shape, x.dtype());
  copy_entries(backend, x, extents, chunk, part, /*into_part=*/true);
  return part;
}

void put(nn::Backend& target, const nn::Tensor& y, int axis, const Chunk& chunk, const nn::Tensor& part,
         nn::Backend& source) {
  const Extents extents = extents_of(y.shape(), axis);
  if (extents.outer == 1) return nn::copy_to(target, in_one_piece(y, extents, chunk, part.shape()), part, source);
  copy_entries(target, y, extents, chunk, nn::to_device(target, part, source), /*into_part=*/false);
}

}  // namespace lockstep::parallel
