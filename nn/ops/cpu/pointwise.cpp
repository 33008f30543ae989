#include "lockstep/nn/ops/pointwise.h"

#include <algorithm>
#include <cstring>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/fast_math.h"
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
void relu_of_both(const float* x, const float* y, float* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float sum = x[i] + y[i];
    z[i] = sum < 0.0f ? 0.0f : sum;
  }
}

LOCKSTEP_SIMD_CLONES
void relu_of(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] < 0.0f ? 0.0f : x[i];  // this way round NaN passes
}

LOCKSTEP_SIMD_CLONES
void mask_by(const float* y, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = y[i] > 0.0f ? dy[i] : 0.0f;
}

constexpr float kTanhScale = 1.59576912f;  // 2 √(2 / π): (1 + tanh(u)) / 2 is the logistic function of 2 u
constexpr float kTanhCubic = 0.044715f;
constexpr float kSqrtHalf = 0.707106781f;
constexpr float kDensity = 0.398942280f;  // 1 / √(2 π)

LOCKSTEP_SIMD_CLONES
void gelu_tanh_of(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * sigmoid_of(kTanhScale * (x[i] + kTanhCubic * x[i] * x[i] * x[i]));
}

LOCKSTEP_SIMD_CLONES
void gelu_tanh_back(const float* x, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float square = x[i] * x[i];
    const float s = sigmoid_of(kTanhScale * x[i] * (1.0f + kTanhCubic * square));
    dx[i] = dy[i] * (s + x[i] * s * (1.0f - s) * kTanhScale * (1.0f + 3.0f * kTanhCubic * square));
  }
}

LOCKSTEP_SIMD_CLONES
void gelu_erf_of(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * normal_of(x[i] * kSqrtHalf, exp_of(-0.5f * x[i] * x[i]));
}

LOCKSTEP_SIMD_CLONES
void gelu_erf_back(const float* x, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float density = exp_of(-0.5f * x[i] * x[i]);
    dx[i] = dy[i] * (normal_of(x[i] * kSqrtHalf, density) + x[i] * kDensity * density);
  }
}

// Elements 4 · begin to 4 · end of one sample.
LOCKSTEP_SIMD_CLONES
void drop(const float* x, float* y, const DropoutState& state, std::int64_t layer, std::int64_t sample,
          std::uint32_t threshold, float scale, std::int64_t begin, std::int64_t end) {
  for (std::int64_t quad = begin; quad < end; ++quad) {
    const RandomBits bits = dropout_bits(state, layer, sample, quad);
    for (int i = 0; i < 4; ++i) y[4 * quad + i] = bits.word[i] >= threshold ? x[4 * quad + i] * scale : 0.0f;
  }
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

  void copy_rows(const Tensor& x, const Tensor& y) override {
    LOCKSTEP_ASSERT(x.shape() == y.shape() && x.dtype() == y.dtype());
    if (x.count() == 0) return;
    const std::int64_t columns = x.size(x.shape().size() - 1);
    const std::size_t element = size_of(x.dtype()), bytes = static_cast<std::size_t>(columns) * element;
    const auto* const from = static_cast<const std::byte*>(x.raw_rows());
    auto* const to = static_cast<std::byte*>(y.raw_rows());
    parallel_for(x.count() / columns, kGrain / columns + 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        std::memcpy(to + static_cast<std::size_t>(row * y.pitch()) * element,
                    from + static_cast<std::size_t>(row * x.pitch()) * element, bytes);
    });
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

  void add_relu(const Tensor& x, const Tensor& y, const Tensor& z) override {
    parallel_for(z.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      relu_of_both(x.f32() + begin, y.f32() + begin, z.f32() + begin, end - begin);
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

  void gelu(const Tensor& x, GeluKind kind, const Tensor& y) override {
    const auto body = kind == GeluKind::kTanh ? gelu_tanh_of : gelu_erf_of;
    parallel_for(y.count(), kGrain / 4,
                 [&](std::int64_t begin, std::int64_t end) { body(x.f32() + begin, y.f32() + begin, end - begin); });
  }

  void gelu_backward(const Tensor& x, GeluKind kind, const Tensor& dy, const Tensor& dx) override {
    const auto body = kind == GeluKind::kTanh ? gelu_tanh_back : gelu_erf_back;
    parallel_for(dx.count(), kGrain / 4, [&](std::int64_t begin, std::int64_t end) {
      body(x.f32() + begin, dy.f32() + begin, dx.f32() + begin, end - begin);
    });
  }

  void dropout(const Tensor& x, double p, const Tensor& state, std::int64_t layer, const Tensor& y) override {
    const std::int64_t samples = x.size(0);
    if (x.count() == 0) return;
    const std::int64_t width = x.count() / samples, quads = width / 4;
    const auto* const numbers = state.data<std::int64_t>();
    const DropoutState at = {.seed = numbers[0], .step = numbers[1], .first_sample = numbers[2]};
    const std::uint32_t threshold = dropout_threshold(p);
    const auto scale = static_cast<float>(1.0 / (1.0 - p));
    parallel_for(samples * quads, kGrain / 16, [&](std::int64_t begin, std::int64_t end) {
      while (begin < end) {
        const std::int64_t n = begin / quads, first = begin % quads, last = std::min(quads, first + end - begin);
        drop(x.f32() + n * width, y.f32() + n * width, at, layer, at.first_sample + n, threshold, scale, first, last);
        begin += last - first;
      }
    });
    for (std::int64_t n = 0; n < samples && width % 4 != 0; ++n) {
      const RandomBits bits = dropout_bits(at, layer, at.first_sample + n, quads);
      for (std::int64_t e = 4 * quads; e < width; ++e)
        y.f32()[n * width + e] = bits.word[e % 4] >= threshold ? x.f32()[n * width + e] * scale : 0.0f;
    }
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
