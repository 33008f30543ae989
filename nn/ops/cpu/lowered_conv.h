// Convolutions as products of matrices, where oneDNN's own are slower. Internal to nn/ops/cpu.
#pragma once

#include "lockstep/nn/ops/conv.h"
#include "lockstep/nn/tensor/allocator.h"
#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn::cpu {

/// Note [Lowered convolutions]
/// With AVX2 oneDNN runs convolutions of one by one, and those with a stride, at a third to a half of what the core can
/// do. Where a pixel's channels lie side by side, they are products: a row for each pixel of y, of what its window sees
/// of x, times the weights as they are. Windows of one by one and stride 1 see rows of x itself; others are copied,
/// some images at a time (Chellapilla, Puri and Simard, "High Performance Convolutional Neural Networks for Document
/// Processing", 2006). Sums are taken in an order that depends on the shapes alone.
class LoweredConv {
 public:
  explicit LoweredConv(CachingAllocator& allocator) : allocator_(allocator) {}

  /// x (N, H, W, C) and w (O, Kh, Kw, C), f32.
  static bool suits(const Shape& x, const Shape& w, const Window& window);

  /// y = x * w + b; b may be undefined.
  void forward(const Tensor& x, const Tensor& w, const Tensor& b, const Window& window, const Tensor& y);
  void backward_input(const Tensor& dy, const Tensor& w, const Window& window, const Tensor& dx);
  /// db may be undefined.
  void backward_weight(const Tensor& x, const Tensor& dy, const Window& window, bool accumulate_w, const Tensor& dw,
                       bool accumulate_b, const Tensor& db);

 private:
  struct Lowering;

  CachingAllocator& allocator_;
};

}  // namespace lockstep::nn::cpu
