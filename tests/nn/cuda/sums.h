// How closely sums of products, and what is made of them, must agree.
#pragma once

#include "nn/ops/elementwise_rules.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn::testing {

/// For a sum in f32 of `terms` products of numbers up to 1, in any order, that then becomes `dtype`. Partial sums of so
/// many random products reach about √terms, and each is rounded by up to 2⁻²⁴ of that; these errors add up like a
/// random walk, to about terms · 0.3 · 2⁻²³. Of that five times; a product in TF32 would be off by 2⁻¹² alone.
inline Tolerance tolerance_of_sum(std::int64_t terms, DType dtype) {
  return {.dtype = dtype, .ulps = 8.0 + 1.5 * static_cast<double>(terms)};
}

// Note [Bounds of products]
// A kernel may round to 16 bits more than its result. Those of cuBLASLt for rows that are no multiple of 16 bytes, or
// misaligned, round the product, then add the bias to that; where there is no kernel with the bias, or with the
// activation, the product and the sum lie in memory between two kernels. With p = x · wᵀ, a = p + b and u half a unit
// in the last place (2⁻⁸ in bf16, 2⁻¹¹ in f16), each of these is rounded by up to u of itself:
//   y = a         off by u |p| + u |a|
//   y = ReLU(a)   the same: its slope is at most 1
//   y = GELU(a)   off by d = u |p| + u |a| in a, hence by |GELU'(a)| d + 0.4 d² in y (|GELU''| < 0.8), and u |y| more.
//                 A fused one may use the hardware's tanh, which is off by 2⁻¹¹: 2⁻¹² |a| in y.
// Without a bias the product is not rounded before. GELU'(a) is small for negative a: there another GELU shows.
struct ExpectedLayer {
  Tensor y;
  Tensor preactivation;   // a
  Tensor rounded_before;  // for expect_close() of y
};

/// The sizes of what is finite.
inline Tensor sizes_of(Backend& cpu, const Tensor& values) {
  const Tensor sizes = cpu.empty(values.shape());
  for (std::int64_t i = 0; i < values.count(); ++i)
    sizes.f32()[i] = std::isfinite(values.f32()[i]) ? std::abs(values.f32()[i]) : 0.0f;
  return sizes;
}

/// On the CPU. `b` may be undefined. `dtype`: the kernel's.
inline ExpectedLayer expected_layer(Backend& cpu, const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue,
                                    DType dtype) {
  const Shape shape = {x.size(0), w.size(0)};
  const Tensor product = cpu.empty(shape);
  cpu.linear().forward(x, w, Tensor(), Epilogue::kNone, product);
  const Tensor rounded_before = b.defined() ? sizes_of(cpu, product) : cpu.zeros(shape);
  const ExpectedLayer layer = {cpu.empty(shape), cpu.empty(shape), rounded_before};
  cpu.linear().forward(x, w, b, Epilogue::kNone, layer.preactivation);
  cpu.linear().forward(x, w, b, epilogue, layer.y);
  if (epilogue != Epilogue::kGelu || !is_half(dtype)) return layer;
  const float u = 0x1p-8f * static_cast<float>(finer_than_bf16(dtype));
  const Tensor ones = cpu.empty(shape), slopes = cpu.empty(shape);
  cpu.pointwise().fill(ones, 1.0f);
  cpu.pointwise().unary_backward(UnaryOp::kGeluTanh, layer.preactivation, {}, ones, slopes);
  for (std::int64_t i = 0; i < product.count(); ++i) {
    const float a = std::abs(layer.preactivation.f32()[i]), sizes = rounded_before.f32()[i] + a;
    rounded_before.f32()[i] = std::abs(slopes.f32()[i]) * sizes + 0.4f * u * sizes * sizes + 0x1p-12f * a / u;
  }
  return layer;
}

}  // namespace lockstep::nn::testing
