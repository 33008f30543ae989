#include <limits>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"

namespace lockstep::nn {
namespace {

// The embedding's kernels read and add up rows of any table.
class IndexSelectNode final : public Node {
 public:
  IndexSelectNode(Var output, Var x, Tensor indices) : Node(output), x_(x), indices_(std::move(indices)) {}

  void backward(Tape& tape) override {
    Backend& backend = tape.backend();
    const Tensor& dy = tape.grad(output());
    const std::int64_t width = output().shape()[output().shape().size() - 1];
    const Tensor sums = backend.empty({x_.value().count() / width, width});
    backend.embedding().backward(indices_, dy, false, sums);
    Tensor dx = sums.reshaped(x_.shape());
    if (dy.dtype() != DType::kF32) {
      dx = backend.empty(x_.shape(), dy.dtype());
      backend.pointwise().cast(sums.reshaped(x_.shape()), dx);
    }
    tape.contribute(x_, std::move(dx));
  }

 private:
  Var x_;
  Tensor indices_;
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
  const Tape::OpScope scope(tape, "index_select");
  const int last = x.shape().size() - 1, axes = indices.shape().size();
  if (last < 1 || x.shape()[last] < 1 || axes < 1 || axes >= Shape::kMaxDims)
    throw UsageError(fmt::format("rows of {} by indices {}", to_string(x.shape()), to_string(indices.shape())),
                     "give it at least two axes, and indices of at least one");
  const std::int64_t width = x.shape()[last];
  const Tensor rows = x.value().reshaped({x.value().count() / width, width});
  Tensor y = tape.backend().empty(shape_of_rows(indices.shape(), width), rows.dtype());
  tape.backend().embedding().forward(rows, indices, y);
  const Var out = tape.make_var(std::move(y), x.needs_grad());
  tape.record<IndexSelectNode>(out, x, indices);
  return out;
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
