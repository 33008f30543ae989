// Fully connected layers on CUDA against the CPU's.
#include "base/error.h"
#include "tests/nn/cuda/sums.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class CudaLinear : public DeviceTest {
 protected:
  Tensor saved_preactivation_of(Epilogue epilogue, std::int64_t n, std::int64_t out) {
    const SavedPreactivation saved_preactivation = linear->saved_preactivation_of(epilogue, n, out, type());
    return Tensor::empty(allocator, saved_preactivation.shape, saved_preactivation.dtype);
  }

  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
  std::unique_ptr<LinearKernels> linear = cuda::make_linear_kernels(context, *pointwise);
};

struct LinearSizes {
  std::int64_t n, in, out;
};
// Every combination of one, odd and even; what the models have; and nothing.
std::vector<LinearSizes> all_sizes() {
  std::vector<LinearSizes> all = {{16, 784, 128}, {64, 128, 10}, {9, 3136, 33}, {200, 48, 66}, {0, 7, 5}};
  for (const std::int64_t n : {1, 3, 16})
    for (const std::int64_t in : {1, 5, 17, 32})
      for (const std::int64_t out : {1, 3, 24}) all.push_back({n, in, out});
  return all;
}

TEST_P(CudaLinear, Forward) {
  for (const auto& [n, in, out] : all_sizes()) {
    SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
    const Tensor x_host = random({n, in}, 1), w_host = random({out, in}, 2), b_host = random({out}, 3);
    const Tensor x = activation(x_host), w = activation(w_host), b = activation(b_host);
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu, Epilogue::kGelu})
      for (const bool bias : {false, true}) {
        const auto expected = expected_layer(*cpu, x_host, w_host, bias ? b_host : Tensor(), epilogue, type());
        const auto got = results({activation_like({n, out})}, [&](const auto& made) {
          linear->forward(x, w, bias ? b : Tensor(), epilogue, made[0]);
        });
        expect_close(expected.y, got[0], tolerance_of_sum(in, type()), expected.rounded_before);
      }
  }
}

TEST_P(CudaLinear, BackwardInput) {
  for (const auto& [n, in, out] : all_sizes()) {
    SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
    const Operand dy = activations(random({n, out}, 1)), w = activations(random({out, in}, 2));
    compare(cpu->linear(), *linear, {activation_like({n, in})}, {tolerance_of_sum(out, type())},
            [&](auto& on, Side at, const auto& made) { on.backward_input(at(dy), at(w), made[0]); });
  }
}

TEST_P(CudaLinear, Multiply) {
  struct Sizes {
    std::int64_t batch, rows, depth, columns;
  };
  for (const auto& [batch, rows, depth, columns] :
       {Sizes{1, 1, 1, 1}, Sizes{3, 5, 7, 4}, Sizes{2, 16, 32, 24}, Sizes{5, 1, 17, 3}, Sizes{1, 33, 8, 9},
        Sizes{0, 2, 3, 4}, Sizes{2, 3, 0, 4}, Sizes{2, 0, 3, 4}})
    for (const bool a_turned : {false, true})
      for (const bool b_turned : {false, true}) {
        SCOPED_TRACE(fmt::format("{} of {} by {} by {}{}{}", batch, rows, depth, columns, a_turned ? ", a turned" : "",
                                 b_turned ? ", b turned" : ""));
        const Operand a = activations(random(a_turned ? Shape{batch, depth, rows} : Shape{batch, rows, depth}, 1));
        const Operand b =
            activations(random(b_turned ? Shape{batch, columns, depth} : Shape{batch, depth, columns}, 2));
        compare(cpu->linear(), *linear, {activation_like({batch, rows, columns})}, {tolerance_of_sum(depth, type())},
                [&](auto& on, Side at, const auto& made) { on.multiply(at(a), a_turned, at(b), b_turned, made[0]); });
      }
}

