// Sums over the rows of a matrix, column by column.
#pragma once

#include <cstdint>

namespace lockstep::nn::cpu {

/// x, dy and dx (rows, columns) f32, rows ≥ 0; all else (columns). Each column is summed in blocks of rows, these in
/// f64: the result does not depend on the number of threads.

/// squares: Σ (x − mean)².
void column_moments(const float* x, std::int64_t rows, std::int64_t columns, float* mean, float* squares);

/// products: Σ dy · (x − mean), sums: Σ dy.
void column_products(const float* x, const float* dy, const float* mean, std::int64_t rows, std::int64_t columns,
                     float* products, float* sums);

/// dx = scale · (dy − offset − (x − mean) · slope)
void spread_columns(const float* x, const float* dy, const float* mean, const float* scale, const float* offset,
                    const float* slope, std::int64_t rows, std::int64_t columns, float* dx);

}  // namespace lockstep::nn::cpu
