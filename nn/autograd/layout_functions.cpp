// Where elements lie: axes exchanged, cut, joined, repeated and summed up.
#include <algorithm>
#include <limits>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "nn/autograd/operands.h"
#include "nn/ops/strided.h"

namespace lockstep::nn {
namespace {

using Order = std::array<int, Shape::kMaxDims>;

std::size_t at(int axis) { return static_cast<std::size_t>(axis); }

// An axis of `shape` as a number from 0 on.
int axis_of(const char* op, const Shape& shape, int axis) {
  const int axes = shape.size();
  if (axis < -axes || axis >= axes)
    throw UsageError(fmt::format("{} of axis {} of {}", op, axis, to_string(shape)),
                     axes == 0 ? "a scalar has none" : fmt::format("give one from {} to {}", -axes, axes - 1));
  return axis < 0 ? axis + axes : axis;
}

// y = x with its axes in this order. Matrices that are turned round have a kernel of their own.
void copy_permuted(Backend& backend, const Tensor& x, const Order& order, const Tensor& y) {
  Strides from;
  const Strides of_x = dense_strides(x.shape()), to = dense_strides(y.shape());
  for (int axis = 0; axis < y.shape().size(); ++axis) from.of[at(axis)] = of_x.of[at(order[at(axis)])];
  const StridedWalk walk(from, to, y.shape());
  const int first = walk.axes - 2;
  if (x.count() > 0 && (walk.axes == 2 || (walk.axes == 3 && walk.from[0] == walk.to[0])) &&
      walk.from[at(first)] == 1 && size_of(x.dtype()) <= sizeof(float) &&
      (x.dtype() == DType::kF32 || is_half(x.dtype()))) {
    const std::int64_t columns = walk.extent[at(first)], rows = walk.extent[at(first + 1)],
                       n = x.count() / rows / columns;
    backend.pointwise().swap_last_axes(x.reshaped({n, rows, columns}), y.reshaped({n, columns, rows}));
  } else {
    backend.pointwise().copy_strided(x, from, y, to, y.shape());
  }
}

struct Permute {
  static constexpr const char* kName = "permute";
  Order order;
  Shape shape(const Shape& x) const {
    Shape y = x;
    for (int axis = 0; axis < x.size(); ++axis) y[axis] = x[order[at(axis)]];
    return y;
  }
  /// Whether the elements stay where they are.
  bool moves_nothing(const Shape& x) const {
    int last = -1;
    for (int axis = 0; axis < x.size(); ++axis) {
      if (x[order[at(axis)]] == 1) continue;
      if (order[at(axis)] < last) return false;
      last = order[at(axis)];
    }
    return true;
  }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const { copy_permuted(tape.backend(), x, order, y); }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const {
    Order back = {};
    for (int axis = 0; axis < dx.shape().size(); ++axis) back[at(order[at(axis)])] = axis;
    copy_permuted(tape.backend(), dy, back, dx);
  }
};

class ReshapeNode final : public Node {
 public:
  ReshapeNode(Var output, Var x) : Node(output), x_(x) {}
  void backward(Tape& tape) override { tape.contribute(x_, tape.grad(output()).reshaped(x_.shape())); }

 private:
  Var x_;
};

// Indices [begin, begin + y's extent) of an axis: x's elements there.
Strides part_of(const Shape& x, int axis, std::int64_t begin) {
  Strides strides = dense_strides(x);
  strides.offset = begin * strides.of[at(axis)];
  return strides;
}

struct Slice {
  static constexpr const char* kName = "slice";
  int axis;
  std::int64_t begin, end;
  Shape shape(const Shape& x) const {
    Shape y = x;
    y[axis] = end - begin;
    return y;
  }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const {
    tape.backend().pointwise().copy_strided(x, part_of(x.shape(), axis, begin), y, dense_strides(y.shape()), y.shape());
  }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const {
    tape.backend().pointwise().fill(dx, 0.0f);
    tape.backend().pointwise().copy_strided(dy, dense_strides(dy.shape()), dx, part_of(dx.shape(), axis, begin),
                                            dy.shape());
  }
};

class ConcatNode final : public Node {
 public:
  ConcatNode(Var output, Vars parts, int axis) : Node(output), parts_(std::move(parts)), axis_(axis) {}
  void backward(Tape& tape) override {
    const Tensor& dy = tape.grad(output());
    std::int64_t begin = 0;
    for (const Var part : parts_) {
      const std::int64_t first = std::exchange(begin, begin + part.shape()[axis_]);
      if (!part.needs_grad()) continue;
      Tensor dx = tape.backend().empty(part.shape(), dy.dtype());
      tape.backend().pointwise().copy_strided(dy, part_of(dy.shape(), axis_, first), dx, dense_strides(dx.shape()),
                                              dx.shape());
      tape.contribute(part, std::move(dx));
    }
  }

