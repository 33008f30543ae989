// Products whose number of outputs is no multiple of 8 (Note [Odd sizes]) against the CPU's.
#include "nn/ops/cuda/odd_sizes.h"
#include "tests/nn/cuda/sums.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class CudaOddSizes : public DeviceTest {
 protected:
  /// With zeros after its last row, as Backend::empty_parameter() makes it.
  Tensor parameter(const Tensor& host) {
    const std::int64_t rows = host.size(0);
    const std::int64_t more = cuda::pitch_of_rows(rows, static_cast<std::int64_t>(size_of(type()))) - rows;
    Shape whole = host.shape();
    whole[0] += more;
    const Tensor padded = cpu->zeros(whole);
    std::copy_n(host.f32(), host.count(), padded.f32());
    return on_device(padded, type(), 0).slice(0, rows).with_zero_rows(more);
  }

  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
  std::unique_ptr<LinearKernels> linear = cuda::make_linear_kernels(context, *pointwise);
};

// Between the rows of dy is NaN: what is not cleared there shows in dx. The last weight's gradient is made in two
// parts.
TEST_P(CudaOddSizes, AreComputedWithZeros) {
  struct Sizes {
    std::int64_t n, in, out;
  };
  for (const auto& [n, in, out] : {Sizes{3, 8, 7}, Sizes{1, 5, 65}, Sizes{33, 40, 257}, Sizes{6, 24, 1091}}) {
    SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
    const Tensor w_host = random({out, in}, 2), b_host = random({out}, 3), dy_host = random({n, out}, 4);
    const Tensor before = random_tensor(*cpu, {out, in}, 5), b = parameter(b_host);
    const Operand x = activations(random({n, in}, 1)), w = {w_host, parameter(w_host)}, dy = {dy_host, apart(dy_host)};
    for (const bool bias : {false, true}) {
      const ExpectedLayer expected =
          expected_layer(*cpu, x.host, w.host, bias ? b_host : Tensor(), Epilogue::kNone, type());
      const Tensor y = apart_like({n, out});
      linear->forward(x.device, w.device, bias ? b : Tensor(), Epilogue::kNone, y);
      expect_close(expected.y, joined(y, std::nullopt), tolerance_of_sum(in, type()), expected.rounded_before);
    }
    compare(cpu->linear(), *linear,
            {activation_like({n, in}), {{out, in}}, {{out, in}, DType::kF32, before}, {{out, in}}, {{out}}},
            {tolerance_of_sum(out, type()), tolerance_of_sum(n, DType::kF32), tolerance_of_sum(n + 1, DType::kF32),
             tolerance_of_sum(n, DType::kF32), tolerance_of_sum(n, DType::kF32)},
            [&](auto& on, Side at, const auto& made) {
              on.backward_input(at(dy), at(w), made[0]);
              on.backward_weight(at(x), at(dy), false, made[1]);
              on.backward_weight(at(x), at(dy), true, made[2]);
              on.backward_weight_and_bias(at(x), at(dy), false, made[3], false, made[4]);
            });
  }
}

// With enough work, rows of an odd number of inputs are copied to even ones, and back.
TEST_P(CudaOddSizes, InputsAreCopied) {
  if (GetParam().offset > 0) return;  // what is copied lies well wherever it comes from
  constexpr std::int64_t kN = 2048, kIn = 33, kOut = 8192;
  static_assert(cuda::copies_inputs(kN, kIn, kOut));
  const Tensor x_host = random({kN, kIn}, 1), w_host = random({kOut, kIn}, 2), dy_host = random({kN, kOut}, 3);
  const Tensor before = random_tensor(*cpu, {kOut, kIn}, 4);
  const Tensor x = activation(x_host), w = activation(w_host), dy = activation(dy_host);
  const Tensor y = cpu->empty({kN, kOut}), dx = cpu->empty({kN, kIn}), sum = cpu->empty({kOut, kIn});
  cpu->linear().forward(x_host, w_host, {}, Epilogue::kNone, y);
  cpu->linear().backward_input(dy_host, w_host, dx);
  cpu->pointwise().copy(before, sum);
  cpu->linear().backward_weight(x_host, dy_host, true, sum);
  const Tensor made_y = activation(cpu->zeros(y.shape())), made_dx = activation(cpu->zeros(dx.shape()));
  const Tensor made_sum = plain(before);
  linear->forward(x, w, {}, Epilogue::kNone, made_y);
  linear->backward_input(dy, w, made_dx);
  linear->backward_weight(x, dy, true, made_sum);
  expect_close(y, on_host(download(made_y), activation_like(y.shape())), tolerance_of_sum(kIn, type()));
  expect_close(dx, on_host(download(made_dx), activation_like(dx.shape())), tolerance_of_sum(kOut, type()));
  expect_close(sum, on_host(download(made_sum), {sum.shape()}), tolerance_of_sum(kN, DType::kF32));
}

// Columns of something larger: what lies between their rows is others'.
TEST_P(CudaOddSizes, ColumnsOfOthersStayAsTheyAre) {
  constexpr std::int64_t kN = 4, kIn = 6, kOut = 7, kAll = 16;
  const Tensor x_host = random({kN, kIn}, 1), w_host = random({kOut, kIn}, 2), whole_host = random({kN, kAll}, 3);
  const Tensor x = activation(x_host), w = parameter(w_host), whole = activation(whole_host);
  Tensor expected = cpu->empty({kN, kOut}), all = cpu->empty({kN, kAll});
  cpu->linear().forward(x_host, w_host, {}, Epilogue::kNone, expected);
  linear->forward(x, w, {}, Epilogue::kNone, whole.columns(0, kOut));
  const Tensor widened = on_device(cpu->zeros({kN, kAll}), DType::kF32, 0);
  pointwise->cast(whole, widened);
  const auto bytes = download(widened);
  std::memcpy(all.f32(), bytes.data(), bytes.size());
  for (std::int64_t r = 0; r < kN; ++r)
    for (std::int64_t c = kOut; c < kAll; ++c)
      EXPECT_EQ(all.f32()[r * kAll + c], whole_host.f32()[r * kAll + c]) << "row " << r << ", column " << c;
}

INSTANTIATE_TEST_SUITE_P(Types, CudaOddSizes, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
