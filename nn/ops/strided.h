// The walk of PointwiseKernels::copy_strided(): what both devices reduce it to first.
#pragma once

#include <array>
#include <cstdint>

#include "lockstep/nn/ops/pointwise.h"

namespace lockstep::nn {

/// The fewest axes that name the same elements: those of one index are left out, and neighbours become one where both
/// sides step through them evenly.
struct StridedWalk {
  int axes = 0;
  std::array<std::int64_t, Shape::kMaxDims> extent = {}, from = {}, to = {};

  StridedWalk(const Strides& x, const Strides& y, const Shape& shape) {
    for (int axis = 0; axis < shape.size(); ++axis) {
      const auto a = static_cast<std::size_t>(axis);
      if (shape[axis] == 1) continue;
      const auto last = static_cast<std::size_t>(axes > 0 ? axes - 1 : 0);
      if (axes > 0 && from[last] == x.of[a] * shape[axis] && to[last] == y.of[a] * shape[axis]) {
        extent[last] *= shape[axis];
      } else {
        extent[static_cast<std::size_t>(axes)] = shape[axis];
        ++axes;
      }
      const auto now = static_cast<std::size_t>(axes - 1);
      from[now] = x.of[a];
      to[now] = y.of[a];
    }
  }
};

/// Of a contiguous tensor.
inline Strides dense_strides(const Shape& shape) {
  Strides strides;
  std::int64_t step = 1;
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    strides.of[static_cast<std::size_t>(axis)] = step;
    step *= shape[axis];
  }
  return strides;
}

}  // namespace lockstep::nn
