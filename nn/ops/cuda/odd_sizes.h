// Products whose numbers of outputs or inputs fill no 16 bytes.
#pragma once

#include <cstdint>

#include "base/cuda/runtime.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

// Note [Odd sizes]
// Where the number of outputs is no multiple of 8, the libraries have slow kernels alone: a sixth of the others' speed
// for GPT-2's 50,257 logits on an H200. So outputs are computed up to the rows' pitch, with zeros for what the weight
// and the bias do not have (Note [Zero rows]), and added up again to there on the way back, after what lies between the
// rows of their gradient has been set to zero. The weight's own gradient has no place for more of them: see
// WeightGradients.
//
// Rows of an odd number of inputs are others' tensors, which nobody pads. Of a product with enough work they are copied
// into wider rows that end with zeros, and what is computed there is copied back.
constexpr std::int64_t kEven = 8;  // whose multiples fast kernels take, and those for GELU

/// Whether what lies between `rows` may be computed with.
inline bool may_be_padded(const Tensor& rows) { return rows.between_rows() != Tensor::Between::kOthers; }

/// How many outputs a product with `w`, and `b` if that is defined, computes for these rows of results, or takes of
/// these rows of their gradient.
inline std::int64_t padded_out(const Tensor& rows, const Tensor& w, const Tensor& b = {}) {
  const std::int64_t out = rows.size(1), more = rows.pitch() - out;
  return may_be_padded(rows) && w.zero_rows() >= more && (!b.defined() || b.zero_rows() >= more) ? out + more : out;
}

/// Sets what lies between `rows`, which may be padded, to zero, unless it is.
inline void clear_between_rows(const Context& context, const Tensor& rows) {
  if (rows.between_rows() == Tensor::Between::kZeros) return;
  const std::size_t element = size_of(rows.dtype());
  const auto pitch = static_cast<std::size_t>(rows.pitch()), columns = static_cast<std::size_t>(rows.size(1));
  check_cuda(
      cudaMemset2DAsync(static_cast<std::byte*>(rows.raw_rows()) + columns * element, pitch * element, 0,
                        (pitch - columns) * element, static_cast<std::size_t>(rows.size(0)), native(context.stream)),
      "clearing memory between rows");
}

/// Whether n rows of `in` inputs are copied for a product with `out` outputs: if that saves more time than three
/// copying kernels take. The rates are those of an H200: 650 TFLOP/s for even sizes, 130 for odd ones, copies at 3
/// TB/s.
constexpr bool copies_inputs(std::int64_t n, std::int64_t in, std::int64_t out) {
  constexpr double kEnoughWork = 0x1p30;  // additions and multiplications
  return in % kEven != 0 &&
         2.0 * static_cast<double>(n) * static_cast<double>(in) * static_cast<double>(out) >= kEnoughWork;
}
constexpr std::int64_t even_inputs(std::int64_t in) { return (in + kEven - 1) / kEven * kEven; }
/// rows (R, I) as (R, even_inputs(I)), with zeros after each; with as many rows of zeros after the last.
Tensor widened(Context& context, const Tensor& rows);
/// The first columns of `rows`, as many as `to` has.
void narrow_into(Context& context, const Tensor& rows, const Tensor& to);

}  // namespace lockstep::nn::cuda
