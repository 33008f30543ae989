// What hooks compress gradients with: 16 bits for each f32, on the CPU and on GPUs, or products of a few vectors for a
// matrix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"
#include "lockstep/ddp/bucket_plan.h"

namespace lockstep::ddp {

/// to[i] = from[i] · scale, rounded to nearest. The same bits with every instruction set.
void narrow(const float* from, float scale, BFloat16* to, std::size_t count);
void narrow(const float* from, float scale, Float16* to, std::size_t count);
/// to[i] = from[i] · scale.
void widen(const BFloat16* from, float scale, float* to, std::size_t count);
void widen(const Float16* from, float scale, float* to, std::size_t count);
/// The largest magnitude; infinity or NaN where one of them is either.
float largest_magnitude(const float* values, std::size_t count);
bool all_finite(const Float16* values, std::size_t count);

/// Of an arena that has half of what the buckets have.
std::uint64_t bytes_of_halves(std::span<const SlotSpec> slots);

// The same on a GPU, in the order of `stream`.

/// narrow() and widen() without a scale.
void narrow_on_device(const float* from, BFloat16* to, std::size_t count, StreamView stream);
void widen_on_device(const BFloat16* from, float* to, std::size_t count, StreamView stream);

/// *largest = the bits of the largest magnitude, if they are above *largest: those of infinity and NaN are above all
/// others.
void largest_on_device(const float* from, std::int32_t* largest, std::size_t count, StreamView stream);
/// The same with a power of two by which the sum over 2^`log2_ranks` ranks of what is not larger than *largest, bits as
/// above, stays below 2^15.
void narrow_on_device(const float* from, const std::int32_t* largest, int log2_ranks, Float16* to, std::size_t count,
                      StreamView stream);
void widen_on_device(const Float16* from, const std::int32_t* largest, int log2_ranks, float* to, std::size_t count,
                     StreamView stream);

// Products of a matrix with a few vectors.

/// A matrix in memory, row by row, and how many vectors it is approximated with. Vectors lie one after the other: of P
/// `rank` times `rows` numbers, of Q `rank` times `columns`.
struct LowRank {
  std::size_t rows = 0, columns = 0, rank = 0;
};

/// P = M Q.
void times(const LowRank& shape, const float* m, const float* q, float* p);
/// Q = Mᵀ P.
void transposed_times(const LowRank& shape, const float* m, const float* p, float* q);
/// M = P Qᵀ: the same bits with every instruction set.
void expand(const LowRank& shape, const float* p, const float* q, float* m);
/// E = M - P Qᵀ.
void residual(const LowRank& shape, const float* m, const float* p, const float* q, float* e);

/// What becomes of a vector that depends on those before it.
enum class Dependent { kZero, kRandom };

/// Makes `count` vectors of `length` orthonormal, one after the other (Gram-Schmidt, twice). One that depends on those
/// before it, or is zero, becomes zero, or random numbers that follow from `seed`, made orthonormal too. One that has a
/// NaN or an infinity has NaNs afterwards. The same bits with every instruction set.
void orthonormalize(float* vectors, std::size_t count, std::size_t length, Dependent dependent, std::uint64_t seed);

}  // namespace lockstep::ddp
