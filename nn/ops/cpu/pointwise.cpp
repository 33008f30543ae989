#include "lockstep/nn/ops/pointwise.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/transpose.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements; a thread that gets fewer costs more than it brings

// x may be of another type than y.
template <class X, class Y>
LOCKSTEP_SIMD_CLONES void add_scaled(const X* x, float alpha, Y* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = narrow<Y>(wide(y[i]) + alpha * wide(x[i]));
}

template <class T>
LOCKSTEP_SIMD_CLONES void add_both(const T* x, const T* y, T* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) z[i] = narrow<T>(wide(x[i]) + wide(y[i]));
}

template <class T>
LOCKSTEP_SIMD_CLONES void relu_of_both(const T* x, const T* y, T* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float sum = wide(x[i]) + wide(y[i]);
    z[i] = narrow<T>(sum < 0.0f ? 0.0f : sum);
  }
}

template <class T>
LOCKSTEP_SIMD_CLONES void relu_of(const T* x, T* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = keep_if(!(wide(x[i]) < 0.0f), x[i]);  // this way round NaN passes
}

template <class T>
LOCKSTEP_SIMD_CLONES void mask_by(const T* y, const T* dy, T* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = keep_if(wide(y[i]) > 0.0f, dy[i]);
}

constexpr float kTanhScale = 1.59576912f;  // 2 √(2 / π): (1 + tanh(u)) / 2 is the logistic function of 2 u
constexpr float kTanhCubic = 0.044715f;
constexpr float kSqrtHalf = 0.707106781f;
constexpr float kDensity = 0.398942280f;  // 1 / √(2 π)

template <class T>
LOCKSTEP_SIMD_CLONES void gelu_tanh_of(const T* x, T* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]);
    y[i] = narrow<T>(v * sigmoid_of(kTanhScale * (v + kTanhCubic * v * v * v)));
  }
}

template <class T>
LOCKSTEP_SIMD_CLONES void gelu_tanh_back(const T* x, const T* dy, T* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]), square = v * v;
    const float s = sigmoid_of(kTanhScale * v * (1.0f + kTanhCubic * square));
    dx[i] = narrow<T>(wide(dy[i]) * (s + v * s * (1.0f - s) * kTanhScale * (1.0f + 3.0f * kTanhCubic * square)));
  }
}

template <class T>
LOCKSTEP_SIMD_CLONES void gelu_erf_of(const T* x, T* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]);
    y[i] = narrow<T>(v * normal_of(v * kSqrtHalf, exp_of(-0.5f * v * v)));
  }
}

template <class T>
LOCKSTEP_SIMD_CLONES void gelu_erf_back(const T* x, const T* dy, T* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]), density = exp_of(-0.5f * v * v);
    dx[i] = narrow<T>(wide(dy[i]) * (normal_of(v * kSqrtHalf, density) + v * kDensity * density));
  }
}

// Elements 4 · begin to 4 · end of one sample.
template <class T>
LOCKSTEP_SIMD_CLONES void drop(const T* x, T* y, const DropoutState& state, std::int64_t layer, std::int64_t sample,
                               std::uint32_t threshold, float scale, std::int64_t begin, std::int64_t end) {
  for (std::int64_t quad = begin; quad < end; ++quad) {
    const RandomBits bits = dropout_bits(state, layer, sample, quad);
    for (int i = 0; i < 4; ++i)
      y[4 * quad + i] = keep_if(bits.word[i] >= threshold, narrow<T>(wide(x[4 * quad + i]) * scale));
  }
}

template <class From, class To>
LOCKSTEP_SIMD_CLONES void convert(const From* x, To* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = narrow<To>(wide(x[i]));
}

