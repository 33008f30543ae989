// Tensors as cuDNN takes them.
#pragma once

#include "lockstep/nn/ops/pointwise.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"
#include "nn/ops/cuda/product.h"

namespace lockstep::nn::cuda {

// Note [Alignment for cuDNN]
// All that cuDNN reads and writes lies at multiples of 16 bytes. It also has plans for arrays that lie at multiples of
// their elements alone. But of those of 9.14 on an H200 some are refused when they run
// (CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER), some read 16 bytes at once all the same, which is an error that no later
// call recovers from, and one was off by four units in the last place. So what lies elsewhere is copied. That is rare:
// the allocator's memory is aligned, and so are gradients in buckets (BucketLimits::slot_alignment). What remains is
// parts of a batch whose samples are no multiple of 16 bytes.
inline constexpr std::uint32_t kCudnnAlignment = 16;

inline bool lies_well(const void* place) { return alignment_of(place) >= kCudnnAlignment; }

/// Copies where cuDNN could not use a tensor as it is: of another type, or misaligned. What is undefined stays so.
class CudnnOperands {
 public:
  CudnnOperands(Context& context, PointwiseKernels& pointwise) : context_(context), pointwise_(pointwise) {}

  /// `tensor`, or a copy, in `dtype`.
  Tensor readable(const Tensor& tensor, DType dtype) const {
    if (!tensor.defined() || fits(tensor, dtype)) return tensor;
    const Tensor made = empty_like(tensor, dtype);
    pointwise_.cast(tensor, made);
    return made;
  }
  Tensor readable(const Tensor& tensor) const { return tensor.defined() ? readable(tensor, tensor.dtype()) : tensor; }

  /// `tensor`, or memory in place of it; hand_over() then copies what was written there to `tensor`.
  Tensor writable(const Tensor& tensor, DType dtype) const {
    return !tensor.defined() || fits(tensor, dtype) ? tensor : empty_like(tensor, dtype);
  }
  void hand_over(const Tensor& made, const Tensor& to) const {
    if (made.raw() != to.raw()) pointwise_.cast(made, to);
  }

 private:
  static bool fits(const Tensor& tensor, DType dtype) { return tensor.dtype() == dtype && lies_well(tensor.raw()); }
  Tensor empty_like(const Tensor& tensor, DType dtype) const {
    return Tensor::empty(context_.allocator, tensor.shape(), dtype);
  }

  Context& context_;
  PointwiseKernels& pointwise_;
};

}  // namespace lockstep::nn::cuda
