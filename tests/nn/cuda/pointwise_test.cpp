// CUDA's pointwise kernels against the CPU's. What rounds only once must be the same.
#include <algorithm>
#include <array>
#include <bit>

#include "tests/nn/cuda/device_values.h"
#include "tests/nn/elementwise_cases.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

// Around the width of an access, and of what a block does: 4096 f32 or 8192 bf16.
constexpr std::int64_t kCounts[] = {0, 1, 3, 4, 5, 7, 8, 9, 255, 1025, 4095, 4096, 4097, 8191, 8193, 20005};

class CudaPointwise : public DeviceTest {
 protected:
  // Of what the two devices make of the same numbers.
  Tolerance tolerance(const Apart& apart) const {
    return apart.ulps == 0.0 ? kSame : Tolerance{type(), apart.ulps, apart.scale};
  }
  // f32 has all rules.
  template <class Rule>
  bool computes() const {
    return Rule::kAllTypes || type() == DType::kF32;
  }

  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
};

TEST_P(CudaPointwise, Fill) {
  for (const std::int64_t n : kCounts)
    for (const float value : {0.0f, -0.75f, kNaN}) {
      compare(cpu->pointwise(), *pointwise, {activation_like({n})}, {kSame},
              [&](auto& on, Side, const auto& out) { on.fill(out[0], value); });
    }
}

TEST_P(CudaPointwise, Copy) {
  for (const std::int64_t n : kCounts) {
    const Tensor host = with_odd_ones(random({n}, 1)), x = activation(host);
    const auto got = results({activation_like({n})}, [&](const auto& out) { pointwise->copy(x, out[0]); });
    expect_same(host, got[0]);
  }
  const Tensor bytes = cpu->empty({5}, DType::kU8);
  for (int i = 0; i < 5; ++i) bytes.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(250 + i);
  const Tensor x = plain(bytes);
  const auto got = results({{{5}, DType::kU8}}, [&](const auto& out) { pointwise->copy(x, out[0]); });
  for (int i = 0; i < 5; ++i) EXPECT_EQ(got[0].data<std::uint8_t>()[i], 250 + i);
}

// The types of 16 bits in turn, whatever the case's own type is.
TEST_P(CudaPointwise, Cast) {
  const int offset = GetParam().offset;
  for (const DType half : {DType::kBF16, DType::kF16})
    for (const std::int64_t n : kCounts) {
      const Tensor host = with_odd_ones(random_tensor(*cpu, {n}, 1));
      const std::uint32_t kept = half == DType::kF16 ? 0xffffe000u : 0xffff0000u, tie = (~kept + 1) / 2;
      for (std::int64_t i = 20; i < n; i += 7)  // halfway between two of them
        host.f32()[i] = std::bit_cast<float>((std::bit_cast<std::uint32_t>(host.f32()[i]) & kept) | tie);
      if (n > 40) {
        const float edges[] = {65504.0f, 65519.0f, 65520.0f, -70000.0f, 0x1p-14f, 0x1.8p-25f, 0x1p-25f, 0x1p-30f};
        std::ranges::copy(edges, host.f32() + 30);
      }
      const Tensor wide = cpu->empty({n});
      std::ranges::transform(host.span<float>(), wide.f32(), [&](float value) { return as_rounded(value, half); });
      const Tensor x = on_device(host, DType::kF32, offset), x_narrow = on_device(wide, half, offset);
      const auto down = results({{{n}, half}}, [&](const auto& out) { pointwise->cast(x, out[0]); });
      expect_same(wide, down[0]);
      const auto up = results({{{n}, DType::kF32}}, [&](const auto& out) { pointwise->cast(x_narrow, out[0]); });
      expect_same(wide, up[0]);
      const auto same = results({{{n}, DType::kF32}}, [&](const auto& out) { pointwise->cast(x, out[0]); });
      expect_same(host, same[0]);
    }
}

TEST_P(CudaPointwise, Increment) {
  const Tensor counter = cpu->empty({}, DType::kI64);
  *counter.data<std::int64_t>() = (std::int64_t{1} << 32) - 1;
  const auto got = results({{{}, DType::kI64, counter}}, [&](const auto& out) { pointwise->increment(out[0]); });
  EXPECT_EQ(*got[0].data<std::int64_t>(), std::int64_t{1} << 32);
}

TEST_P(CudaPointwise, AddTo) {
  for (const std::int64_t n : kCounts) {
    const Operand x = activations(with_odd_ones(random({n}, 1)));
    const Tensor y = random({n}, 2);
    for (const Output& sum : {activation_like({n}, y), Output{{n}, DType::kF32, y}})
      compare(cpu->pointwise(), *pointwise, {sum}, {{sum.dtype, 1.0}},
              [&](auto& on, Side at, const auto& out) { on.add_to(at(x), -0.3f, out[0]); });
  }
}

