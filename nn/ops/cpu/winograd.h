// Convolutions with windows of three by three in Winograd's way, where oneDNN has none. Internal to nn/ops/cpu.
#pragma once

#include "lockstep/nn/ops/conv.h"
#include "lockstep/nn/tensor/allocator.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cpu/onednn.h"

namespace lockstep::nn::cpu {

/// Note [Winograd of our own]
/// F(4 × 4, 3 × 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016): of each tile of four
/// by four pixels of y, six by six of x become 36 numbers per channel, Bᵀ x B, and so do a channel's weights, G w Gᵀ.
/// For each of the 36 a product over channels, of a matrix of tiles with one of weights, makes Aᵀ · A of which is the
/// tile of y: 36 multiplications in place of 144. The gradient of x is the convolution of dy with weights turned by
/// 180°; that of w is Gᵀ (Σ over tiles (A dy Aᵀ) · (Bᵀ x B)) G.
///
/// Tiles are taken some at a time, so that what the transformations write stays in the last cache. Sums are taken in an
/// order that depends on the shapes alone.
class WinogradConv {
 public:
  /// `shared`, or nullptr: keeps the weights that forward() has transformed. Without it they are at each call, for
  /// they take four times the memory of the weights, and training changes them at each step.
  WinogradConv(CachingAllocator& allocator, PackedWeights* shared) : allocator_(allocator), shared_(shared) {}

  /// x (N, H, W, C) and w (O, Kh, Kw, C), f32. Few channels or tiles gain less than the transformations cost; those of
  /// weights and of x are written for multiples of 32 channels.
  static bool suits(const Shape& x, const Shape& w, const Window& window);

  /// y = x * w + b, or the ReLU of that; b may be undefined.
  void forward(const Tensor& x, const Tensor& w, std::uint64_t w_version, const Tensor& b, bool relu, const Tensor& y);
  void backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx);
  /// db may be undefined.
  void backward_weight(const Tensor& x, const Tensor& dy, bool accumulate_w, const Tensor& dw, bool accumulate_b,
                       const Tensor& db);

 private:
  void transform_rows(const Tensor& w, float* u);
  void convolve(const Tensor& x, const float* u, const float* bias, bool relu, const Tensor& y);

  CachingAllocator& allocator_;
  PackedWeights* shared_;
};

}  // namespace lockstep::nn::cpu
