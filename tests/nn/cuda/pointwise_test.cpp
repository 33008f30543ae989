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
  // What the two devices have made of the same numbers.
  void expect_apart(const Tensor& host, const Tensor& device, const Apart& apart) {
    if (apart.ulps == 0.0)
      expect_same(rounded(host), device);
    else
      expect_close(host, device, {type(), apart.ulps, apart.scale});
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
      const Tensor expected = cpu->empty({n});
      cpu->pointwise().fill(expected, value);
      const auto got = results({activation_like({n})}, [&](const auto& out) { pointwise->fill(out[0], value); });
      expect_same(expected, got[0]);
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
    const Tensor x_host = with_odd_ones(random({n}, 1)), y_host = random({n}, 2), expected = cpu->empty({n});
    const Tensor x = activation(x_host);
    cpu->pointwise().copy(y_host, expected);
    cpu->pointwise().add_to(x_host, -0.3f, expected);
    const auto call = [&](const auto& out) { pointwise->add_to(x, -0.3f, out[0]); };
    expect_close(expected, results({activation_like({n}, y_host)}, call)[0], {type(), 1.0});
    expect_close(expected, results({{{n}, DType::kF32, y_host}}, call)[0], {DType::kF32, 1.0});
  }
}

TEST_P(CudaPointwise, Unary) {
  for_cases(kUnaryCases, [&]<class Rule>(const UnaryCase& each, Rule, const char*) {
    if (!computes<Rule>()) return;
    for (const std::int64_t n : kCounts) {
      const Tensor x_host = cpu->empty({n}), y_host = cpu->empty({n}), dx_host = cpu->empty({n});
      cpu->operators().forward(Affine{each.spread, each.middle}, random_tensor(*cpu, {n}, 1), x_host);
      rounded(with_odd_ones(x_host));
      cpu->pointwise().unary(each.op, x_host, y_host);
      const Tensor x = activation(x_host);
      const auto y = results({activation_like({n})}, [&](const auto& out) { pointwise->unary(each.op, x, out[0]); });
      expect_apart(y_host, y[0], each.forward);
      const auto same =
          results({activation_like({n}, x_host)}, [&](const auto& out) { pointwise->unary(each.op, out[0], out[0]); });
      expect_same(y[0], same[0]);

      const Tensor dy_host = with_odd_ones(random({n}, 2), 2);
      const Tensor y_device = activation(rounded(y_host)), dy = activation(dy_host);
      cpu->pointwise().unary_backward(each.op, x_host, y_host, dy_host, dx_host);
      const Tensor x_read = Rule::kReadsX ? x : Tensor(), y_read = Rule::kReadsY ? y_device : Tensor();
      const auto dx = results({activation_like({n})},
                              [&](const auto& out) { pointwise->unary_backward(each.op, x_read, y_read, dy, out[0]); });
      expect_apart(dx_host, dx[0], each.backward);
      const auto in_place = results({activation_like({n}, dy_host)}, [&](const auto& out) {
        pointwise->unary_backward(each.op, x_read, y_read, out[0], out[0]);
      });
      expect_same(dx[0], in_place[0]);
    }
  });
}

TEST_P(CudaPointwise, Binary) {
  for_cases(kBinaryCases, [&]<class Rule>(const BinaryCase& each, Rule, const char*) {
    if (!computes<Rule>()) return;
    for (const std::int64_t n : kCounts) {
      const Tensor x_host = with_odd_ones(random({n}, 1)), y_host = cpu->empty({n}), dz_host = random({n}, 3);
      cpu->operators().forward(Affine{1.0f, each.middle}, random_tensor(*cpu, {n}, 2), y_host);
      rounded(y_host);
      const Tensor z_host = cpu->empty({n}), dx_host = cpu->empty({n}), dy_host = cpu->empty({n});
      cpu->pointwise().binary(each.op, x_host, y_host, z_host);
      cpu->pointwise().binary_backward(each.op, x_host, y_host, dz_host, dx_host, dy_host);
      const Tensor x = activation(x_host), y = activation(y_host), dz = activation(dz_host);
      const auto z =
          results({activation_like({n})}, [&](const auto& out) { pointwise->binary(each.op, x, y, out[0]); });
      expect_apart(z_host, z[0], each.forward);
      const auto same = results({activation_like({n}, x_host)},
                                [&](const auto& out) { pointwise->binary(each.op, out[0], y, out[0]); });
      expect_same(z[0], same[0]);
      const auto both = results({activation_like({n}), activation_like({n})}, [&](const auto& out) {
        pointwise->binary_backward(each.op, x, y, dz, out[0], out[1]);
      });
      expect_apart(dx_host, both[0], each.backward);
      expect_apart(dy_host, both[1], each.backward);
      const auto first = results({activation_like({n})},
                                 [&](const auto& out) { pointwise->binary_backward(each.op, x, y, dz, out[0], {}); });
      expect_same(both[0], first[0]);
      const auto second = results({activation_like({n})},
                                  [&](const auto& out) { pointwise->binary_backward(each.op, x, y, dz, {}, out[0]); });
      expect_same(both[1], second[0]);
    }
  });
}