TEST_P(CudaLinear, BackwardWeight) {
  for (const auto& [n, in, out] : all_sizes())
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(fmt::format("n {} in {} out {} accumulate {}", n, in, out, accumulate));
      const Operand x = activations(random({n, in}, 1)), dy = activations(random({n, out}, 2));
      compare(cpu->linear(), *linear, {{{out, in}, DType::kF32, random_tensor(*cpu, {out, in}, 3)}},
              {tolerance_of_sum(n, DType::kF32)},
              [&](auto& on, Side at, const auto& made) { on.backward_weight(at(x), at(dy), accumulate, made[0]); });
    }
}

TEST_P(CudaLinear, BackwardBias) {
  for (const auto& [n, in, out] : all_sizes())
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(fmt::format("n {} out {} accumulate {}", n, out, accumulate));
      const Operand dy = activations(random({n, out}, 1));
      compare(cpu->linear(), *linear, {{{out}, DType::kF32, random_tensor(*cpu, {out}, 2)}},
              {tolerance_of_sum(n, DType::kF32)},
              [&](auto& on, Side at, const auto& made) { on.backward_bias(at(dy), accumulate, made[0]); });
    }
}

TEST_P(CudaLinear, BackwardWeightAndBias) {
  for (const auto& [n, in, out] : all_sizes())
    for (const bool add_weight : {false, true})
      for (const bool add_bias : {false, true}) {
        SCOPED_TRACE(fmt::format("n {} in {} out {} accumulate {} {}", n, in, out, add_weight, add_bias));
        const Operand x = activations(random({n, in}, 1)), dy = activations(random({n, out}, 2));
        const Tensor dw_before = random_tensor(*cpu, {out, in}, 3), db_before = random_tensor(*cpu, {out}, 4);
        compare(cpu->linear(), *linear, {{{out, in}, DType::kF32, dw_before}, {{out}, DType::kF32, db_before}},
                {tolerance_of_sum(n, DType::kF32), tolerance_of_sum(n, DType::kF32)},
                [&](auto& on, Side at, const auto& made) {
                  on.backward_weight_and_bias(at(x), at(dy), add_weight, made[0], add_bias, made[1]);
                });
      }
}

// Also where the kernel was chosen, and tried, for sound numbers before. See Note [Probing ReLU].
TEST_P(CudaLinear, ReluLeavesNanAndInfinity) {
  for (const auto& [n, in, out] : {LinearSizes{3, 5, 7}, LinearSizes{64, 128, 256}, LinearSizes{130, 64, 65}}) {
    SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
    const Tensor x_host = random({n, in}, 1), w_host = random({out, in}, 2), b_host = random({out}, 3);
    const Tensor w = activation(w_host), b = activation(b_host);
    const auto forward = [&] {
      const Tensor x = activation(x_host);
      return results({activation_like({n, out})},
                     [&](const auto& made) { linear->forward(x, w, b, Epilogue::kRelu, made[0]); })[0];
    };
    forward();
    x_host.f32()[0] = kNaN;
    x_host.f32()[(n - 1) * in] = kInfinity;
    const auto expected = expected_layer(*cpu, x_host, w_host, b_host, Epilogue::kRelu, type());
    const Tensor got = forward();
    ASSERT_TRUE(std::isnan(expected.y.f32()[0]) && std::isnan(expected.y.f32()[out - 1]));
    expect_close(expected.y, got, tolerance_of_sum(in, type()), expected.rounded_before);
  }
}

