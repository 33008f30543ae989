// Products of a few rows with weights that are packed for them, as recurrences need them: the same weights at each
// step, and too few rows for packing to be worth it each time.
#pragma once

#include <cstdint>

#include "lockstep/base/dtype.h"

namespace lockstep::nn::cpu {

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
/// The same of bf16, summed in f32, where multiplies_pairs() (bf16_pairs.h): two elements of depth at a time.
void add_product(const BFloat16* a, std::int64_t a_stride, std::int64_t rows, std::int64_t depth, const BFloat16* panel,
                 std::int64_t width, float* c, std::int64_t c_stride);

}  // namespace lockstep::nn::cpu
