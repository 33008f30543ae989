// Batch statistics: what is summed over the rows of a matrix, column by column, and what is made of it.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/nn/ops/linear.h"

namespace lockstep::nn::cpu {

/// x, y, dy and dx are (rows, columns) of T, which is float or BFloat16, rows ≥ 0; all else is (columns) f32. Rows are
/// summed in chunks, each in blocks that stay in the cache, and these in f64; how they are cut depends on the shape
/// alone, so results do not depend on the number of threads. Every function reads each matrix from memory once.
class ColumnSums {
 public:
  /// squares: Σ (x − mean)².
  template <class T>
  void moments(const T* x, std::int64_t rows, std::int64_t columns, float* mean, float* squares);

  /// products: Σ dy · (x − mean), sums: Σ dy. Where y is not nullptr, dy is first set to 0 wherever y is not above 0
  /// and below top_of(activation).
  template <class T>
  void products(const T* x, const T* y, Epilogue activation, T* dy, const float* mean, std::int64_t rows,
                std::int64_t columns, float* products, float* sums);

 private:
  std::vector<double> parts_;  // (chunks, 2, columns); kept, so that it is allocated once
};

/// What is known of `more` numbers, their mean and the sum of their squared distances from it, joined to what is known
/// of `count` others: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
/// Variances", 1979.
void join_columns(double count, double more, double part_mean, double part_squares, double& mean, double& squares);

/// sums (columns) = or, where `accumulate`, += Σ x over its rows, one after the other, in f32: gradients of biases.
template <class T>
void sum_rows(const T* x, std::int64_t rows, std::int64_t columns, bool accumulate, float* sums);

/// y = activation((x − mean) · scale + shift + residual), where that may be nullptr. The activation is none, ReLU or,
/// without a residual, ReLU6; NaN stays.
template <class T>
void normalise_columns(const T* x, const T* residual, const float* mean, const float* scale, const float* shift,
                       Epilogue activation, std::int64_t rows, std::int64_t columns, T* y);

/// dx = scale · (dy − offset − (x − mean) · slope). dx may be dy.
template <class T>
void grad_input_columns(const T* x, const T* dy, const float* mean, const float* scale, const float* offset,
                        const float* slope, std::int64_t rows, std::int64_t columns, T* dx);

}  // namespace lockstep::nn::cpu