// A ReLU's result with its mask, and the gradient of what reads it next through the ReLU.
TEST_P(CudaLinear, ReluSavedPreactivation) {
  for (const auto& [n, in, out] : all_sizes()) {
    SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
    const std::int64_t next = 9;
    const Tensor x_host = random({n, in}, 1), w_host = random({out, in}, 2), b_host = random({out}, 3);
    const Tensor x = activation(x_host), w = activation(w_host), b = activation(b_host);
    const Tensor dy_host = random({n, next}, 4), v_host = random({next, out}, 5);
    const Tensor dy = activation(dy_host), v = activation(v_host);
    const Tensor mask = saved_preactivation_of(Epilogue::kRelu, n, out);
    const auto expected = expected_layer(*cpu, x_host, w_host, b_host, Epilogue::kRelu, type());
    const Tensor dx_expected = cpu->empty({n, out});
    cpu->linear().backward_input(dy_host, v_host, dx_expected);
    const auto got = results({activation_like({n, out}), activation_like({n, out})}, [&](const auto& made) {
      linear->forward_saved_preactivation(x, w, b, Epilogue::kRelu, made[0], mask);
      linear->backward_input_through(dy, v, Epilogue::kRelu, mask, made[1]);
    });
    const Tolerance tolerance = tolerance_of_sum(in, type());
    expect_close(expected.y, got[0], tolerance, expected.rounded_before);
    for (std::int64_t i = 0; i < n * out; ++i) {
      const auto a = static_cast<double>(expected.preactivation.f32()[i]);
      // What rounding may bring to 0 may pass the gradient or not: cuBLASLt's masks have 1 for a 0.
      const bool unsure = std::abs(a) <= most_off(tolerance, a, static_cast<double>(expected.rounded_before.f32()[i]));
      if (unsure ? got[1].f32()[i] == 0.0f : a < 0.0) dx_expected.f32()[i] = 0.0f;
    }
    expect_close(dx_expected, got[1], tolerance_of_sum(next, type()));
  }
}

// GELU's result with what it was taken of, and the gradient of what reads it next through the GELU.
TEST_P(CudaLinear, GeluSavedPreactivation) {
  for (const auto& [n, in, out] : all_sizes()) {
    if (out % 8 != 0) {
      EXPECT_EQ(linear->saved_preactivation_of(Epilogue::kGelu, n, out, type()).shape.count(), 0);
      continue;
    }
    SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
    const std::int64_t next = 9;
    const Tensor x_host = random({n, in}, 1), w_host = random({out, in}, 2), b_host = random({out}, 3);
    const Tensor x = activation(x_host), w = activation(w_host), b = activation(b_host);
    const Tensor dy_host = random({n, next}, 4), v_host = random({next, out}, 5);
    const Tensor dy = activation(dy_host), v = activation(v_host);
    const Tensor dx = cpu->empty({n, out}), through = cpu->empty({n, out});
    cpu->linear().backward_input(dy_host, v_host, dx);
    for (const bool bias : {true, false}) {
      const Tensor b_used = bias ? b_host : Tensor();
      const auto sums = expected_layer(*cpu, x_host, w_host, b_used, Epilogue::kNone, type());
      const auto expected = expected_layer(*cpu, x_host, w_host, b_used, Epilogue::kGelu, type());
      const Output like = activation_like({n, out});
      const auto got = results({like, like, like}, [&](const auto& made) {
        const Tensor saved_preactivation = saved_preactivation_of(Epilogue::kGelu, n, out);
        linear->forward_saved_preactivation(x, w, bias ? b : Tensor(), Epilogue::kGelu, made[0], saved_preactivation);
        linear->backward_input_through(dy, v, Epilogue::kGelu, saved_preactivation, made[1]);
        pointwise->copy(saved_preactivation, made[2]);
      });
      expect_close(sums.y, got[2], tolerance_of_sum(in, type()), sums.rounded_before);
      expect_close(expected.y, got[0], tolerance_of_sum(in, type()), expected.rounded_before);
      // In 16 bits the sums that are multiplied with its slope may be rounded before.
      Tolerance tolerance = tolerance_of_sum(in + next, type());
      if (is_half(type())) tolerance = {type(), 0x1p16 * finer_than_bf16(type()), 4.0};
      cpu->pointwise().unary_backward(UnaryOp::kGeluTanh, got[2], {}, dx, through);
      expect_close(through, got[1], tolerance);
    }
  }
}