TEST_P(CudaPointwise, Unary) {
  for_cases(kUnaryCases, [&]<class Rule>(const UnaryCase& each, Rule, const char*) {
    if (!computes<Rule>()) return;
    for (const std::int64_t n : kCounts) {
      const Tensor x_host = cpu->empty({n});
      cpu->operators().forward(Affine{each.spread, each.middle}, random_tensor(*cpu, {n}, 1), x_host);
      Operand x = activations(rounded(with_odd_ones(x_host))), dy = activations(with_odd_ones(random({n}, 2), 2));
      const auto forward = compare(
          cpu->pointwise(), *pointwise, {activation_like({n})}, {tolerance(each.forward)},
          [&](auto& on, Side at, const auto& out) { on.unary(each.op, at(x), out[0]); }, &x);
      const Operand y = activations(rounded(forward.expected[0]));
      const auto backward = [&](auto& on, Side at, const auto& out) {
        on.unary_backward(each.op, Rule::kReadsX ? at(x) : Tensor(), Rule::kReadsY ? at(y) : Tensor(), at(dy), out[0]);
      };
      compare(cpu->pointwise(), *pointwise, {activation_like({n})}, {tolerance(each.backward)}, backward, &dy);
    }
  });
}

TEST_P(CudaPointwise, Binary) {
  for_cases(kBinaryCases, [&]<class Rule>(const BinaryCase& each, Rule, const char*) {
    if (!computes<Rule>()) return;
    for (const std::int64_t n : kCounts) {
      const Tensor y_host = cpu->empty({n});
      cpu->operators().forward(Affine{1.0f, each.middle}, random_tensor(*cpu, {n}, 2), y_host);
      Operand x = activations(with_odd_ones(random({n}, 1)));
      const Operand y = activations(rounded(y_host)), dz = activations(random({n}, 3));
      const Output like = activation_like({n});
      compare(
          cpu->pointwise(), *pointwise, {like}, {tolerance(each.forward)},
          [&](auto& on, Side at, const auto& out) { on.binary(each.op, at(x), at(y), out[0]); }, &x);
      const auto both =
          compare(cpu->pointwise(), *pointwise, {like, like}, {tolerance(each.backward), tolerance(each.backward)},
                  [&](auto& on, Side at, const auto& out) {
                    on.binary_backward(each.op, at(x), at(y), at(dz), out[0], out[1]);
                  });
      const auto first = results(
          {like}, [&](auto& out) { pointwise->binary_backward(each.op, x.device, y.device, dz.device, out[0], {}); });
      expect_same(both.got[0], first[0]);
      const auto second = results(
          {like}, [&](auto& out) { pointwise->binary_backward(each.op, x.device, y.device, dz.device, {}, out[0]); });
      expect_same(both.got[1], second[0]);
    }
  });
}

// The very elements that the CPU keeps, and what is made of them rounded once.
TEST_P(CudaPointwise, Dropout) {
  const Tensor numbers = cpu->empty({3}, DType::kI64);
  std::ranges::copy(std::array<std::int64_t, 3>{(std::int64_t{5} << 40) + 7, (std::int64_t{3} << 33) + 1, 11},
                    numbers.data<std::int64_t>());
  const Operand state = plains(numbers);
  for (const Shape& shape :
       {Shape{0, 4}, Shape{3, 0}, Shape{1, 1}, Shape{5, 3}, Shape{3, 4}, Shape{7, 8}, Shape{2, 5, 7}, Shape{9, 16},
        Shape{3, 4100}, Shape{300, 24}, Shape{1200, 8}, Shape{2, 8193}})
    for (const double p : {0.0, 0.1, 0.9}) {
      SCOPED_TRACE(to_string(shape));
      Operand x = activations(random(shape, 1));
      compare(
          cpu->pointwise(), *pointwise, {activation_like(shape)}, {kSame},
          [&](auto& on, Side at, const auto& out) { on.dropout(at(x), p, at(state), 13, out[0]); }, &x);
    }
}

// Rows that lie apart, on either side.
TEST_P(CudaPointwise, CopyRows) {
  for (const Shape& shape : {Shape{1, 1}, Shape{0, 5}, Shape{3, 17}, Shape{2, 3, 16}, Shape{129, 7}, Shape{5, 64}}) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t columns = shape[shape.size() - 1], more = columns + 8;
    Shape wider = shape;
    wider[shape.size() - 1] = more;
    const Operand x = activations(random(shape, 1)), wide = activations(random(wider, 2));
    const auto both = compare(cpu->pointwise(), *pointwise, {activation_like(shape), activation_like(wider, wide.host)},
                              {kSame, kSame}, [&](auto& on, Side at, const auto& out) {
                                on.copy_rows(at(wide).columns(8, more), out[0]);
                                on.copy_rows(at(x), out[1].columns(3, 3 + columns));
                              });
    for (std::int64_t row = 0; row < shape.count() / columns; ++row)
      for (std::int64_t c = 0; c < columns; ++c)
        ASSERT_EQ(both.expected[0].f32()[row * columns + c], wide.host.f32()[row * more + 8 + c]);
  }
}

