// The arithmetic of reductions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/base/dtype.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// dst[i] = ((sources[0][i] op sources[1][i]) op sources[2][i]) op …, in that order whatever the count, so that the
/// same contributions always give the same bits. Each pointer names `count` elements of `dtype`, aligned to their
/// size; `dst` may be one of the sources, but not overlap one otherwise. At least one source.
///
/// bf16 and f16 are combined in f32 and rounded once. Integer sums and products wrap around. Minimum and maximum are
/// NaN where any contribution is; of -0 and +0 they give the later one. Thread-safe.
void reduce_in_order(DType dtype, ReduceOp op, std::byte* dst, std::span<const std::byte* const> sources,
                     std::size_t count);

/// The same with the result in place of every source: copies[r][i] = (copies[0][i] op copies[1][i]) op …
/// The copies do not overlap.
void reduce_into_all(DType dtype, ReduceOp op, std::span<std::byte* const> copies, std::size_t count);

/// dst[i] = the sources' i-th elements, f32 or f64, added along a tree: `additions` as TreeProgram has them, by source,
/// with one result. `dst` may be one of the sources.
void reduce_along_tree(DType dtype, std::byte* dst, std::span<const std::byte* const> sources,
                       std::span<const std::uint8_t> additions, std::size_t count);

/// The same with the result in all of `targets`, which may be sources.
void reduce_along_tree(DType dtype, std::span<std::byte* const> targets, std::span<const std::byte* const> sources,
                       std::span<const std::uint8_t> additions, std::size_t count);

/// Whether partial results of such contributions are wider than they are, because they are rounded once.
constexpr bool rounds(DType dtype, ReduceOp op) {
  return (dtype == DType::kBF16 || dtype == DType::kF16) && (op == ReduceOp::kSum || op == ReduceOp::kProd);
}

/// reduce_in_order() of a host's contributions, as it travels: in `dtype`; or, `widened`, sums and products of bf16 and
/// f16 as f32, not rounded (`dst` then holds twice their bytes).
void reduce_partial(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                    std::size_t count);

/// reduce_in_order() of what has travelled into `count` elements of `dtype`; `widened` sources are f32, and rounded
/// here.
void reduce_partials(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                     std::size_t count);

}  // namespace lockstep::comm
