// Products of our own, where they are faster than oneDNN's. Internal to nn/ops/cpu.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "base/cpu.h"
#include "lockstep/base/dtype.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/nn/tensor/allocator.h"

namespace lockstep::nn::cpu {

// Sums of products of pairs of bf16, as AVX512-BF16 has them.

/// Whether loops may use vdpbf16ps, which adds the products of two pairs of bf16 to a lane of f32. It reads numbers
/// below the normal ones as 0. Honours ONEDNN_MAX_CPU_ISA, so that everything in bf16 is computed in the same way.
inline bool multiplies_pairs() {
#if defined(__x86_64__)
  return cpu_features().avx512_bf16 && cpu_bf16() >= CpuBf16::kAvx512;
#else
  return false;
#endif
}

#if defined(__x86_64__)
/// Of functions that use it.
#define LOCKSTEP_AVX512_BF16 gnu::target("arch=x86-64-v4,avx512bf16")
#endif

// Products of a few rows with weights that are packed for them, as recurrences need them: the same weights at each
// step, and too few rows for packing to be worth it each time.

/// Columns that lie side by side in a panel: (depth, kPanel) f32, or ((depth + 1) / 2, kPanel, 2) bf16, zero where a
/// matrix has fewer.
inline constexpr std::int64_t kPanel = 32;

inline constexpr std::int64_t panels_of(std::int64_t columns) { return (columns + kPanel - 1) / kPanel; }
/// Elements of one panel.
template <class T>
constexpr std::int64_t panel_size(std::int64_t depth) {
  return (sizeof(T) == sizeof(float) ? depth : (depth + 1) / 2 * 2) * kPanel;
}

/// panel = columns [0, width) of wᵀ, w (≥ width, depth) with `stride` from row to row; width ≤ kPanel.
void pack_rows(const float* w, std::int64_t stride, std::int64_t width, std::int64_t depth, float* panel);
void pack_rows(const BFloat16* w, std::int64_t stride, std::int64_t width, std::int64_t depth, BFloat16* panel);
/// panel = columns [0, width) of w (depth, ≥ width).
void pack_columns(const float* w, std::int64_t stride, std::int64_t width, std::int64_t depth, float* panel);
void pack_columns(const BFloat16* w, std::int64_t stride, std::int64_t width, std::int64_t depth, BFloat16* panel);

/// c (rows, width) += a (rows, depth) · panel, width ≤ kPanel. Each sum is taken in the order of depth, whatever the
/// number of rows. `panel` is 64-byte aligned.
void add_product(const float* a, std::int64_t a_stride, std::int64_t rows, std::int64_t depth, const float* panel,
                 std::int64_t width, float* c, std::int64_t c_stride);
/// The same of bf16, summed in f32, where multiplies_pairs(): two elements of depth at a time.
void add_product(const BFloat16* a, std::int64_t a_stride, std::int64_t rows, std::int64_t depth, const BFloat16* panel,
                 std::int64_t width, float* c, std::int64_t c_stride);

// The product of one row with a matrix: what a model computes for one token.

/// y (out) = w (out, in) · x (in) + b (out); b may be nullptr. X and Y are float or BFloat16, Y no narrower than X;
/// sums are f32. Each element is summed in an order that `in` alone decides. All of w is read once, in its order: it is
/// as fast as memory is.
template <class X, class Y>
void multiply_row(const X* x, const X* w, const Y* b, std::int64_t in, std::int64_t out, Y* y);

/// y (out) = (w (out, in) · x (in)) · scales (out) + b (out), sums in f32: Int8Rows. b may be nullptr.
void multiply_int8_row(const float* x, const std::int8_t* w, const float* scales, const float* b, std::int64_t in,
                       std::int64_t out, float* y);

// Products of whole matrices.

/// Whether oneDNN computes with AVX2 and no wider instruction set, which ONEDNN_MAX_CPU_ISA may ask for, and this CPU
/// has what our loops in its place need.
bool computes_with_avx2();

/// Note [Products with AVX2]
/// With AVX2 oneDNN's product packs no operand of which one side is short. For gradients of weights, aᵀ · b, it reads
/// the columns of a with a stride that often is a power of two, of which a cache holds few lines, and runs at half of
/// the speed at which it multiplies rows. These it multiplies at three quarters of what the core can do. With AVX-512
/// it packs them.

/// c (m, n) = aᵀ · b, or c += where `accumulate`; a (depth, m), b (depth, n), f32 without gaps. The sums are taken in
/// the order of depth ≥ 1, 256 products at a time, whatever the number of threads. Scratch memory comes from
/// `allocator`.
void multiply_columns(const float* a, const float* b, std::int64_t depth, std::int64_t m, std::int64_t n,
                      bool accumulate, float* c, CachingAllocator& allocator);

/// c (m, n) = a (m, depth) · b + bias (n), f32 without gaps; b is (n, depth) or, `b_in_columns`, (depth, n); bias may
/// be nullptr. A sum's order depends neither on m nor on the number of threads.
void multiply_rows(const float* a, const float* b, bool b_in_columns, const float* bias, std::int64_t depth,
                   std::int64_t m, std::int64_t n, float* c, CachingAllocator& allocator);
/// For fewer rows packing b is not worth it.
inline constexpr std::int64_t kFewestRows = 48;

/// multiply_columns() by the calling thread alone, with scratch memory for column_scratch() floats.
void multiply_columns_alone(const float* a, const float* b, std::int64_t depth, std::int64_t m, std::int64_t n,
                            bool accumulate, float* c, float* scratch);
std::int64_t column_scratch(std::int64_t depth, std::int64_t m, std::int64_t n);

}  // namespace lockstep::nn::cpu
