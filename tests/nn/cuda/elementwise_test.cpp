// CUDA's elementwise kernels against the CPU's.
#include <array>

#include "tests/nn/cuda/device_values.h"
#include "tests/nn/elementwise_cases.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

// Around what a block does: 1024.
constexpr std::int64_t kLengths[] = {0, 1, 3, 255, 1023, 1024, 1025, 20005};

class CudaElementwise : public DeviceTest {
 protected:
  std::unique_ptr<ElementwiseKernels> elementwise = cuda::make_elementwise_kernels(context);
};

TEST_P(CudaElementwise, Affine) {
  for (const std::int64_t n : kLengths) {
    const Tensor x_host = with_odd_ones(random_tensor(*cpu, {n}, 1)), y_host = cpu->empty({n});
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