// The very elements that the CPU keeps, and what is made of them rounded once.
TEST_P(CudaPointwise, Dropout) {
  for (const Shape& shape :
       {Shape{0, 4}, Shape{3, 0}, Shape{1, 1}, Shape{5, 3}, Shape{3, 4}, Shape{7, 8}, Shape{2, 5, 7}, Shape{9, 16},
        Shape{3, 4100}, Shape{300, 24}, Shape{1200, 8}, Shape{2, 8193}})
    for (const double p : {0.0, 0.1, 0.9}) {
      SCOPED_TRACE(to_string(shape));
      const Tensor host = random(shape, 1), state = cpu->empty({3}, DType::kI64), expected = cpu->empty(shape);
      const std::array<std::int64_t, 3> numbers = {(std::int64_t{5} << 40) + 7, (std::int64_t{3} << 33) + 1, 11};
      std::copy(numbers.begin(), numbers.end(), state.data<std::int64_t>());
      const Tensor x = activation(host), at = plain(state);
      cpu->pointwise().dropout(host, p, state, 13, expected);
      const auto apart =
          results({activation_like(shape)}, [&](const auto& out) { pointwise->dropout(x, p, at, 13, out[0]); });
      expect_same(rounded(expected), apart[0]);
      const auto in_place = results({activation_like(shape, host)},
                                    [&](const auto& out) { pointwise->dropout(out[0], p, at, 13, out[0]); });
      expect_same(expected, in_place[0]);
    }
}

// Rows that lie apart, on either side.
TEST_P(CudaPointwise, CopyRows) {
  for (const Shape& shape : {Shape{1, 1}, Shape{0, 5}, Shape{3, 17}, Shape{2, 3, 16}, Shape{129, 7}, Shape{5, 64}}) {
    SCOPED_TRACE(to_string(shape));
    const std::int64_t columns = shape[shape.size() - 1], more = columns + 8;
    Shape wider = shape;
    wider[shape.size() - 1] = more;
    const Tensor host = random(shape, 1), wide_host = random(wider, 2), x = activation(host),
                 wide = activation(wide_host);
    const Tensor expected = cpu->empty(shape), expected_wide = cpu->empty(wider);
    cpu->pointwise().copy_rows(wide_host.columns(8, more), expected);
    cpu->pointwise().copy(wide_host, expected_wide);
    cpu->pointwise().copy_rows(host, expected_wide.columns(3, 3 + columns));
    const auto got = results({activation_like(shape), activation_like(wider, wide_host)}, [&](const auto& out) {
      pointwise->copy_rows(wide.columns(8, more), out[0]);
      pointwise->copy_rows(x, out[1].columns(3, 3 + columns));
    });
    expect_same(expected, got[0]);
    expect_same(expected_wide, got[1]);
    for (std::int64_t row = 0; row < shape.count() / columns; ++row)
      for (std::int64_t c = 0; c < columns; ++c)
        ASSERT_EQ(expected.f32()[row * columns + c], wide_host.f32()[row * more + 8 + c]);
  }
}

TEST_P(CudaPointwise, SwapLastAxes) {
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{0, 4, 5}, Shape{3, 1, 17}, Shape{2, 19, 1}, Shape{3, 17, 33}, Shape{2, 5, 7},
        Shape{1, 2, 5000}, Shape{1, 5000, 2}, Shape{2, 3, 1400}, Shape{2, 1400, 3}, Shape{1, 63, 65}, Shape{1, 65, 63},
        Shape{2, 64, 64}, Shape{1, 129, 130}, Shape{2, 49, 64}, Shape{1, 100, 16}}) {
    SCOPED_TRACE(to_string(shape));
    const Tensor host = random(shape, 1), x = activation(host);
    const Shape swapped = {shape[0], shape[2], shape[1]};
    const Tensor expected = cpu->empty(swapped);
    cpu->pointwise().swap_last_axes(host, expected);
    const auto got =
        results({activation_like(swapped)}, [&](const auto& out) { pointwise->swap_last_axes(x, out[0]); });
    expect_same(expected, got[0]);
  }
}

INSTANTIATE_TEST_SUITE_P(, CudaPointwise, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
