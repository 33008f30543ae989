#include "nn/ops/pointwise.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/transpose.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements; a thread that gets fewer costs more than it brings

LOCKSTEP_SIMD_CLONES
void add_scaled(const float* x, float alpha, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += alpha * x[i];
}

LOCKSTEP_SIMD_CLONES
void add_both(const float* x, const float* y, float* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) z[i] = x[i] + y[i];
}

LOCKSTEP_SIMD_CLONES
void relu_of(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] < 0.0f ? 0.0f : x[i];  // this way round NaN passes
}

LOCKSTEP_SIMD_CLONES
void mask_by(const float* y, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = y[i] > 0.0f ? dy[i] : 0.0f;
}

BFloat16 rounded(float value) { return BFloat16::from_float(value); }
float widened(BFloat16 value) { return value.to_float(); }

class CpuPointwise final : public PointwiseKernels {
 public:
  void fill(const Tensor& y, float value) override { std::fill_n(y.f32(), y.count(), value); }

  void copy(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.bytes() == y.bytes());
    std::memcpy(y.raw(), x.raw(), x.bytes());
  }

  void cast(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.count() == y.count());
    if (x.dtype() == y.dtype()) return copy(x, y);
    parallel_for(y.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      if (y.dtype() == DType::kBF16)
        std::transform(x.f32() + begin, x.f32() + end, y.data<BFloat16>() + begin, rounded);
      else
        std::transform(x.data<BFloat16>() + begin, x.data<BFloat16>() + end, y.f32() + begin, widened);
    });
  }

  void increment(const Tensor& counter) override { ++*counter.data<std::int64_t>(); }

  void add_to(const Tensor& x, float alpha, const Tensor& y) override {
    parallel_for(y.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      add_scaled(x.f32() + begin, alpha, y.f32() + begin, end - begin);
    });
  }

  void add(const Tensor& x, const Tensor& y, const Tensor& z) override {
    parallel_for(z.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      add_both(x.f32() + begin, y.f32() + begin, z.f32() + begin, end - begin);
    });
  }

  void relu(const Tensor& x, const Tensor& y) override {
    parallel_for(y.count(), kGrain,
                 [&](std::int64_t begin, std::int64_t end) { relu_of(x.f32() + begin, y.f32() + begin, end - begin); });
  }

  void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    parallel_for(dx.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      mask_by(y.f32() + begin, dy.f32() + begin, dx.f32() + begin, end - begin);
    });
  }

  void swap_last_axes(const Tensor& x, const Tensor& y) override {
    const std::int64_t n = x.size(0), rows = x.size(1), columns = x.size(2);
    parallel_for(n, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, rows * columns)),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i)
                     transpose(x.f32() + i * rows * columns, columns, rows, columns, y.f32() + i * rows * columns,
                               rows);
                 });
  }
};

}  // namespace

std::unique_ptr<PointwiseKernels> make_pointwise_kernels() { return std::make_unique<CpuPointwise>(); }

}  // namespace lockstep::nn::cpu
