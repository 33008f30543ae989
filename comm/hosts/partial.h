// The arithmetic of reductions in two levels.
#pragma once

#include <cstddef>
#include <span>

#include "comm/op.h"

namespace lockstep::comm {

/// reduce_in_order() of a host's contributions, as it travels: in `dtype`; or, `widened`, of bf16 contributions as f32,
/// not rounded (`dst` then has room for twice their bytes).
void reduce_partial(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                    std::size_t count);

/// reduce_in_order() of what has travelled into `count` elements of `dtype`; `widened` sources are f32, and rounded
/// here.
void reduce_partials(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                     std::size_t count);

}  // namespace lockstep::comm
