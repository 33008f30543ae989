// CUDA's pooling against the CPU's. Maxima, choices and their gradients must be the same; averages may differ in their
// last bits.
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct PoolCase {
  Shape shape;
  Window window;

  Shape y_shape() const {
    return {shape[0], window.output_extent(0, shape[1]), window.output_extent(1, shape[2]), shape[3]};
  }
};

const PoolCase kPoolCases[] = {
    {{2, 8, 8, 8}, {{2, 2}, {2, 2}, {0, 0}}},      {{3, 9, 7, 16}, {{2, 2}, {2, 2}, {0, 0}}},
    {{2, 6, 4, 3}, {{2, 2}, {2, 2}, {0, 0}}},      {{1, 5, 6, 64}, {{2, 2}, {1, 1}, {0, 0}}},
    {{2, 9, 8, 24}, {{3, 3}, {2, 2}, {1, 1}}},     {{1, 3, 3, 17}, {{3, 3}, {1, 1}, {1, 1}}},
    {{1, 1, 1, 1}, {{1, 1}, {1, 1}, {0, 0}}},      {{1, 17, 17, 4}, {{2, 2}, {3, 3}, {0, 0}}},
    {{1, 33, 3, 7}, {{5, 3}, {4, 1}, {2, 0}}},     {{2, 7, 5, 300}, {{3, 2}, {2, 2}, {0, 0}}},
    {{2, 33, 17, 3}, {{17, 16}, {16, 1}, {0, 8}}},  // more than 255 elements
    {{1, 20, 18, 8}, {{18, 17}, {2, 1}, {3, 0}}},   // the same, in packs
    {{3, 7, 7, 40}, {{7, 7}, {1, 1}, {0, 0}}},      // global
    {{2, 4, 4, 1000}, {{4, 4}, {4, 4}, {0, 0}}},   {{2, 9, 9, 5}, {{5, 4}, {1, 2}, {2, 1}}},
    {{0, 8, 8, 8}, {{2, 2}, {2, 2}, {0, 0}}},      {{4, 16, 16, 33}, {{3, 3}, {3, 3}, {0, 0}}},
    {{300, 2, 2, 8}, {{2, 2}, {2, 2}, {0, 0}}},
};

class CudaPool : public DeviceTest {
 protected:
  std::unique_ptr<PoolKernels> pool = cuda::make_pool_kernels(context);
};

TEST_P(CudaPool, Max) {
  for (const auto& c : kPoolCases)
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu}) {
      SCOPED_TRACE(to_string(c.shape));
      const Tensor x_host = random(c.shape, 1), dy_host = random(c.y_shape(), 2);
      for (std::int64_t i = 0; i < x_host.count(); i += 3) x_host.f32()[i] = 0.25f;  // ties
      for (std::int64_t i = 0; i < x_host.count(); i += 5) x_host.f32()[i] = -1.0f;  // windows below zero
      const DType choice = PoolKernels::choice_type(c.window);
      const Operand x = activations(x_host), dy = activations(dy_host);
      const auto forward = compare(
          cpu->pool(), *pool, {activation_like(c.y_shape()), {c.y_shape(), choice}}, {kSame, kSame},
          [&](auto& on, Side at, const auto& out) { on.max_forward(at(x), c.window, epilogue, out[0], out[1]); });
      const auto alone = results({activation_like(c.y_shape())},
                                 [&](const auto& out) { pool->max_forward(x.device, c.window, epilogue, out[0], {}); });
      expect_same(forward.expected[0], alone[0]);
      const Operand chosen = plains(forward.expected[1]);
      compare(cpu->pool(), *pool, {activation_like(c.shape)}, {kSame},
              [&](auto& on, Side at, const auto& out) { on.max_backward(at(dy), at(chosen), c.window, out[0]); });
    }
}

TEST_P(CudaPool, MaxKeepsNaN) {
  for (const Window& window : {Window{{2, 2}, {2, 2}, {0, 0}}, Window{{3, 3}, {1, 1}, {1, 1}}, Window{{4, 2}, {1, 1}}})
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
      for (const std::int64_t channels : {3, 8})
        for (std::int64_t place = 0; place < 16; ++place) {
          const PoolCase c{{1, 4, 4, channels}, window};
          const Tensor x_host = random(c.shape, 1);
          x_host.f32()[channels * place + 1] = kNaN;
          x_host.f32()[channels * (place ^ 5) + 1] = kNaN;  // the last of several is chosen
          x_host.f32()[channels * place] = kInfinity;
          x_host.f32()[channels * place + 2] = -kInfinity;
          const Operand x = activations(x_host);
          compare(
              cpu->pool(), *pool, {activation_like(c.y_shape()), {c.y_shape(), DType::kU8}}, {kSame, kSame},
              [&](auto& on, Side at, const auto& out) { on.max_forward(at(x), c.window, epilogue, out[0], out[1]); });
        }
}

TEST_P(CudaPool, Average) {
  for (const auto& c : kPoolCases) {
    SCOPED_TRACE(to_string(c.shape));
    const Tensor x_host = random(c.shape, 1), dy_host = random(c.y_shape(), 2);
    if (x_host.count() > 40) x_host.f32()[33] = kNaN;
    if (x_host.count() > 40) x_host.f32()[36] = kInfinity;
    const Operand x = activations(x_host), dy = activations(dy_host);
    compare(cpu->pool(), *pool, {activation_like(c.y_shape()), activation_like(c.shape)},
            {{type(), 8.0}, {type(), 8.0}}, [&](auto& on, Side at, const auto& out) {
              on.average_forward(at(x), c.window, out[0]);
              on.average_backward(at(dy), c.window, out[1]);
            });
  }
}

TEST_P(CudaPool, AdaptiveAverage) {
  const std::pair<Shape, Shape> cases[] = {
      {{2, 8, 8, 8}, {2, 4, 2, 8}},  {{3, 1, 1, 9}, {3, 7, 7, 9}},       {{2, 2, 3, 24}, {2, 7, 5, 24}},
      {{1, 10, 7, 4}, {1, 7, 7, 4}}, {{1, 33, 6, 1}, {1, 1, 1, 1}},      {{300, 5, 3, 3}, {300, 3, 2, 3}},
      {{0, 8, 8, 8}, {0, 7, 7, 8}},  {{1, 14, 14, 512}, {1, 7, 7, 512}},
  };
  for (const auto& [shape, y_shape] : cases) {
    SCOPED_TRACE(to_string(shape));
    const Operand x = activations(random(shape, 1)), dy = activations(random(y_shape, 2));
    compare(cpu->pool(), *pool, {activation_like(y_shape), activation_like(shape)}, {{type(), 8.0}, {type(), 8.0}},
            [&](auto& on, Side at, const auto& out) {
              on.adaptive_average_forward(at(x), out[0]);
              on.adaptive_average_backward(at(dy), out[1]);
            });
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaPool, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
