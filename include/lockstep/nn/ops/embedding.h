// Rows of a table by their indices.
#pragma once

#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// N indices, i32, each in [0, V): else UsageError, or, on a device that cannot throw, rows of NaN. The table is
/// (V, C), f32 or bf16 as the activations are; its gradient is f32 always.
class EmbeddingKernels {
 public:
  virtual ~EmbeddingKernels() = default;
  /// y (N, C) = table[indices]
  virtual void forward(const Tensor& table, const Tensor& indices, const Tensor& y) {}
  /// dtable (V, C): each row the sum of the rows of dy (N, C) that have its index, in their order, zero where there
  /// are none; added to what is there when `accumulate`.
  virtual void backward(const Tensor& indices, const Tensor& dy, bool accumulate, const Tensor& dtable) {}
  /// y (B, T, C) = x (B, T, C) + rows [first, first + T) of table (P, C), first + T ≤ P; y may be x.
  virtual void add_rows(const Tensor& x, const Tensor& table, std::int64_t first, const Tensor& y) {}
  /// dtable (P, C): row first + t the sum of dy (B, T, C) over the batch, the others zero; added to what is there when
  /// `accumulate`.
  virtual void add_rows_backward(const Tensor& dy, std::int64_t first, bool accumulate, const Tensor& dtable) {}
  /// Rotary positions (Su et al., "RoFormer", 2021; the halves of each head turned as in Hugging Face's models):
  /// y (B, T, H · D) of x, where of row t of a head the elements d and d + D/2 are turned by an angle:
  ///   y[d] = x[d] · cosines[f][d] − x[d + D/2] · sines[f][d],  y[d + D/2] = x[d + D/2] · cosines[f][d] + x[d] ·
  ///   sines[f][d]
  /// with f = first + t; cosines and sines are (P, D/2) f32, first + T ≤ P. `back` turns the other way: the gradient. y
  /// may be x.
  virtual void rotate(const Tensor& x, const Tensor& cosines, const Tensor& sines, std::int64_t first, bool back,
                      const Tensor& y) {}
  /// Where rows of samples are among those of a batch of (N, T, …): indices[n][k] = n · rows + positions[n][k], both
  /// (N, K) i32, with T `rows`; -1 for a position that is not in [0, T). Positions undefined: all are `position`.
  virtual void row_indices(const Tensor& positions, std::int64_t position, std::int64_t rows, const Tensor& indices) {}
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