// Logits and their gradient have a pitch (Note [Pitch]).
TEST_P(CudaLinear, RowsThatLieApart) {
  for (const auto& [n, in, out] : {LinearSizes{3, 8, 7}, LinearSizes{1, 5, 65}, LinearSizes{33, 40, 257}}) {
    SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
    const Tensor x_host = random({n, in}, 1), w_host = random({out, in}, 2), b_host = random({out}, 3);
    const Tensor dy_host = random({n, out}, 4);
    const Tensor x = activation(x_host), w = activation(w_host), b = activation(b_host);
    const Tensor apart_dy = apart(dy_host);
    ASSERT_EQ(apart_dy.pitch() * static_cast<std::int64_t>(size_of(type())) % 16, 0);
    for (const bool bias : {false, true}) {
      const Tensor y = apart_like({n, out});
      const auto expected = expected_layer(*cpu, x_host, w_host, bias ? b_host : Tensor(), Epilogue::kNone, type());
      linear->forward(x, w, bias ? b : Tensor(), Epilogue::kNone, y);
      expect_close(expected.y, joined(y), tolerance_of_sum(in, type()), expected.rounded_before);
    }
    const Operand x_of_both = {x_host, x}, w_of_both = {w_host, w}, dy = {dy_host, apart_dy};
    compare(cpu->linear(), *linear, {activation_like({n, in}), {{out, in}}, {{out}}},
            {tolerance_of_sum(out, type()), tolerance_of_sum(n, DType::kF32), tolerance_of_sum(n, DType::kF32)},
            [&](auto& on, Side at, const auto& made) {
              on.backward_input(at(dy), at(w_of_both), made[0]);
              on.backward_weight(at(x_of_both), at(dy), false, made[1]);
              on.backward_bias(at(dy), false, made[2]);
            });
  }
}

// A plan for each shape, type and epilogue; then nothing is built, and no memory is asked for.
TEST_P(CudaLinear, SteadyStateBuildsNothing) {
  const Tensor x = activation(random({16, 32}, 1)), w = activation(random({24, 32}, 2)),
               b = activation(random({24}, 3));
  const Tensor y = activation(random({16, 24}, 4)), dx = activation(random({16, 32}, 5));
  const Tensor dw = plain(random_tensor(*cpu, {24, 32}, 6)), db = plain(random_tensor(*cpu, {24}, 7));
  const Tensor mask = saved_preactivation_of(Epilogue::kRelu, 16, 32),
               saved_preactivation = saved_preactivation_of(Epilogue::kGelu, 16, 32);
  const auto step = [&] {
    linear->forward(x, w, b, Epilogue::kRelu, y);
    linear->forward(x, w, b, Epilogue::kNone, y);
    linear->forward_saved_preactivation(x, w, b, Epilogue::kRelu, y, saved_preactivation_of(Epilogue::kRelu, 16, 24));
    linear->forward_saved_preactivation(x, w, b, Epilogue::kGelu, y, saved_preactivation_of(Epilogue::kGelu, 16, 24));
    linear->backward_input(y, w, dx);
    linear->backward_input_through(y, w, Epilogue::kRelu, mask, dx);
    linear->backward_input_through(y, w, Epilogue::kGelu, saved_preactivation, dx);
    linear->backward_weight(x, y, false, dw);
    linear->backward_weight(x, y, true, dw);
    linear->backward_bias(y, true, db);
  };
  const std::uint64_t none = context.primitives_created;
  step();
  const std::uint64_t plans = context.primitives_created, pieces = allocator.stats().system_allocations;
  EXPECT_GE(plans, none + 5);
  step();
  EXPECT_EQ(context.primitives_created, plans);
  EXPECT_EQ(allocator.stats().system_allocations, pieces);
}

INSTANTIATE_TEST_SUITE_P(Types, CudaLinear, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
