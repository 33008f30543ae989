// Products of a matrix with a few vectors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::ddp {

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
