// In place of nn/ops/cuda/fused_attention.cpp, because cuDNN's graphs need a GPU: it has no kernel for anything, and
// ours do all.
#include "nn/ops/cuda/fused_attention.h"

namespace lockstep::nn::cuda {

struct FusedAttention::Held {};

FusedAttention::FusedAttention(Context& context) : context_(context) { static_cast<void>(context_); }
FusedAttention::~FusedAttention() = default;

bool FusedAttention::forward(const Tensor&, std::int64_t, const Tensor&, const Tensor&) { return false; }
bool FusedAttention::backward(const Tensor&, std::int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  return false;
}

}  // namespace lockstep::nn::cuda
