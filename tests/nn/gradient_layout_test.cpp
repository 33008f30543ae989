// Operators that move elements, sum them up, and multiply variables: values against plain loops, gradients against
// central differences, on the device of make_gradient_backend().
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "lockstep/nn/layers/layers.h"
#include "tests/nn/gradient_check.h"
#include "tests/nn/operator_cases.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

using Index = std::vector<std::int64_t>;

// Calls body(index) for each index of `shape`, in row-major order.
void for_indices(const Shape& shape, const std::function<void(const Index&)>& body) {
  Index index(static_cast<std::size_t>(shape.size()), 0);
  for (std::int64_t i = 0; i < shape.count(); ++i) {
    body(index);
    for (auto axis = index.size(); axis-- > 0;) {
      if (++index[axis] < shape[static_cast<int>(axis)]) break;
      index[axis] = 0;
    }
  }
}
std::size_t place(const Shape& shape, const Index& index) {
  std::int64_t at = 0;
  for (int axis = 0; axis < shape.size(); ++axis) at = at * shape[axis] + index[static_cast<std::size_t>(axis)];
  return static_cast<std::size_t>(at);
}

class Layout : public Gradient {
 protected:
  // op(x) has this shape, at each index the element of x that `from` names, and the gradient that follows.
  void expect_moves(const Shape& x, const std::function<Var(Tape&, Var)>& op, const Shape& y,
                    const std::function<Index(const Index&)>& from) {
    SCOPED_TRACE(to_string(x));
    const Tensor input = random(x, 3);
    Tape tape(*backend);
    const Var moved = op(tape, tape.input(input));
    ASSERT_EQ(moved.shape(), y);
    const auto values = values_of(*backend, input), result = values_of(*backend, moved.value());
    for_indices(y, [&](const Index& index) { ASSERT_EQ(result[place(y, index)], values[place(x, from(index))]); });
    if (x.count() <= 200) expect_gradients({{input}, {}}, [&](Tape& on, Inputs in) { return op(on, in[0]); });
  }
  Tensor numbers(const Shape& shape, std::vector<std::int32_t> values) {
    const Tensor made = backend->empty(shape, DType::kI32);
    backend->upload(std::as_bytes(std::span(values)), made);
    return made;
  }

  void expect_reduction(Var (*op)(Tape&, Var, std::initializer_list<int>, bool)) {
    const std::initializer_list<int> all[] = {{0}, {1}, {2}, {-1}, {0, 1}, {0, 2}, {1, 2}, {}, {2, 0, 1}};
    for (const auto& axes : all)
      for (const bool keep : {false, true})
        expect_gradients({{numbers_apart(*backend, {2, 3, 4})}, {}},
                         [&](Tape& on, Inputs in) { return op(on, in[0], axes, keep); });
  }

  Tape refused{*backend};
};

TEST_F(Layout, Permute) {
  expect_moves(
      {2, 3, 4},
      [](Tape& t, Var x) {
        return permute(t, x, {2, 0, 1});
      },
      {4, 2, 3},
      [](const Index& i) {
        return Index{i[1], i[2], i[0]};
      });
  expect_moves(
      {2, 3, 4, 5},
      [](Tape& t, Var x) {
        return permute(t, x, {0, 2, 1, -1});
      },
      {2, 4, 3, 5},
      [](const Index& i) {
        return Index{i[0], i[2], i[1], i[3]};
      });
  expect_moves(
      {3, 1, 4},
      [](Tape& t, Var x) {
        return permute(t, x, {1, 0, 2});
      },
      {1, 3, 4},
      [](const Index& i) {
        return Index{i[1], i[0], i[2]};
      });
  // Matrices that are turned round, one and several; rows of whole packs; six axes.
  expect_moves(
      {65, 63},
      [](Tape& t, Var x) {
        return permute(t, x, {1, 0});
      },
      {63, 65},
      [](const Index& i) {
        return Index{i[1], i[0]};
      });
  expect_moves(
      {3, 40, 33},
      [](Tape& t, Var x) {
        return permute(t, x, {0, 2, 1});
      },
      {3, 33, 40},
      [](const Index& i) {
        return Index{i[0], i[2], i[1]};
      });
  expect_moves(
      {5, 7, 64},
      [](Tape& t, Var x) {
        return permute(t, x, {1, 0, 2});
      },
      {7, 5, 64},
      [](const Index& i) {
        return Index{i[1], i[0], i[2]};
      });
  expect_moves(
      {2, 3, 2, 3, 2, 2},
      [](Tape& t, Var x) {
        return permute(t, x, {5, 3, 1, 0, 2, 4});
      },
      {2, 3, 3, 2, 2, 2}, [](const Index& i) { return Index{i[3], i[2], i[4], i[1], i[5], i[0]}; });
  expect_moves(
      {4, 30, 3, 20},
      [](Tape& t, Var x) {
        return permute(t, x, {2, 0, 3, 1});
      },
      {3, 4, 20, 30},
      [](const Index& i) {
        return Index{i[1], i[3], i[0], i[2]};
      });
  expect_moves(
      {0, 3},
      [](Tape& t, Var x) {
        return permute(t, x, {1, 0});
      },
      {3, 0}, [](const Index& i) { return i; });
}