 private:
  Vars parts_;
  int axis_;
};

// `shape` with ones before it.
Shape with_axes(const Shape& shape, int axes) {
  Shape more;
  for (int axis = shape.size(); axis < axes; ++axis) more = more.with_last(1);
  for (const std::int64_t extent : shape.dims()) more = more.with_last(extent);
  return more;
}

// y = x, repeated along the axes where it has one index.
void repeat(Backend& backend, const Tensor& x, const Tensor& y) {
  const Shape few = with_axes(x.shape(), y.shape().size());
  Strides from = dense_strides(few);
  for (int axis = 0; axis < few.size(); ++axis)
    if (few[axis] == 1) from.of[at(axis)] = 0;
  backend.pointwise().copy_strided(x, from, y, dense_strides(y.shape()), y.shape());
}

// y = x, summed up along the axes where y has one index. Sums are f32; of the first axes alone they are a bias's.
void add_up(Backend& backend, const Tensor& x, const Tensor& y) {
  const Shape &whole = x.shape(), few = with_axes(y.shape(), whole.size());
  Order order = {};
  int kept = 0, axes = 0;
  for (const bool summed : {false, true})
    for (int axis = 0; axis < whole.size(); ++axis)
      if ((few[axis] != whole[axis]) == summed) {
        order[at(axes++)] = axis;
        kept += summed ? 0 : 1;
      }
  const std::int64_t columns = y.count(), rows = columns > 0 ? x.count() / columns : 0;
  if (columns == 0) return;
  const Tensor sums = y.dtype() == DType::kF32 ? y : backend.empty(y.shape());
  // Whether all axes that are kept come after those that are summed. An axis of one index lies anywhere.
  const int last = kept < axes ? order[at(axes - 1)] : -1;
  bool first = true;
  for (int axis = 0; axis < kept; ++axis) first = first && (whole[order[at(axis)]] == 1 || order[at(axis)] > last);
  if (rows == 0) {
    backend.pointwise().fill(sums, 0.0f);
  } else if (first) {
    backend.linear().backward_bias(x.reshaped({rows, columns}), false, sums.reshaped({columns}));
  } else {
    Shape turned;
    for (int axis = 0; axis < axes; ++axis) turned = turned.with_last(whole[order[at(axis)]]);
    Tensor together = x;
    if (!Permute{order}.moves_nothing(whole)) {
      together = backend.empty(turned, x.dtype());
      copy_permuted(backend, x, order, together);
    }
    if (together.dtype() != DType::kF32) {
      const Tensor wide = backend.empty(turned);
      backend.pointwise().cast(together, wide);
      together = wide;
    }
    backend.operators().forward(SumLast(), together.reshaped({columns, rows}), sums.reshaped({columns}));
  }
  if (y.dtype() != DType::kF32) backend.pointwise().cast(sums, y);
}

struct BroadcastTo {
  static constexpr const char* kName = "broadcast_to";
  Shape to;
  const Shape& shape(const Shape&) const { return to; }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const { repeat(tape.backend(), x, y); }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const { add_up(tape.backend(), dy, dx); }
};

struct SumOver {
  static constexpr const char* kName = "sum_over";
  Shape kept;  // with 1 in place of what is summed
  const Shape& shape(const Shape&) const { return kept; }
  void forward(Tape& tape, const Tensor& x, const Tensor& y) const { add_up(tape.backend(), x, y); }
  void backward(Tape& tape, Var, Var, const Tensor& dy, const Tensor& dx) const { repeat(tape.backend(), dy, dx); }
};

class WhereNode final : public Node {
 public:
  WhereNode(Var output, Tensor mask, Var x, Var y) : Node(output), mask_(std::move(mask)), x_(x), y_(y) {}
  void backward(Tape& tape) override {
    const Tensor& dz = tape.grad(output());
    const auto give = [&](Var to, const Tensor& of_x, const Tensor& of_y) {
      if (!to.needs_grad()) return;
      Tensor dx = tape.backend().empty(dz.shape(), dz.dtype());
      tape.backend().pointwise().select(mask_, of_x, of_y, dx);
      tape.contribute(to, std::move(dx));
    };
    give(x_, dz, {});
    give(y_, {}, dz);
  }

