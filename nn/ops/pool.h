// Two-dimensional pooling.
#pragma once

#include "nn/ops/conv.h"
#include "nn/tensor/tensor.h"

namespace lockstep::nn {

enum class PoolKind : std::uint8_t { kMax, kAverage };

/// f32. x is (N, H, W, C), y is (N, H', W', C); N may be 0. Averages divide by the whole window, padding included, as
/// PyTorch's AvgPool2d does by default.
class PoolKernels {
 public:
  virtual ~PoolKernels() = default;
  /// Returns what backward needs to know of the choices made (undefined for averages); only its own backward reads it.
  virtual Tensor forward(PoolKind kind, const Tensor& x, const Window& window, const Tensor& y) = 0;
  virtual void backward(PoolKind kind, const Tensor& dy, const Tensor& choices, const Window& window,
                        const Tensor& dx) = 0;
};

}  // namespace lockstep::nn