TEST_F(Layout, Transpose) {
  for (const Shape& shape : {Shape{1, 1, 1}, {2, 3, 5}, {4, 3, 1}, {1, 5, 2}, {3, 2, 2}})
    expect_moves(
        shape, [](Tape& t, Var x) { return transpose(t, x, 0, 1); }, {shape[1], shape[0], shape[2]},
        [](const Index& i) {
          return Index{i[1], i[0], i[2]};
        });
  expect_moves(
      {2, 3, 4, 5}, [](Tape& t, Var x) { return transpose(t, x, 1, -1); }, {2, 5, 4, 3},
      [](const Index& i) {
        return Index{i[0], i[3], i[2], i[1]};
      });
}

TEST_F(Layout, Reshape) {
  expect_moves(
      {2, 6},
      [](Tape& t, Var x) {
        return reshape(t, x, {3, -1});
      },
      {3, 4},
      [](const Index& i) {
        return Index{(i[0] * 4 + i[1]) / 6, (i[0] * 4 + i[1]) % 6};
      });
  EXPECT_REFUSED("reshape of [2, 6] to [5, -1]", reshape(refused, refused.input(random({2, 6}, 1)), {5, -1}));
  EXPECT_REFUSED("reshape of [4]", reshape(refused, refused.input(random({4}, 1)), {-1, -1}));
  EXPECT_REFUSED("reshape of [4]", reshape(refused, refused.input(random({4}, 1)), {-2, -2}));
}

TEST_F(Layout, Slice) {
  expect_moves(
      {3, 5, 4}, [](Tape& t, Var x) { return slice(t, x, 1, 1, 4); }, {3, 3, 4},
      [](const Index& i) {
        return Index{i[0], i[1] + 1, i[2]};
      });
  expect_moves(
      {3, 5}, [](Tape& t, Var x) { return slice(t, x, -1, 2, 3); }, {3, 1},
      [](const Index& i) {
        return Index{i[0], i[1] + 2};
      });
  expect_moves(
      {6, 2}, [](Tape& t, Var x) { return slice(t, x, 0, 4, 6); }, {2, 2},
      [](const Index& i) {
        return Index{i[0] + 4, i[1]};
      });
  expect_moves(
      {3, 128}, [](Tape& t, Var x) { return slice(t, x, 1, 64, 128); }, {3, 64},
      [](const Index& i) {
        return Index{i[0], i[1] + 64};
      });
  expect_moves(
      {3, 2}, [](Tape& t, Var x) { return slice(t, x, 0, 1, 1); }, {0, 2}, [](const Index& i) { return i; });
  EXPECT_REFUSED("slice [2, 4) of axis 0 of [3, 2]", slice(refused, refused.input(random({3, 2}, 1)), 0, 2, 4));
  EXPECT_REFUSED("axis 2 of [3, 2]", slice(refused, refused.input(random({3, 2}, 1)), 2, 0, 1));
}

