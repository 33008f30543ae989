// Attention in kernels of ours: any number of tokens and any width, f32 and bf16, sums in f32.
#pragma once

#include <cstdint>

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// Rows of tokens: head h of row r of sample b begins at element b · sample_stride + r · row_stride + h · width.
struct HeadRows {
  void* data = nullptr;
  std::int64_t sample_stride = 0, row_stride = 0;
};

/// `queries` tokens that follow `past` others; keys and values have past + queries rows. With `lengths`, or where it is
/// not causal, there is no past.
struct AttentionSizes {
  std::int64_t samples = 0, heads = 0, width = 0;
  std::int64_t queries = 0, past = 0;
  bool causal = true;                     // AttentionOptions
  const std::int32_t* lengths = nullptr;  // likewise, on the device; nullptr: all are of so many queries

  std::int64_t keys() const { return past + queries; }
};

/// Which weights are dropped (AttentionOptions). `numbers`: the state's, on the device; nullptr: none are.
struct AttentionDropout {
  const std::int64_t* numbers = nullptr;
  std::int64_t layer = 0;
  std::uint32_t threshold = 0;
  float scale = 1.0f;
};

/// As AttentionKernels::forward; `log_sums` (samples, heads, queries) may be nullptr. What is dropped has no past.
void attend_tiled(Context& context, const AttentionSizes& sizes, DType dtype, const HeadRows& q, const HeadRows& k,
                  const HeadRows& v, const HeadRows& y, float* log_sums, const AttentionDropout& mask);

/// The same for few queries and kMostDecodeWidth: a block for each of them.
constexpr std::int64_t kMostDecodeQueries = 16, kMostDecodeWidth = 256;
void attend_decoding(Context& context, const AttentionSizes& sizes, DType dtype, const HeadRows& q, const HeadRows& k,
                     const HeadRows& v, const HeadRows& y);

/// Gradients of attend_tiled() without a past. `means` (samples, heads, queries) is memory to work in.
struct AttentionGradients {
  HeadRows q, k, v, y, dy;
  const float* log_sums = nullptr;
  float* means = nullptr;
  HeadRows dq, dk, dv;
};
void differentiate_tiled(Context& context, const AttentionSizes& sizes, DType dtype, const AttentionGradients& arrays,
                         const AttentionDropout& mask);

/// Sets the rows of padding to 0: of `rows` (samples, tokens, count) those from lengths[sample] on.
void clear_padding(Context& context, DType dtype, std::int64_t samples, std::int64_t tokens, std::int64_t count,
                   const std::int32_t* lengths, const HeadRows& rows);

/// rows (samples, tokens, count) from one array into another, `count` elements of each.
void copy_rows(Context& context, DType dtype, std::int64_t samples, std::int64_t tokens, std::int64_t count,
               const HeadRows& from, const HeadRows& to);

}  // namespace lockstep::nn::cuda
