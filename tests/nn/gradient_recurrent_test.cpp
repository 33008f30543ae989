// The differentiable operators of recurrent layers, beside gradient_test.cpp.
#include <gtest/gtest.h>

#include <array>

#include "tests/nn/gradient_check.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

TEST_F(Gradient, Rnn) {
  struct Case {
    Shape x;
    std::int64_t width;
    int frozen;  // a bit for each parameter
    bool begins, reverse, ragged;
  };
  for (const RnnCell cell : {RnnCell::kTanh, RnnCell::kRelu, RnnCell::kLstm, RnnCell::kGru})
    for (const auto& c : {Case{{1, 1, 1}, 1, 0, false, false, false}, Case{{2, 3, 5}, 7, 0, true, false, false},
                          Case{{3, 2, 4}, 17, 5, false, true, false}, Case{{2, 4, 3}, 2, 10, false, false, true},
                          Case{{2, 3, 2, 2}, 3, 15, true, false, false}, Case{{3, 4, 3}, 5, 0, true, true, true}}) {
      SCOPED_TRACE(fmt::format("{} of {}", static_cast<int>(cell), to_string(c.x)));
      const std::int64_t inputs = c.x.count() / (c.x[0] * c.x[1]), gates = gates_of(cell) * c.width;
      // ReLU's arguments stay away from 0, where its gradient jumps: half of the features are always positive.
      const auto make = [&](const Shape& shape, std::uint64_t seed) {
        auto values = values_of(*backend, random(shape, seed));
        for (std::size_t i = 0; i < values.size() && cell == RnnCell::kRelu; ++i)
          values[i] = shape.size() == 2 ? 0.1f * values[i] : i % 2 == 0 ? 1.5f : -1.5f;
        return parameter(tensor_of(*backend, shape, values));
      };
      const std::unique_ptr<Parameter> made[] = {make({gates, inputs}, 1), make({gates, c.width}, 2), make({gates}, 3),
                                                 make({gates}, 4)};
      std::vector<Parameter*> parameters;
      for (int i = 0; i < 4; ++i) {
        made[i]->set_requires_grad((c.frozen >> i & 1) == 0);
        parameters.push_back(made[i].get());
      }
      RnnState first;
      if (c.begins) first.h = random({c.x[0], c.width}, 6);
      if (c.begins && cell == RnnCell::kLstm) first.c = random({c.x[0], c.width}, 7);
      RnnOptions options = {.cell = cell, .reverse = c.reverse};
      if (c.ragged) {
        const std::array<std::int32_t, 3> lengths = {3, 1, 0};
        options.lengths = backend->empty({c.x[0]}, DType::kI32);
        backend->upload(std::as_bytes(std::span(lengths).first(static_cast<std::size_t>(c.x[0]))), options.lengths);
      }
      // Of sequences of different lengths not every device knows the last state.
      const bool hands_out = c.begins && (!c.ragged || cell != RnnCell::kLstm);
      expect_gradients({{random(c.x, 5)}, parameters}, [&](Tape& tape, Inputs x) {
        RnnState state = first;
        return rnn(tape, x[0], {*made[0], *made[1], made[2].get(), made[3].get()}, options,
                   hands_out ? &state : nullptr);
      });
    }
  // Twice on one tape: the second contribution is added. Without biases.
  const auto w_ih = weights({12, 3}, 1), w_hh = weights({12, 3}, 2);
  const RnnParameters shared = {*w_ih, *w_hh};
  expect_gradients({{random({2, 3, 3}, 5)}, {w_ih.get(), w_hh.get()}},
                   [&](Tape& tape, Inputs x) { return rnn(tape, rnn(tape, x[0], shared), shared); });
}

TEST_F(Gradient, ConcatLast) {
  for (const Shape& shape : {Shape{1, 1}, {2, 3}, {3, 1, 5}, {2, 4, 2}, {7}}) {
    SCOPED_TRACE(to_string(shape));
    expect_gradients({{random(shape, 3), random(shape, 4)}, {}}, [&](Tape& tape, Inputs x) {
      return concat(tape, {x[0], x[1]}, -1);
    });
  }
}

}  // namespace
}  // namespace lockstep::nn