TEST_F(Layout, Concat) {
  for (const int axis : {0, 1, -1}) {
    const int known = axis < 0 ? 2 : axis;
    const Shape shape = {2, 3, 4};
    Shape longer = shape, whole = shape;
    longer[known] = 5;
    whole[known] = 2 * shape[known] + 5;
    const Tensor a = random(shape, 1), b = random(longer, 2);
    expect_gradients({{a, b}, {}}, [&](Tape& t, Inputs x) { return concat(t, {x[0], x[1], x[0]}, axis); });
    Tape tape(*backend);
    const Var y = concat(tape, {tape.input(a), tape.input(b), tape.input(a)}, axis);
    ASSERT_EQ(y.shape(), whole);
    const auto values = values_of(*backend, y.value()), of_a = values_of(*backend, a), of_b = values_of(*backend, b);
    for_indices(whole, [&](const Index& index) {
      Index inside = index;
      auto& at = inside[static_cast<std::size_t>(known)];
      const std::int64_t first = shape[known];
      const bool second = at >= first && at < first + 5;
      at -= at >= first + 5 ? first + 5 : second ? first : 0;
      ASSERT_EQ(values[place(whole, index)], second ? of_b[place(longer, inside)] : of_a[place(shape, inside)]);
    });
  }
  EXPECT_REFUSED("concat of nothing", concat(refused, {}, 0));
}

TEST_F(Layout, BroadcastTo) {
  expect_moves(
      {3},
      [](Tape& t, Var x) {
        return broadcast_to(t, x, {4, 3});
      },
      {4, 3}, [](const Index& i) { return Index{i[1]}; });
  expect_moves(
      {2, 1, 3},
      [](Tape& t, Var x) {
        return broadcast_to(t, x, {2, 4, 3});
      },
      {2, 4, 3},
      [](const Index& i) {
        return Index{i[0], 0, i[2]};
      });
  expect_moves(
      {2, 1},
      [](Tape& t, Var x) {
        return broadcast_to(t, x, {3, 2, 5});
      },
      {3, 2, 5},
      [](const Index& i) {
        return Index{i[1], 0};
      });
  expect_moves(
      {1, 3, 1},
      [](Tape& t, Var x) {
        return broadcast_to(t, x, {2, 3, 4});
      },
      {2, 3, 4},
      [](const Index& i) {
        return Index{0, i[1], 0};
      });
  expect_moves(
      {},
      [](Tape& t, Var x) {
        return broadcast_to(t, x, {2, 3});
      },
      {2, 3}, [](const Index&) { return Index{}; });
  expect_moves(
      {1, 2, 3, 1, 2},
      [](Tape& t, Var x) {
        return broadcast_to(t, x, {1, 2, 3, 4, 2});
      },
      {1, 2, 3, 4, 2},
      [](const Index& i) {
        return Index{0, i[1], i[2], 0, i[4]};
      });
  EXPECT_REFUSED("broadcast of [2, 3] to [3, 2]", broadcast_to(refused, refused.input(random({2, 3}, 1)), {3, 2}));
}

TEST_F(Layout, ArithmeticIsBroadcast) {
  const std::pair<Shape, Shape> shapes[] = {{{2, 3}, {3}}, {{2, 1, 3}, {4, 1}}, {{1}, {2, 2}}, {{2, 3}, {2, 1}}};
  for (const auto& [a, b] : shapes) {
    SCOPED_TRACE(to_string(a) + to_string(b));
    const Differentiated by = {{random(a, 1), random(b, 2)}, {}};
    for (const auto op : {add, sub, mul}) expect_gradients(by, [&](Tape& t, Inputs x) { return op(t, x[0], x[1]); });
  }
  Tape tape(*backend);
  const Var x = tape.input(tensor_of(*backend, {2, 2}, {1, 2, 3, 4})),
            y = tape.input(tensor_of(*backend, {2}, {10, 20}));
  EXPECT_EQ(values_of(*backend, add(tape, x, y).value()), (std::vector<float>{11, 22, 13, 24}));
  EXPECT_EQ(values_of(*backend, sub(tape, y, x).value()), (std::vector<float>{9, 18, 7, 16}));
  EXPECT_REFUSED("add of [2, 3] and [2]",
                 add(refused, refused.input(random({2, 3}, 1)), refused.input(random({2}, 1))));
}

