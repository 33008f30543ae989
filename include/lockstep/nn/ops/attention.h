// Self-attention with several heads.
#pragma once

#include <cstdint>
#include <utility>

#include "lockstep/nn/ops/dropout.h"
#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Who sees whom, and what is dropped.
struct AttentionOptions {
  bool causal = true;  // a query sees no key that follows it
  /// (B) i32, on the device: the tokens of each sample, from 0 to T. What follows them is padding, which nobody sees,
  /// and whose results are 0. Undefined: T.
  Tensor lengths = {};
  /// The probability with which a weight is dropped; the others are divided by 1 − dropout. What is kept is a pure
  /// function (attention_bits) of state's seed and step, of `layer`, of first_sample + b, and of head, query and key,
  /// so it does not depend on how samples are shared out among ranks.
  double dropout = 0.0;
  Tensor dropout_state = {};  // DropoutState as (3) i64, on the device; undefined where nothing is dropped
  std::int64_t layer = 0;
};

/// Queries, keys and values, or their gradients: (B, T, H · D) each, rows equally far apart (Note [Pitch]).
struct AttentionInputs {
  AttentionInputs(Tensor queries, Tensor keys, Tensor values)
      : q(std::move(queries)), k(std::move(keys)), v(std::move(values)) {}
  /// Side by side, as one product makes them: (B, T, 3 · H · D), first all heads' queries, then their keys, then their
  /// values.
  AttentionInputs(const Tensor& qkv)  // NOLINT(google-explicit-constructor): three in one
      : q(third(qkv, 0)), k(third(qkv, 1)), v(third(qkv, 2)) {}

  Tensor q, k, v;

 private:
  static Tensor third(const Tensor& qkv, std::int64_t i) {
    const std::int64_t width = qkv.size(2) / 3;
    return qkv.columns(i * width, (i + 1) * width);
  }
};

/// y is (B, T, H · D), f32 or bf16, sums in f32. For each head
///   y_t = Σ_s m_ts softmax_s(q_t · k_s / sqrt(D)) v_s
/// over the keys s that t sees, where m_ts is 1, or what dropout makes of it: 0 or 1 / (1 − dropout)
/// (Vaswani et al., "Attention Is All You Need", 2017). Nothing of T × T elements is kept: backward computes the
/// weights again from their logarithmic sums (Dao et al., "FlashAttention", 2022).
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;
  /// log_sums (B, H, T) f32: log Σ_s exp(q_t · k_s / sqrt(D)), for backward; of padding anything.
  virtual void forward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
                       const Tensor& log_sums) {}
  /// Of forward() with this y, these log_sums, and the same options; dx, whose rows are as far apart as those of x, is
  /// overwritten, of padding with 0.
  virtual void backward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
                        const Tensor& log_sums, const Tensor& dy, const AttentionInputs& dx) {}
  /// For generation, causal: qkv (B, T, 3 · H · D) are the tokens that follow `past` others, whose keys and values are
  /// in cache (B, most, 2 · H · D), where those of the new ones are put too; past + T ≤ most. y (B, T, H · D).
  virtual void extend(const Tensor& qkv, std::int64_t heads, std::int64_t past, const Tensor& cache, const Tensor& y) {}
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