TEST_P(CudaPointwise, Normal) {
  const Tensor host = cpu->empty({3}, DType::kI64);
  std::ranges::copy(std::array<std::int64_t, 3>{42, 7, 1000}, host.data<std::int64_t>());
  const Operand state = plains(host);
  for (const Shape& shape : {Shape{0, 3}, Shape{1}, Shape{2, 3}, Shape{5, 4}, Shape{3, 7, 5}, Shape{2, 5000}}) {
    SCOPED_TRACE(to_string(shape));
    compare(cpu->pointwise(), *pointwise, {{shape}}, {{DType::kF32, 16.0, 6.0}},
            [&](auto& on, Side at, const auto& out) { on.normal(at(state), 13, out[0]); });
  }
}

TEST_P(CudaPointwise, Select) {
  for (const std::int64_t n : {0, 1, 5, 1025, 8193}) {
    const Tensor host = cpu->empty({n}, DType::kI32);
    for (std::int64_t i = 0; i < n; ++i) host.data<std::int32_t>()[i] = static_cast<std::int32_t>(i % 3 - 1);
    const Operand mask = plains(host), x = activations(with_odd_ones(random({n}, 1))), y = activations(random({n}, 2));
    compare(cpu->pointwise(), *pointwise, {activation_like({n}), activation_like({n}), activation_like({n})},
            {kSame, kSame, kSame}, [&](auto& on, Side at, const auto& out) {
              on.select(at(mask), at(x), at(y), out[0]);
              on.select(at(mask), at(x), {}, out[1]);
              on.select(at(mask), {}, at(y), out[2]);
            });
  }
}

// Rows in one piece and in single elements, matrices turned round, repeated elements, parts of what is written.
TEST_P(CudaPointwise, CopyStrided) {
  struct Move {
    Shape from, to, shape;
    Strides x, y;
  };
  const Move moves[] = {
      {{7}, {7}, {7}, {0, {1}}, {0, {1}}},
      {{1}, {5}, {5}, {0, {0}}, {0, {1}}},
      {{4, 64}, {64, 4}, {64, 4}, {0, {1, 64}}, {0, {4, 1}}},
      {{5, 3, 16}, {3, 5, 16}, {3, 5, 16}, {0, {16, 48, 1}}, {0, {80, 16, 1}}},
      {{5, 3, 7}, {3, 5, 7}, {3, 5, 7}, {0, {7, 21, 1}}, {0, {35, 7, 1}}},
      {{6, 40}, {6, 24}, {6, 16}, {24, {40, 1}}, {8, {24, 1}}},
      {{6, 40}, {6, 24}, {6, 15}, {3, {40, 1}}, {1, {24, 1}}},
      {{2, 3, 4, 5, 2, 3},
       {3, 2, 5, 4, 3, 2},
       {3, 2, 5, 4, 3, 2},
       {0, {120, 360, 6, 30, 1, 3}},
       {0, {240, 120, 24, 6, 2, 1}}},
      {{70, 65, 3}, {3, 65, 70}, {3, 65, 70}, {0, {1, 3, 195}}, {0, {4550, 70, 1}}},
      {{3}, {2, 3}, {0, 3}, {0, {0, 1}}, {0, {3, 1}}},
      {{3}, {4000, 3}, {4000, 3}, {0, {0, 1}}, {0, {3, 1}}},
  };
  for (const Move& c : moves) {
    SCOPED_TRACE(to_string(c.shape));
    const Operand x = activations(random(c.from, 1));
    compare(cpu->pointwise(), *pointwise, {activation_like(c.to, random(c.to, 2))}, {kSame},
            [&](auto& on, Side at, const auto& out) { on.copy_strided(at(x), c.x, out[0], c.y, c.shape); });
  }
}

TEST_P(CudaPointwise, SwapLastAxes) {
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{0, 4, 5}, Shape{3, 1, 17}, Shape{2, 19, 1}, Shape{3, 17, 33}, Shape{2, 5, 7},
        Shape{1, 2, 5000}, Shape{1, 5000, 2}, Shape{2, 3, 1400}, Shape{2, 1400, 3}, Shape{1, 63, 65}, Shape{1, 65, 63},
        Shape{2, 64, 64}, Shape{1, 129, 130}, Shape{2, 49, 64}, Shape{1, 100, 16}}) {
    SCOPED_TRACE(to_string(shape));
    const Operand x = activations(random(shape, 1));
    compare(cpu->pointwise(), *pointwise, {activation_like({shape[0], shape[2], shape[1]})}, {kSame},
            [&](auto& on, Side at, const auto& out) { on.swap_last_axes(at(x), out[0]); });
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaPointwise, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