TEST_F(Layout, SumOver) {
  expect_reduction(sum_over);
  Tape tape(*backend);
  const Var v = tape.input(tensor_of(*backend, {2, 3}, {1, 5, 3, 4, 2, 6}));
  const auto of = [&](Var y) { return values_of(*backend, y.value()); };
  EXPECT_EQ(of(sum_over(tape, v, {0})), (std::vector<float>{5, 7, 9}));
  EXPECT_EQ(of(sum_over(tape, v, {1})), (std::vector<float>{9, 12}));
  EXPECT_EQ(sum_over(tape, v, {}).shape(), Shape{});
  EXPECT_EQ(sum_over(tape, v, {1}, true).shape(), (Shape{2, 1}));
  EXPECT_EQ(of(sum_over(tape, tape.input(backend->zeros({0, 2})), {0})), (std::vector<float>{0, 0}));
  // Axes of one index lie anywhere: they must not hide what is kept before what is summed.
  for (const Shape& shape : {Shape{1, 2, 3}, Shape{2, 1, 3}, Shape{1, 2, 1, 3}, Shape{1, 1, 2, 3}}) {
    SCOPED_TRACE(to_string(shape));
    const Var same = reshape(tape, v, shape);
    EXPECT_EQ(of(sum_over(tape, same, {-1})), (std::vector<float>{9, 12}));
    EXPECT_EQ(of(sum_over(tape, same, {shape[1] == 2 ? 1 : shape.size() == 3 ? 0 : 2})), (std::vector<float>{5, 7, 9}));
  }
  EXPECT_REFUSED("axis -2 twice", sum_over(refused, refused.input(random({2, 3, 4}, 1)), {1, -2}));
}
TEST_F(Layout, MeanOver) {
  expect_reduction(mean_over);
  Tape tape(*backend);
  const Var v = tape.input(tensor_of(*backend, {2, 3}, {1, 5, 3, 4, 2, 6}));
  EXPECT_EQ(values_of(*backend, mean_over(tape, v, {}).value()), (std::vector<float>{3.5f}));
}
TEST_F(Layout, MaxOver) {
  expect_reduction(max_over);
  Tape tape(*backend);
  const Var v = tape.differentiable_input(tensor_of(*backend, {2, 3}, {1, 5, 5, 4, 2, 6}));
  EXPECT_EQ(values_of(*backend, max_over(tape, v, {0}).value()), (std::vector<float>{4, 5, 6}));
  const Var rows = max_over(tape, v, {-1}, true);
  EXPECT_EQ(values_of(*backend, rows.value()), (std::vector<float>{5, 6}));
  tape.backward(sum(tape, rows, 1.0f).value);
  EXPECT_EQ(values_of(*backend, tape.grad(v)), (std::vector<float>{0, 0.5f, 0.5f, 0, 0, 1})) << "equal ones share it";
  EXPECT_REFUSED("max_over of no elements", max_over(refused, refused.input(backend->zeros({0, 2})), {0}));
}

TEST_F(Layout, Softmax) {
  const Tensor x = random({2, 3, 4}, 3);
  for (const int axis : {0, 1, 2, -1}) {
    expect_gradients({{x}, {}}, [&](Tape& t, Inputs in) { return softmax(t, in[0], axis); });
    expect_gradients({{x}, {}}, [&](Tape& t, Inputs in) { return log_softmax(t, in[0], axis); });
  }
  Tape tape(*backend);
  for (const float one : values_of(*backend, sum_over(tape, softmax(tape, tape.input(x), 1), {1}).value()))
    EXPECT_NEAR(one, 1.0f, 1e-6f);
}

