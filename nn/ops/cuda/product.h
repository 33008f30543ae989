// How products of row-major matrices are put to a library that knows column-major ones: arithmetic on sizes alone.
#pragma once

#include <cstdint>

namespace lockstep::nn::cuda {

// Note [Column-major]
// A row-major matrix (R, C) that lies densely is, number by number, the column-major matrix (C, R) whose columns are C
// apart: its transpose. So instead of a result (R, C) the library is asked for (C, R), the transpose of the product,
// which is the product of the transposes in the other order:
//
//   forward:          y  (N, O) = x (N, I) · w (O, I)ᵀ,   so  yᵀ  (O, N) = op(w) (O, I) · x (I, N);   w lies turned
//
//   backward, input:  dx (N, I) = dy (N, O) · w (O, I),   so  dxᵀ (I, N) = w (I, O) · dy (O, N)
//
//   backward, weight: dw (O, I) = dy (N, O)ᵀ · x (N, I),  so  dwᵀ (I, O) = x (I, N) · op(dy) (N, O);  dy lies turned
//
// What a bias is added to, and a bias's gradient is summed for, is then a row of yᵀ.

/// A column-major matrix with contiguous columns.
struct ColumnMajor {
  std::int64_t rows = 0, columns = 0;
  friend bool operator==(const ColumnMajor&, const ColumnMajor&) = default;
};

/// d (m, n) = op(a) (m, k) · op(b) (k, n), where op turns (transposes) what lies turned.
struct Product {
  ColumnMajor a, b, d;
  bool turn_a = false, turn_b = false;
};

/// a is w, b is x, d is y; `samples` is N, `in` is I, `out` is O.
constexpr Product forward_product(std::int64_t samples, std::int64_t in, std::int64_t out) {
  return {{in, out}, {in, samples}, {out, samples}, true, false};
}
/// a is w, b is dy, d is dx.
constexpr Product backward_input_product(std::int64_t samples, std::int64_t in, std::int64_t out) {
  return {{in, out}, {out, samples}, {in, samples}, false, false};
}
/// a is x, b is dy, d is dw.
constexpr Product backward_weight_product(std::int64_t samples, std::int64_t in, std::int64_t out) {
  return {{in, samples}, {out, samples}, {in, out}, false, true};
}

/// Bits from one row's mask to the next one's, for rows of `out` elements: what cuBLASLt takes.
constexpr std::int64_t mask_pitch_of(std::int64_t out) { return (out + 127) / 128 * 128; }

/// The largest power of two, at most 256, that divides an address: what kernels may take for granted of it.
constexpr std::uint32_t alignment_of(std::uintptr_t address) {
  constexpr std::uintptr_t kMost = 256;
  const std::uintptr_t bits = address | kMost;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}
inline std::uint32_t alignment_of(const void* address) {
  return alignment_of(reinterpret_cast<std::uintptr_t>(address));
}

}  // namespace lockstep::nn::cuda
