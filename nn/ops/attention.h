// Causal self-attention with several heads.
#pragma once

#include <cstdint>

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

/// Queries, keys and values lie side by side, as one product makes them: qkv is (B, T, 3 · H · D), first all heads'
/// queries, then their keys, then their values; y is (B, T, H · D). f32 or bf16, sums in f32. For each head
///   y_t = Σ_{s ≤ t} softmax_s(q_t · k_s / sqrt(D)) v_s
/// (Vaswani et al., "Attention Is All You Need", 2017). Nothing of T × T elements is kept: backward computes the
/// weights again from their logarithmic sums (Dao et al., "FlashAttention", 2022).
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;
  /// log_sums (B, H, T) f32: log Σ_{s ≤ t} exp(q_t · k_s / sqrt(D)), for backward.
  virtual void forward(const Tensor& qkv, std::int64_t heads, const Tensor& y, const Tensor& log_sums) = 0;
  /// Of forward() with this y and these log_sums; dqkv is overwritten.
  virtual void backward(const Tensor& qkv, std::int64_t heads, const Tensor& y, const Tensor& log_sums,
                        const Tensor& dy, const Tensor& dqkv) = 0;
  /// For generation: qkv (B, T, 3 · H · D) are the tokens that follow `past` others, whose keys and values are in
  /// cache (B, most, 2 · H · D), where those of the new ones are put too; past + T ≤ most. y (B, T, H · D).
  virtual void extend(const Tensor& qkv, std::int64_t heads, std::int64_t past, const Tensor& cache,
                      const Tensor& y) = 0;
};

}  // namespace lockstep::nn