 private:
  Tensor mask_;
  Var x_, y_;
};

// The shape with the axes of `over` as ones, without them, and their number of elements.
struct Reduced {
  Shape ones, without;
  std::int64_t count = 1;
};
Reduced reduced(const char* op, const Shape& x, std::initializer_list<int> over) {
  Reduced to;
  to.ones = x;
  std::array<bool, Shape::kMaxDims> gone = {};
  if (over.size() == 0) gone.fill(true);
  for (const int axis : over) {
    bool& one = gone[at(axis_of(op, x, axis))];
    if (one) throw UsageError(fmt::format("{} over axis {} twice", op, axis), "name each axis once");
    one = true;
  }
  for (int axis = 0; axis < x.size(); ++axis) {
    if (!gone[at(axis)]) {
      to.without = to.without.with_last(x[axis]);
      continue;
    }
    to.count *= x[axis];
    to.ones[axis] = 1;
  }
  return to;
}

}  // namespace

Var reshape(Tape& tape, Var x, const Shape& shape) {
  check_operand(tape, x, "reshape");
  const Tape::OpScope scope(tape, "reshape");
  Shape to = shape;
  std::int64_t known = 1;
  int open = -1, opens = 0;
  bool fits = true;
  for (int axis = 0; axis < to.size(); ++axis) {
    if (to[axis] == -1) {
      open = axis;
      ++opens;
    } else {
      fits = fits && !__builtin_mul_overflow(known, to[axis], &known);
    }
  }
  const std::int64_t count = x.shape().count();
  if (fits && opens == 1 && known != 0) to[open] = count / known;
  fits = fits && opens <= 1 && std::ranges::none_of(to.dims(), [](std::int64_t extent) { return extent < 0; });
  if (!fits || to.count() != count)
    throw UsageError(fmt::format("reshape of {} to {}", to_string(x.shape()), to_string(shape)),
                     "give a shape of as many elements; one extent may be -1, which the others decide");
  const Var out = tape.make_var(x.value().reshaped(to), x.needs_grad());
  tape.record<ReshapeNode>(out, x);
  return out;
}

Var permute(Tape& tape, Var x, std::initializer_list<int> axes) {
  check_operand(tape, x, "permute");
  Permute permute = {};
  std::array<bool, Shape::kMaxDims> seen = {};
  bool whole = static_cast<int>(axes.size()) == x.shape().size();
  int place = 0;
  for (const int axis : axes) {
    if (!whole) break;
    const int known = axis_of("permute", x.shape(), axis);
    whole = !std::exchange(seen[at(known)], true);
    permute.order[at(place++)] = known;
  }
  if (!whole)
    throw UsageError(fmt::format("permute of {} by {} axes, or one twice", to_string(x.shape()), axes.size()),
                     "name each axis once");
  if (permute.moves_nothing(x.shape())) return reshape(tape, x, permute.shape(x.shape()));
  return compute(tape, x, permute);
}

Var transpose(Tape& tape, Var x, int first, int second) {
  check_operand(tape, x, "transpose");
  Permute permute = {};
  for (int axis = 0; axis < x.shape().size(); ++axis) permute.order[at(axis)] = axis;
  std::swap(permute.order[at(axis_of("transpose", x.shape(), first))],
            permute.order[at(axis_of("transpose", x.shape(), second))]);
  if (permute.moves_nothing(x.shape())) return reshape(tape, x, permute.shape(x.shape()));
  return compute(tape, x, permute);
}

Var slice(Tape& tape, Var x, int axis, std::int64_t begin, std::int64_t end) {
  check_operand(tape, x, "slice");
  const int known = axis_of("slice", x.shape(), axis);
  const std::int64_t extent = x.shape()[known];
  if (begin < 0 || end < begin || end > extent)
    throw UsageError(fmt::format("slice [{}, {}) of axis {} of {}", begin, end, axis, to_string(x.shape())),
                     fmt::format("0 ≤ begin ≤ end ≤ {}", extent));
  if (begin == 0 && end == extent) return x;
  return compute(tape, x, Slice{known, begin, end});
}

Var concat(Tape& tape, const Vars& parts, int axis) {
  check_usage(!parts.empty(), "concat of nothing", "give it at least one value");
  for (const Var part : parts) check_operand(tape, part, "concat");
  const Tape::OpScope scope(tape, "concat");
  const int known = axis_of("concat", parts[0].shape(), axis);
  Shape whole = parts[0].shape();
  whole[known] = 0;
  bool needs_grad = false;
  for (const Var part : parts) {
    Shape others = part.shape();
    if (others.size() == whole.size()) others[known] = whole[known];
    if (others != whole || part.dtype() != parts[0].dtype())
      throw UsageError(fmt::format("concat of {} of {} and {} of {} along axis {}", to_string(parts[0].shape()),
                                   name_of(parts[0].dtype()), to_string(part.shape()), name_of(part.dtype()), axis),
                       "give values of one type whose other axes are the same");
    whole[known] += part.shape()[known];
    needs_grad = needs_grad || part.needs_grad();
  }
  Tensor joined = tape.backend().empty(whole, parts[0].dtype());
  std::int64_t begin = 0;
  for (const Var part : parts) {
    tape.backend().pointwise().copy_strided(part.value(), dense_strides(part.shape()), joined,
                                            part_of(whole, known, begin), part.shape());
    begin += part.shape()[known];
  }
  const Var out = tape.make_var(std::move(joined), needs_grad);
  tape.record<ConcatNode>(out, parts, known);
  return out;
}

Var broadcast_to(Tape& tape, Var x, const Shape& shape) {
  check_operand(tape, x, "broadcast_to");
  const Shape& from = x.shape();
  if (from == shape) return x;
  bool fits = from.size() <= shape.size();
  for (int axis = 0; axis < from.size() && fits; ++axis) {
    const std::int64_t wanted = shape[shape.size() - from.size() + axis];
    fits = from[axis] == wanted || (from[axis] == 1 && wanted >= 0);
  }
  if (!fits)
    throw UsageError(fmt::format("broadcast of {} to {}", to_string(from), to_string(shape)),
                     "counted from the last axis, extents are equal or 1, and missing axes are 1");
  if (shape.count() == from.count()) return reshape(tape, x, shape);
  return compute(tape, x, BroadcastTo{shape});
}

std::array<Var, 2> broadcast(Tape& tape, Var x, Var y, const char* op) {
  const Shape &a = x.shape(), &b = y.shape();
  if (x.dtype() != y.dtype())
    throw UsageError(fmt::format("{} of {} of {} and {} of {}", op, to_string(a), name_of(x.dtype()), to_string(b),
                                 name_of(y.dtype())),
                     "give both one type: nn::to_f32(tape, x), nn::to_activations(tape, x)");
  const int axes = std::max(a.size(), b.size());
  const Shape more_a = with_axes(a, axes), more_b = with_axes(b, axes);
  Shape both = more_a;
  for (int axis = 0; axis < axes; ++axis) {
    if (more_a[axis] != more_b[axis] && more_a[axis] != 1 && more_b[axis] != 1)
      throw UsageError(fmt::format("{} of {} and {}", op, to_string(a), to_string(b)),
                       "counted from the last axis, extents are equal, or one of them is 1");
    if (more_a[axis] == 1) both[axis] = more_b[axis];
  }
  return {broadcast_to(tape, x, both), broadcast_to(tape, y, both)};
}

Var sum_over(Tape& tape, Var x, std::initializer_list<int> axes, bool keep) {
  check_operand(tape, x, "sum_over");
  const Reduced to = reduced("sum_over", x.shape(), axes);
  return in_f32(tape, x, [&](Var wide) {
    const Var sums = compute(tape, wide, SumOver{to.ones});
    return keep ? sums : reshape(tape, sums, to.without);
  });
}

Var mean_over(Tape& tape, Var x, std::initializer_list<int> axes, bool keep) {
  check_operand(tape, x, "mean_over");
  const std::int64_t count = reduced("mean_over", x.shape(), axes).count;
  check_usage(count > 0, "mean_over of no elements", "give it axes that have some");
  return in_f32(tape, x, [&](Var wide) {
    return affine(tape, sum_over(tape, wide, axes, keep), static_cast<float>(1.0 / static_cast<double>(count)));
  });
}

Var max_over(Tape& tape, Var x, std::initializer_list<int> axes, bool keep) {
  check_operand(tape, x, "max_over");
  const Reduced to = reduced("max_over", x.shape(), axes);
  check_usage(to.count > 0, "max_over of no elements", "give it axes that have some");
  Permute last = {};  // what goes is last
  int place = 0;
  for (const bool goes : {false, true})
    for (int axis = 0; axis < x.shape().size(); ++axis) {
      const bool reduces = std::ranges::any_of(axes, [&](int one) { return axis_of("", x.shape(), one) == axis; });
      if ((reduces || axes.size() == 0) == goes) last.order[at(place++)] = axis;
    }
  const Var together = last.moves_nothing(x.shape()) ? x : compute(tape, x, last);
  const Var rows = reshape(tape, together, to.without.with_last(to.count));
  return reshape(tape, apply(tape, rows, MaxLast()), keep ? to.ones : to.without);
}

Var softmax(Tape& tape, Var x, int axis) {
  check_operand(tape, x, "softmax");
  axis = axis_of("softmax", x.shape(), axis);
  return transpose(tape, apply(tape, transpose(tape, x, axis, -1), SoftmaxLast()), axis, -1);
}

Var log_softmax(Tape& tape, Var x, int axis) {
  check_operand(tape, x, "log_softmax");
  axis = axis_of("log_softmax", x.shape(), axis);
  return transpose(tape, apply(tape, transpose(tape, x, axis, -1), LogSoftmaxLast()), axis, -1);
}

// Numbers of a row are rows of one, which index_select() counts over all rows.
Var gather(Tape& tape, Var x, int axis, const Tensor& indices) {
  check_operand(tape, x, "gather");
  check_tensor(tape, indices, DType::kI32, "gather was given indices");
  axis = axis_of("gather", x.shape(), axis);
  Shape wanted = x.shape();
  if (indices.shape().size() == wanted.size()) wanted[axis] = indices.size(axis);
  if (indices.shape() != wanted || x.shape().count() > std::numeric_limits<std::int32_t>::max())
    throw UsageError(
        fmt::format("gather along axis {} of {} by indices {}", axis, to_string(x.shape()), to_string(indices.shape())),
        "indices have x's shape but for that axis, and x fewer than 2³¹ elements");
  Backend& backend = tape.backend();
  const int last = x.shape().size() - 1;
  const Var rows = transpose(tape, x, axis, -1);
  Permute turn = {};
  for (int one = 0; one <= last; ++one) turn.order[at(one)] = one;
  std::swap(turn.order[at(axis)], turn.order[at(last)]);
  Tensor places = indices;
  if (!turn.moves_nothing(indices.shape())) {
    places = backend.empty(turn.shape(indices.shape()), DType::kI32);
    copy_permuted(backend, indices, turn.order, places);
  }
  const Shape result = turn.shape(indices.shape());
  const std::int64_t columns = rows.shape()[last], each = result[last], count = each > 0 ? result.count() / each : 0;
  const Tensor numbers = backend.empty({count, each}, DType::kI32);
  backend.embedding().row_indices(places.reshaped({count, each}), 0, columns, numbers);
  const Var all = index_select(tape, reshape(tape, rows, {x.shape().count(), 1}), numbers);
  return transpose(tape, reshape(tape, all, result), axis, -1);
}

Var where(Tape& tape, const Tensor& condition, Var x, Var y) {
  check_operand(tape, x, "where");
  check_operand(tape, y, "where");
  check_tensor(tape, condition, DType::kI32, "where was given a condition");
  const auto [a, b] = broadcast(tape, x, y, "where");
  const Tape::OpScope scope(tape, "where");
  if (condition.shape() != a.shape())
    throw UsageError(
        fmt::format("where of a condition {} and values {}", to_string(condition.shape()), to_string(a.shape())),
        "give a condition of the values' shape");
  Tensor z = tape.backend().empty(a.shape(), a.dtype());
  tape.backend().pointwise().select(condition, a.value(), b.value(), z);
  const Var out = tape.make_var(std::move(z), a.needs_grad() || b.needs_grad());
  tape.record<WhereNode>(out, condition, a, b);
  return out;
}

}  // namespace lockstep::nn
