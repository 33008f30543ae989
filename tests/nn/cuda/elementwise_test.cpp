// CUDA's elementwise kernels against the CPU's.
#include <array>

#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

// Around what a block does: 1024.
constexpr std::int64_t kLengths[] = {0, 1, 3, 255, 1023, 1024, 1025, 20005};
constexpr UnaryOp kUnary[] = {UnaryOp::kAbs, UnaryOp::kExp, UnaryOp::kLog,  UnaryOp::kSqrt,    UnaryOp::kSquare,
                              UnaryOp::kSin, UnaryOp::kCos, UnaryOp::kTanh, UnaryOp::kSigmoid, UnaryOp::kSoftplus};
constexpr BinaryOp kBinary[] = {BinaryOp::kSub, BinaryOp::kMul, BinaryOp::kDiv, BinaryOp::kMin, BinaryOp::kMax};

class CudaElementwise : public DeviceTest {
 protected:
  // Positive where logarithms and roots are asked for; with NaN and infinities where there is enough.
  Tensor values(std::int64_t n, std::uint64_t seed, float shift) {
    const Tensor host = random_tensor(*cpu, {n}, seed);
    cpu->elementwise().affine(host, 1.0f, shift, host);
    if (n > 1000) host.f32()[n - 2] = kNaN, host.f32()[n / 2] = kInfinity, host.f32()[7] = 0.0f, host.f32()[9] = 90.0f;
    return host;
  }
  static float shift_for(UnaryOp op) { return op == UnaryOp::kLog || op == UnaryOp::kSqrt ? 1.5f : 0.0f; }

  std::unique_ptr<ElementwiseKernels> elementwise = cuda::make_elementwise_kernels(context);
};

TEST_P(CudaElementwise, Unary) {
  for (const UnaryOp op : kUnary)
    for (const std::int64_t n : kLengths) {
      const Tensor x_host = values(n, 1, shift_for(op)), dy_host = random_tensor(*cpu, {n}, 2),
                   y_host = cpu->empty({n});
      const Tensor dx_host = cpu->empty({n});
      cpu->elementwise().unary(op, x_host, y_host);
      cpu->elementwise().unary_backward(op, x_host, y_host, dy_host, dx_host);
      const Tensor x = on_device(x_host, DType::kF32, GetParam().offset), dy = plain(dy_host), y_device = plain(y_host);
      const auto y = results({{{n}}}, [&](const auto& out) { elementwise->unary(op, x, out[0]); });
      expect_close(y_host, y[0], {DType::kF32, 4.0});
      const auto dx =
          results({{{n}}}, [&](const auto& out) { elementwise->unary_backward(op, x, y_device, dy, out[0]); });
      expect_close(dx_host, dx[0], {DType::kF32, 4.0});
    }
}

TEST_P(CudaElementwise, Binary) {
  for (const BinaryOp op : kBinary)
    for (const std::int64_t n : kLengths) {
      const Tensor x_host = values(n, 1, 0.0f), y_host = values(n, 2, 2.0f), dz_host = random_tensor(*cpu, {n}, 3);
      const Tensor z_host = cpu->empty({n}), dx_host = cpu->empty({n}), dy_host = cpu->empty({n});
      cpu->elementwise().binary(op, x_host, y_host, z_host);
      cpu->elementwise().binary_backward(op, x_host, y_host, dz_host, dx_host, dy_host);
      const Tensor x = on_device(x_host, DType::kF32, GetParam().offset), y = plain(y_host), dz = plain(dz_host);
      const auto z = results({{{n}}}, [&](const auto& out) { elementwise->binary(op, x, y, out[0]); });
      expect_close(z_host, z[0], {DType::kF32, 2.0});
      const auto both =
          results({{{n}}, {{n}}}, [&](const auto& out) { elementwise->binary_backward(op, x, y, dz, out[0], out[1]); });
      expect_close(dx_host, both[0], {DType::kF32, 4.0});
      expect_close(dy_host, both[1], {DType::kF32, 4.0});
      const auto first =
          results({{{n}}}, [&](const auto& out) { elementwise->binary_backward(op, x, y, dz, out[0], {}); });
      expect_same(both[0], first[0]);
      const auto second =
          results({{{n}}}, [&](const auto& out) { elementwise->binary_backward(op, x, y, dz, {}, out[0]); });
      expect_same(both[1], second[0]);
    }
}

TEST_P(CudaElementwise, Affine) {
  for (const std::int64_t n : kLengths) {
    const Tensor x_host = values(n, 1, 0.0f), y_host = cpu->empty({n});
    cpu->elementwise().affine(x_host, -1.5f, 0.25f, y_host);
    const Tensor x = on_device(x_host, DType::kF32, GetParam().offset);
    const auto y = results({{{n}}}, [&](const auto& out) { elementwise->affine(x, -1.5f, 0.25f, out[0]); });
    expect_close(y_host, y[0], {DType::kF32, 2.0});
  }
}

TEST_P(CudaElementwise, Rows) {
  for (const auto& [rows, columns] : {std::array<std::int64_t, 2>{0, 3}, {1, 1}, {5, 7}, {3, 1000}, {1500, 2}}) {
    const Tensor x_host = random_tensor(*cpu, {rows, columns}, 1), sums_host = cpu->empty({rows});
    const Tensor broadcast_host = cpu->empty({rows, columns});
    cpu->elementwise().sum_rows(x_host, sums_host);
    cpu->elementwise().broadcast_rows(sums_host, broadcast_host);
    const Tensor x = on_device(x_host, DType::kF32, GetParam().offset), sums = plain(sums_host);
    const auto got = results({{{rows}}}, [&](const auto& out) { elementwise->sum_rows(x, out[0]); });
    expect_close(sums_host, got[0], {DType::kF32, 1.0});
    const auto broadcast =
        results({{{rows, columns}}}, [&](const auto& out) { elementwise->broadcast_rows(sums, out[0]); });
    expect_same(broadcast_host, broadcast[0]);
  }
}

TEST_P(CudaElementwise, Total) {
  for (const std::int64_t n :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{1023}, std::int64_t{5000}, std::int64_t{2000001}}) {
    const Tensor x_host = random_tensor(*cpu, {n}, 1), totals = cpu->empty({2});
    cpu->elementwise().total(x_host, totals);
    const Tensor x = on_device(x_host, DType::kF32, GetParam().offset);
    const auto got = results({{{2}}}, [&](const auto& out) { elementwise->total(x, out[0]); });
    EXPECT_NEAR(totals.f32()[0], got[0].f32()[0], 1e-6f * std::abs(totals.f32()[0]));
    EXPECT_TRUE(std::isnan(got[0].f32()[1]));
    EXPECT_TRUE(std::isnan(totals.f32()[1]));
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaElementwise, ::testing::Values(DeviceCase{DType::kF32, 0}, DeviceCase{DType::kF32, 1}),
                         name_of_case);

}  // namespace
}  // namespace lockstep::nn