TEST_F(Layout, Gather) {
  const Tensor x = random({2, 3, 4}, 3);
  expect_gradients({{x}, {}}, [&](Tape& t, Inputs in) {
    return gather(t, in[0], -1, numbers({2, 3, 2}, {0, 3, 1, 1, 2, 0, 3, 3, 0, 1, 2, 2}));
  });
  expect_gradients({{x}, {}}, [&](Tape& t, Inputs in) {
    return gather(t, in[0], 1, numbers({2, 1, 4}, {0, 2, 1, 1, 2, 2, 0, 1}));
  });
  Tape tape(*backend);
  const Var v = tape.input(tensor_of(*backend, {2, 3}, {1, 5, 3, 4, 2, 6}));
  const auto of = [&](Var y) { return values_of(*backend, y.value()); };
  EXPECT_EQ(of(gather(tape, v, 1, numbers({2, 1}, {2, 0}))), (std::vector<float>{3, 4}));
  EXPECT_EQ(of(gather(tape, v, 0, numbers({1, 3}, {1, 0, 1}))), (std::vector<float>{4, 5, 6}));
  EXPECT_REFUSED("by indices [2, 1]", gather(refused, refused.input(x), 1, numbers({2, 1}, {0, 1})));
}

TEST_F(Layout, Where) {
  const Tensor condition = numbers({2, 3}, {1, 0, 0, -2, 1, 0});
  expect_gradients({{random({2, 3}, 1), random({2, 3}, 2)}, {}},
                   [&](Tape& t, Inputs x) { return where(t, condition, x[0], x[1]); });
  expect_gradients({{random({2, 3}, 1), random({1}, 2)}, {}},
                   [&](Tape& t, Inputs x) { return where(t, condition, x[0], x[1]); });
  // What is not chosen may be anything.
  Tape tape(*backend);
  const Var bad = tape.input(tensor_of(*backend, {3}, {NAN, INFINITY, 2})), zero = tape.input(backend->zeros({1}));
  EXPECT_EQ(values_of(*backend, where(tape, numbers({3}, {0, 0, 1}), bad, zero).value()),
            (std::vector<float>{0, 0, 2}));
}

