// Sums of columns, and what is added to rows.
#include "nn/ops/cuda/own_kernels.h"

#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class CudaBias : public DeviceTest {};

// One block; several; rows enough for partial sums; one column and more than a tile of packs.
const Shape kMatrices[] = {{0, 3},    {1, 1},     {5, 10},    {7, 64},   {100, 17},  {257, 32},
                           {4097, 1}, {3000, 24}, {1000, 65}, {64, 512}, {20011, 10}};

TEST_P(CudaBias, SumsOfColumns) {
  for (const Shape& shape : kMatrices)
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(to_string(shape));
      const Tensor host = random(shape, 1), before = random_tensor(*cpu, {shape[1]}, 2), x = activation(host);
      const Tensor expected = cpu->empty({shape[1]});
      for (std::int64_t c = 0; c < shape[1]; ++c) {
        double sum = accumulate ? static_cast<double>(before.f32()[c]) : 0.0;
        for (std::int64_t r = 0; r < shape[0]; ++r) sum += static_cast<double>(host.f32()[r * shape[1] + c]);
        expected.f32()[c] = static_cast<float>(sum);
      }
      const auto got = results({{{shape[1]}, DType::kF32, before}},
                               [&](const auto& out) { cuda::sum_columns(context, x, accumulate, out[0]); });
      // Of numbers below 1, in threads that have a few dozen each, and then tree by tree.
      expect_close(expected, got[0], {.ulps = 64.0});
    }
}

TEST_P(CudaBias, AddedToRows) {
  for (const Shape& shape : kMatrices) {
    SCOPED_TRACE(to_string(shape));
    const Tensor b_host = random({shape[1]}, 1), y_host = random(shape, 2), expected = cpu->empty(shape);
    for (std::int64_t i = 0; i < shape.count(); ++i) expected.f32()[i] = y_host.f32()[i] + b_host.f32()[i % shape[1]];
    const Tensor b = activation(b_host);
    const auto got =
        results({activation_like(shape, y_host)}, [&](const auto& out) { cuda::add_to_rows(context, b, out[0]); });
    expect_close(rounded(expected), got[0], {.ulps = 0.0});
  }
}

// Logits have a pitch (Note [Pitch]).
TEST_P(CudaBias, OfRowsThatLieApart) {
  for (const Shape& shape : kMatrices) {
    if (shape.count() == 0) continue;
    SCOPED_TRACE(to_string(shape));
    const Tensor b_host = random({shape[1]}, 1), y_host = random(shape, 2), expected = cpu->empty(shape);
    for (std::int64_t i = 0; i < shape.count(); ++i) expected.f32()[i] = y_host.f32()[i] + b_host.f32()[i % shape[1]];
    const Tensor y = apart(y_host), close = activation(y_host);
    const auto sums = results({{{shape[1]}}, {{shape[1]}}}, [&](const auto& out) {
      cuda::sum_columns(context, y, false, out[0]);
      cuda::sum_columns(context, close, false, out[1]);
    });
    expect_close(sums[1], sums[0], {.ulps = 64.0});  // how many columns a thread has decides on the order
    cuda::add_to_rows(context, activation(b_host), y);
    expect_close(rounded(expected), joined(y), {.ulps = 0.0});
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaBias, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
