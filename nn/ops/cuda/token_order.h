// Tokens in the order of their indices.
#pragma once

#include <cstdint>

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

struct alignas(8) TokenPlace {
  std::int32_t token;
  std::int32_t place;  // in the text
};

/// N indices, i32, at least one → (N, 2) i32, which are TokenPlaces: in the order of their tokens, equal ones in the
/// order of their places. An index outside [0, rows) is given as `rows`.
Tensor sort_tokens(Context& context, const Tensor& indices, std::int64_t rows);

}  // namespace lockstep::nn::cuda
