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

/// A column-major matrix.
struct ColumnMajor {
  std::int64_t rows = 0, columns = 0;
  std::int64_t pitch = rows;  // elements from one column to the next: the leading dimension
  friend bool operator==(const ColumnMajor&, const ColumnMajor&) = default;
};

/// d (m, n) = op(a) (m, k) · op(b) (k, n), where op turns (transposes) what lies turned; `batch` of them, whose
/// matrices lie one after the other.
struct Product {
  ColumnMajor a, b, d;
  bool turn_a = false, turn_b = false;
  std::int64_t batch = 1;
};

/// a is w, b is x, d is y; `samples` is N, `in` is I, `out` is O. `pitch`: of the rows of y, or dy.
constexpr Product forward_product(std::int64_t samples, std::int64_t in, std::int64_t out, std::int64_t pitch) {
  return {{in, out}, {in, samples}, {out, samples, pitch}, true, false};
}
/// a is w, b is dy, d is dx.
constexpr Product backward_input_product(std::int64_t samples, std::int64_t in, std::int64_t out, std::int64_t pitch) {
  return {{in, out}, {out, samples, pitch}, {in, samples}, false, false};
}
/// a is x, b is dy, d is dw.
constexpr Product backward_weight_product(std::int64_t samples, std::int64_t in, std::int64_t out, std::int64_t pitch) {
  return {{in, samples}, {out, samples, pitch}, {in, out}, false, true};
}

/// c (B, M, N) = op(a) · op(b), all row-major: the library's a is b, and its b is a.
constexpr Product batch_product(std::int64_t batch, std::int64_t rows, std::int64_t depth, std::int64_t columns,
                                bool a_turned, bool b_turned) {
  return {b_turned ? ColumnMajor{depth, columns} : ColumnMajor{columns, depth},
          a_turned ? ColumnMajor{rows, depth} : ColumnMajor{depth, rows},
          {columns, rows},
          b_turned,
          a_turned,
          batch};
}

/// The pitch (Note [Pitch]) of rows of so many elements: a multiple of 128 bytes where that adds little, else of 16,
/// without which products have neither 16-byte loads nor TMA.
constexpr std::int64_t pitch_of_rows(std::int64_t columns, std::int64_t element_bytes) {
  constexpr std::int64_t kLine = 128, kLoad = 16, kLittle = 64;  // bytes, bytes, a share of
  const auto to_multiple = [&](std::int64_t bytes) {
    const std::int64_t elements = bytes / element_bytes;
    return (columns + elements - 1) / elements * elements;
  };
  const std::int64_t lines = to_multiple(kLine);
  return (lines - columns) * kLittle <= columns ? lines : to_multiple(kLoad);
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
