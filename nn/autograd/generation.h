// What generation alone computes: for tapes that do not record, and without a backward.
#pragma once

#include "lockstep/nn/autograd/tape.h"

namespace lockstep::nn {

/// causal_attention() for tokens that follow `past` others, whose keys and values are in `cache` (N, most, 2 · C),
/// where those of the new ones are put: qkv (N, T, 3 · C) → (N, T, C) (AttentionKernels::extend).
Var extend_attention(Tape& tape, Var qkv, std::int64_t heads, std::int64_t past, const Tensor& cache);

/// x (N, T, C) → (N, C), what T ends with.
Var last_rows(Tape& tape, Var x);

}  // namespace lockstep::nn