TEST_F(Layout, Matmul) {
  struct Case {
    Shape a, b, c;
    Turned turned = {};
  };
  const Case cases[] = {
      {{2, 3}, {3, 4}, {2, 4}},
      {{1, 1}, {1, 1}, {1, 1}},
      {{5, 2, 3}, {5, 3, 4}, {5, 2, 4}},
      {{2, 2, 2, 3}, {3, 4}, {2, 2, 2, 4}},
      {{2, 1, 2, 3}, {3, 3, 4}, {2, 3, 2, 4}},
      {{2, 3}, {4, 3, 2}, {4, 2, 2}},
      {{3, 3, 2}, {3, 3, 4}, {3, 2, 4}, {.a = true}},
      {{3, 2, 3}, {3, 4, 3}, {3, 2, 4}, {.b = true}},
      {{3, 3, 2}, {3, 4, 3}, {3, 2, 4}, {.a = true, .b = true}},
      {{3, 2}, {4, 3}, {2, 4}, {.a = true, .b = true}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(to_string(c.a) + to_string(c.b));
    const Tensor a = random(c.a, 1), b = random(c.b, 2);
    expect_gradients({{a, b}, {}}, [&](Tape& t, Inputs x) { return matmul(t, x[0], x[1], c.turned); });
    Tape tape(*backend);
    const Var y = matmul(tape, tape.input(a), tape.input(b), c.turned);
    ASSERT_EQ(y.shape(), c.c);
    const auto of_a = values_of(*backend, a), of_b = values_of(*backend, b), of_y = values_of(*backend, y.value());
    // The element at `index` of x with its last axes (row, column), leading axes of one index repeated.
    const auto at = [](const Shape& shape, const std::vector<float>& values, const Index& index, std::int64_t row,
                       std::int64_t column, bool turned) {
      Index inside(static_cast<std::size_t>(shape.size()));
      for (int axis = 0; axis + 2 < shape.size(); ++axis)
        inside[static_cast<std::size_t>(axis)] =
            shape[axis] == 1 ? 0 : index[index.size() - static_cast<std::size_t>(shape.size() - axis)];
      inside[inside.size() - 2] = turned ? column : row;
      inside[inside.size() - 1] = turned ? row : column;
      return static_cast<double>(values[place(shape, inside)]);
    };
    const std::int64_t depth = c.a[c.a.size() - (c.turned.a ? 2 : 1)];
    for_indices(c.c, [&](const Index& index) {
      const std::int64_t row = index[index.size() - 2], column = index[index.size() - 1];
      double sum = 0;
      for (std::int64_t k = 0; k < depth; ++k)
        sum += at(c.a, of_a, index, row, k, c.turned.a) * at(c.b, of_b, index, k, column, c.turned.b);
      ASSERT_NEAR(of_y[place(c.c, index)], sum, 1e-5);
    });
  }
  // Products without terms, and none.
  Tape tape(*backend);
  const auto zeros = [&](const Shape& shape) { return tape.input(backend->zeros(shape)); };
  EXPECT_EQ(values_of(*backend, matmul(tape, zeros({2, 2, 0}), zeros({2, 0, 1})).value()),
            (std::vector<float>(4, 0.0f)));
  EXPECT_EQ(matmul(tape, zeros({0, 2, 3}), zeros({3, 1})).shape(), (Shape{0, 2, 1}));
  EXPECT_EQ(matmul(tape, zeros({0, 2, 3}), zeros({0, 3, 1})).shape(), (Shape{0, 2, 1}));
  EXPECT_REFUSED("matmul of f32 [2, 3] and f32 [4, 2]",
                 matmul(refused, refused.input(random({2, 3}, 1)), refused.input(random({4, 2}, 1))));
  EXPECT_REFUSED("matmul of f32 [3]", matmul(refused, refused.input(random({3}, 1)), refused.input(random({3, 2}, 1))));
  EXPECT_REFUSED("matmul of f32 [2, 2, 3] and f32 [3, 3, 2]",
                 matmul(refused, refused.input(random({2, 2, 3}, 1)), refused.input(random({3, 3, 2}, 1))));
}

TEST_F(Gradient, Variable) {
  const auto p = weights({3, 4}, 1);
  expect_gradients({{random({2, 3, 4}, 2)}, {p.get()}}, [&](Tape& t, Inputs x) {
    const Var v = variable(t, *p);
    return add(t, mul(t, x[0], v), square(t, variable(t, *p)));  // twice: both contribute
  });
  p->set_requires_grad(false);
  expect_gradients({{random({2, 3, 4}, 2)}, {p.get()}},
                   [&](Tape& t, Inputs x) { return mul(t, x[0], variable(t, *p)); });
}

TEST_F(Gradient, RmsNorm) {
  const auto gamma = weights({5}, 1);
  for (const Shape& shape : {Shape{5}, {3, 5}, {2, 2, 5}})
    expect_gradients({{random(shape, 2)}, {gamma.get()}},
                     [&](Tape& t, Inputs x) { return rms_norm(t, x[0], *gamma, 1e-2); });
}

TEST_F(Gradient, GroupNorm) {
  const auto gamma = weights({6}, 1), beta = weights({6}, 2);
  for (const Shape& shape : {Shape{3, 6}, {2, 3, 6}, {2, 2, 3, 6}, {0, 3, 6}})
    for (const std::int64_t groups : {1, 2, 3})
      expect_gradients({{random(shape, 3)}, {gamma.get(), beta.get()}},
                       [&](Tape& t, Inputs x) { return group_norm(t, x[0], groups, *gamma, beta.get(), 1e-2); });
}

TEST_F(Gradient, Conv1d) {
  for (const std::int64_t kernel : {1, 3})
    for (const std::int64_t stride : {1, 2}) {
      const auto w = weights({4, kernel, 3}, 1), b = weights({4}, 2);
      expect_gradients({{random({2, 7, 3}, 3)}, {w.get(), b.get()}},
                       [&](Tape& t, Inputs x) { return conv1d(t, x[0], *w, b.get(), stride, kernel / 2); });
      expect_gradients({{random({2, 7, 6}, 3)}, {w.get(), b.get()}},
                       [&](Tape& t, Inputs x) { return conv1d(t, x[0], *w, b.get(), stride, kernel / 2, 2); });
    }
}

TEST_F(Gradient, ConvTranspose2d) {
  struct Case {
    Window window;
    std::array<std::int64_t, 2> output_padding = {0, 0};
    bool bias = true;
  };
  for (const Case& c : {Case{{{3, 3}, {1, 1}, {1, 1}}}, Case{{{3, 3}, {2, 2}, {1, 1}}, {1, 1}},
                        Case{{{2, 2}, {2, 2}, {0, 0}}, {0, 0}, false}, Case{{{4, 2}, {2, 1}, {1, 0}}, {1, 0}}}) {
    const auto w = weights({3, c.window.kernel[0], c.window.kernel[1], 2}, 1), b = weights({2}, 2);
    std::vector<Parameter*> parameters = {w.get()};
    if (c.bias) parameters.push_back(b.get());
    expect_gradients({{random({2, 3, 4, 3}, 3)}, parameters}, [&](Tape& t, Inputs x) {
      return conv_transpose2d(t, x[0], *w, c.bias ? b.get() : nullptr, c.window, c.output_padding);
    });
    const auto w_of_groups = weights({6, c.window.kernel[0], c.window.kernel[1], 2}, 1), b_of_groups = weights({6}, 2);
    expect_gradients({{random({2, 3, 4, 6}, 3)}, {w_of_groups.get(), b_of_groups.get()}}, [&](Tape& t, Inputs x) {
      return conv_transpose2d(t, x[0], *w_of_groups, b_of_groups.get(), c.window, c.output_padding, 3);
    });
  }
}

TEST_F(Gradient, Rotary) {
  const RotaryAngles angles(*backend, 9, 4);
  for (const std::int64_t first : {0, 5})
    expect_gradients({{random({2, 3, 12}, 1)}, {}}, [&](Tape& t, Inputs x) { return rotary(t, x[0], angles, first); });
  // Turned by the angles of their places, products depend on how far these are apart alone.
  Tape tape(*backend);
  const Tensor q = random({1, 1, 4}, 2), k = random({1, 1, 4}, 3);
  const auto product = [&](std::int64_t at_q, std::int64_t at_k) {
    const Var a = rotary(tape, tape.input(q), angles, at_q), b = rotary(tape, tape.input(k), angles, at_k);
    return values_of(*backend, sum_over(tape, mul(tape, a, b), {}).value())[0];
  };
  EXPECT_NEAR(product(5, 3), product(2, 0), 1e-5f);
  EXPECT_NEAR(product(8, 8), product(0, 0), 1e-5f);
}

// Numbers hang on the place in the global batch alone: of two ranks' halves they are those of the whole.
TEST_F(Gradient, Randn) {
  const auto drawn = [&](std::int64_t first, std::int64_t samples, std::int64_t step, std::int64_t layer) {
    Tape tape(*backend);
    const std::array<std::int64_t, 3> state = {11, step, first};
    tape.set_dropout_state(backend->from_host(state.data(), {3}, DType::kI64));
    return values_of(*backend, randn(tape, {samples, 3, 5}, layer).value());
  };
  const auto whole = drawn(0, 4, 7, 1), half = drawn(2, 2, 7, 1);
  EXPECT_EQ(std::vector(whole.begin() + 30, whole.end()), half);
  EXPECT_NE(whole, drawn(0, 4, 8, 1));
  EXPECT_NE(whole, drawn(0, 4, 7, 2));
  const auto many = drawn(0, 4000, 1, 0);
  double sum = 0, squares = 0, cubes = 0, fourths = 0;
  for (const double x : many) {
    sum += x;
    squares += x * x;
    cubes += x * x * x;
    fourths += x * x * x * x;
  }
  const auto n = static_cast<double>(many.size());  // 60,000: four standard errors each
  EXPECT_NEAR(sum / n, 0.0, 4.0 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1.0, 4.0 * std::sqrt(2.0 / n));
  EXPECT_NEAR(cubes / n, 0.0, 4.0 * std::sqrt(15.0 / n));
  EXPECT_NEAR(fourths / n, 3.0, 4.0 * std::sqrt(96.0 / n));
  Tape tape(*backend);
  EXPECT_REFUSED("randn on a tape that knows no seed and step", randn(tape, {2}, 0));
}

}  // namespace
}  // namespace lockstep::nn
