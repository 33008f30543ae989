#include <limits>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

// The embedding's kernels read and add up rows of any table.
struct IndexSelect {
  static constexpr const char* kName = "index_select";
  Tensor indices;
  Shape shape(const Shape& x) const {
    const int last = x.size() - 1, axes = indices.shape().size();
    if (last < 1 || x[last] < 1 || axes < 1 || axes >= Shape::kMaxDims)
      throw UsageError(fmt::format("rows of {} by indices {}", to_string(x), to_string(indices.shape())),
                       "give it at least two axes, and indices of at least one");
    return indices.shape().with_last(x[last]);
  }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const {
    tape.backend().embedding().forward(rows_of(x), indices, y);
  }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const {
    const Tensor sums = dx.dtype() == DType::kF32 ? dx : tape.backend().empty(dx.shape());
    tape.backend().embedding().backward(indices, dy, false, rows_of(sums));
    if (dx.dtype() != DType::kF32) tape.backend().pointwise().cast(sums, dx);
  }

 private:
  static Tensor rows_of(const Tensor& x) {
    const std::int64_t width = x.size(x.shape().size() - 1);
    return x.reshaped({x.count() / width, width});
  }
};

// Indices of the rows of samples; undefined `positions`: all are `position`.
Tensor row_indices(Tape& tape, Var x, const Tensor& positions, std::int64_t position, const Shape& shape) {
  if (x.shape()[0] * x.shape()[1] > std::numeric_limits<std::int32_t>::max())
    throw UsageError(fmt::format("rows of {}, which are more than i32 counts", to_string(x.shape())),
                     "give fewer samples at once");
  Tensor indices = tape.backend().empty(shape, DType::kI32);
  tape.backend().embedding().row_indices(positions, position, x.shape()[1], indices);
  return indices;
}

}  // namespace

Var index_select(Tape& tape, Var x, const Tensor& indices) {
  check_operand(tape, x, "index_select");
  check_tensor(tape, indices, DType::kI32, "index_select was given indices");
  return compute(tape, x, IndexSelect{indices});
}

Var take_positions(Tape& tape, Var x, const Tensor& positions) {
  check_operand(tape, x, "take_positions");
  check_tensor(tape, positions, DType::kI32, "take_positions was given positions");
  const Shape& s = x.shape();
  if (s.size() != 3 || s[2] < 1 || positions.shape().size() != 2 || positions.size(0) != s[0])
    throw UsageError(fmt::format("rows of {} at positions {}", to_string(s), to_string(positions.shape())),
                     "give it (N, T, C), and positions (N, K)");
  return index_select(tape, x, row_indices(tape, x, positions, 0, positions.shape()));
}

Var take_position(Tape& tape, Var x, std::int64_t position) {
  check_operand(tape, x, "take_position");
  const Shape& s = x.shape();
  if (s.size() != 3 || s[2] < 1 || position < 0 || position >= s[1])
    throw UsageError(fmt::format("the row at position {} of each of {}", position, to_string(s)),
                     "give it (N, T, C), and a position below T");
  return index_select(tape, x, row_indices(tape, x, {}, position, {s[0]}));
}

}  // namespace lockstep::nn