class CpuPointwise final : public PointwiseKernels {
 public:
  void fill(const Tensor& y, float value) override {
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      std::fill_n(y.data<T>(), y.count(), narrow<T>(value));
    });
  }

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
        convert(x.f32() + begin, y.data<BFloat16>() + begin, end - begin);
      else
        convert(x.data<BFloat16>() + begin, y.f32() + begin, end - begin);
    });
  }

  void increment(const Tensor& counter) override { ++*counter.data<std::int64_t>(); }

  void add_to(const Tensor& x, float alpha, const Tensor& y) override {
    with_type(x.dtype(), [&](auto of_x) {
      with_type(y.dtype(), [&](auto of_y) {
        const auto* const from = x.data<decltype(of_x)>();
        auto* const to = y.data<decltype(of_y)>();
        parallel_for(y.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
          add_scaled(from + begin, alpha, to + begin, end - begin);
        });
      });
    });
  }

  void add(const Tensor& x, const Tensor& y, const Tensor& z) override {
    each_piece(
        kGrain, [](auto... at) { add_both(at...); }, x, y, z);
  }

  void add_relu(const Tensor& x, const Tensor& y, const Tensor& z) override {
    each_piece(
        kGrain, [](auto... at) { relu_of_both(at...); }, x, y, z);
  }

  void relu(const Tensor& x, const Tensor& y) override {
    each_piece(
        kGrain, [](auto... at) { relu_of(at...); }, x, y);
  }

  void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    each_piece(
        kGrain, [](auto... at) { mask_by(at...); }, y, dy, dx);
  }

  void gelu(const Tensor& x, GeluKind kind, const Tensor& y) override {
    if (kind == GeluKind::kTanh)
      each_piece(
          kGrain / 4, [](auto... at) { gelu_tanh_of(at...); }, x, y);
    else
      each_piece(
          kGrain / 4, [](auto... at) { gelu_erf_of(at...); }, x, y);
  }

  void gelu_backward(const Tensor& x, GeluKind kind, const Tensor& dy, const Tensor& dx) override {
    if (kind == GeluKind::kTanh)
      each_piece(
          kGrain / 4, [](auto... at) { gelu_tanh_back(at...); }, x, dy, dx);
    else
      each_piece(
          kGrain / 4, [](auto... at) { gelu_erf_back(at...); }, x, dy, dx);
  }

  void dropout(const Tensor& x, double p, const Tensor& state, std::int64_t layer, const Tensor& y) override {
    if (x.count() > 0) with_type(y.dtype(), [&](auto type) { drop_some<decltype(type)>(x, p, state, layer, y); });
  }

  void swap_last_axes(const Tensor& x, const Tensor& y) override {
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      const std::int64_t n = x.size(0), rows = x.size(1), columns = x.size(2), each = rows * columns;
      parallel_for(n, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, each)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i)
                       transpose(x.data<T>() + i * each, columns, rows, columns, y.data<T>() + i * each, rows);
                   });
    });
  }

 private:
  // Calls body(places in each of `tensors`…, number of elements) on several threads; the last of them is written.
  template <class Body, class... Tensors>
  static void each_piece(std::int64_t grain, const Body& body, const Tensors&... tensors) {
    const auto& written = std::get<sizeof...(tensors) - 1>(std::tie(tensors...));
    with_type(written.dtype(), [&](auto type) {
      using T = decltype(type);
      parallel_for(written.count(), grain, [&](std::int64_t begin, std::int64_t end) {
        body((tensors.template data<T>() + begin)..., end - begin);
      });
    });
  }

  template <class T>
  static void drop_some(const Tensor& x, double p, const Tensor& state, std::int64_t layer, const Tensor& y) {
    const std::int64_t samples = x.size(0), width = x.count() / samples, quads = width / 4;
    const auto* const numbers = state.data<std::int64_t>();
    const DropoutState at = {.seed = numbers[0], .step = numbers[1], .first_sample = numbers[2]};
    const std::uint32_t threshold = dropout_threshold(p);
    const auto scale = static_cast<float>(1.0 / (1.0 - p));
    const T* const from = x.data<T>();
    T* const to = y.data<T>();
    parallel_for(samples * quads, kGrain / 16, [&](std::int64_t begin, std::int64_t end) {
      while (begin < end) {
        const std::int64_t n = begin / quads, first = begin % quads, last = std::min(quads, first + end - begin);
        drop(from + n * width, to + n * width, at, layer, at.first_sample + n, threshold, scale, first, last);
        begin += last - first;
      }
    });
    for (std::int64_t n = 0; n < samples && width % 4 != 0; ++n) {
      const RandomBits bits = dropout_bits(at, layer, at.first_sample + n, quads);
      for (std::int64_t e = n * width + 4 * quads; e < (n + 1) * width; ++e)
        to[e] = bits.word[e - n * width - 4 * quads] >= threshold ? narrow<T>(wide(from[e]) * scale) : T();
    }
  }
};

}  // namespace

std::unique_ptr<PointwiseKernels> make_pointwise_kernels() { return std::make_unique<CpuPointwise>(); }

}  // namespace lockstep::nn::cpu
