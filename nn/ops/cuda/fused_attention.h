// Attention by cuDNN, where it has a kernel.
#pragma once

#include <memory>

#include "lockstep/nn/ops/attention.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"
#include "nn/ops/cuda/grid.h"

namespace lockstep::nn::cuda {

/// How many samples of a backward that is deterministic cuDNN is given at once: so many that the gradients of their
/// scores, (tokens, tokens) of 16 bits for each head, take at most 256 MiB; at least one.
constexpr std::int64_t samples_at_once(std::int64_t samples, std::int64_t heads, std::int64_t tokens) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 28;
  return at_least(at_most(samples, kMostBytes / at_least(2 * heads * tokens * tokens, 1)), 1);
}

/// Opened at the first use. Both return whether there is a kernel; where there is none nothing is done, and cuDNN is
/// not asked again.
class FusedAttention {
 public:
  explicit FusedAttention(Context& context);
  ~FusedAttention();

  /// As AttentionKernels, whose shapes are checked, without dropout. Rows of padding hold anything.
  bool forward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
               const Tensor& log_sums);
  bool backward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
                const Tensor& log_sums, const Tensor& dy, const AttentionInputs& dx);

 private:
  struct Held;
  Context& context_;
  std::unique_ptr<Held> held_;
};

}  // namespace lockstep::nn::cuda
