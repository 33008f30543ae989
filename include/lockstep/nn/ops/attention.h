// Causal self-attention with several heads.
#pragma once

#include <cstdint>

#include "lockstep/nn/ops/dropout.h"
#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn {

/// Which of attention's weights are dropped, with probability `p`; the others are divided by 1 − p. What is kept is a
/// pure function (attention_bits) of state's seed and step, of `layer`, of first_sample + b, and of head, query and
/// key, so it does not depend on how samples are shared out among ranks. state: DropoutState as (3) i64, on the device.
struct AttentionDropout {
  double p = 0.0;  // 0: none, and there need not be a state
  Tensor state;
  std::int64_t layer = 0;
};

/// Queries, keys and values lie side by side, as one product makes them: qkv is (B, T, 3 · H · D), first all heads'
/// queries, then their keys, then their values; y is (B, T, H · D). f32 or bf16, sums in f32. For each head
///   y_t = Σ_{s ≤ t} m_ts softmax_s(q_t · k_s / sqrt(D)) v_s
/// where m_ts is 1, or what dropout makes of it: 0 or 1 / (1 − p)
/// (Vaswani et al., "Attention Is All You Need", 2017). Nothing of T × T elements is kept: backward computes the
/// weights again from their logarithmic sums (Dao et al., "FlashAttention", 2022).
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;
  /// log_sums (B, H, T) f32: log Σ_{s ≤ t} exp(q_t · k_s / sqrt(D)), for backward.
  virtual void forward(const Tensor& qkv, std::int64_t heads, const AttentionDropout& drop, const Tensor& y,
                       const Tensor& log_sums) = 0;
  /// Of forward() with this y, these log_sums, and the same `drop`; dqkv is overwritten.
  virtual void backward(const Tensor& qkv, std::int64_t heads, const AttentionDropout& drop, const Tensor& y,
                        const Tensor& log_sums, const Tensor& dy, const Tensor& dqkv) = 0;
  /// For generation: qkv (B, T, 3 · H · D) are the tokens that follow `past` others, whose keys and values are in
  /// cache (B, most, 2 · H · D), where those of the new ones are put too; past + T ≤ most. y (B, T, H · D).
  virtual void extend(const Tensor& qkv, std::int64_t heads, std::int64_t past, const Tensor& cache,
                      const Tensor& y) = 0;
};

}  // namespace lockstep::nn
