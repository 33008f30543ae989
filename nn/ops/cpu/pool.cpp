#include "lockstep/nn/ops/pool.h"

#include <algorithm>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/onednn_versions.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

constexpr std::int64_t kGrain = 16384;  // elements

template <class T>
LOCKSTEP_SIMD_CLONES void add_to(const T* from, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += wide(from[i]);
}

template <class T>
LOCKSTEP_SIMD_CLONES void add_divided(const T* from, float divisor, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += wide(from[i]) / divisor;
}

template <class T>
LOCKSTEP_SIMD_CLONES void divide(const float* from, float divisor, T* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = narrow<T>(from[i] / divisor);
}

template <class From, class To>
LOCKSTEP_SIMD_CLONES void convert_all(const From* from, To* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = narrow<To>(wide(from[i]));
}

constexpr std::int64_t kChannels = 256;  // whose sums are held at a time

std::int64_t length_of(const AdaptiveStretch& stretch) { return stretch.end - stretch.begin; }

// Calls body(n, row, column, index) for the pixels of `over`, on several threads.
template <class Body>
void for_pixels(const Tensor& over, const Body& body) {
  const std::int64_t height = over.size(1), width = over.size(2);
  parallel_for(over.size(0) * height * width, std::max<std::int64_t>(1, kGrain / over.size(3)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i)
                   body(i / (height * width), i / width % height, i % width, i);
               });
}

// Calls body(first, count, sums) for some channels at a time, the sums being 0.
template <class Body>
void for_channels(std::int64_t channels, const Body& body) {
  for (std::int64_t first = 0; first < channels; first += kChannels) {
    float sums[kChannels] = {};
    body(first, std::min(kChannels, channels - first), sums);
  }
}

struct Average {
  HeldPrimitive forward, backward;
};

class CpuPool final : public PoolKernels {
 public:
  CpuPool(OneDnn& onednn, CachingAllocator& allocator) : onednn_(onednn), allocator_(allocator) {}

  void max_forward(const Tensor& x, const Window& window, Epilogue epilogue, const Tensor& y,
                   const Tensor& choices) override {
    if (y.count() == 0) return;
    max_pool_forward(x, window, epilogue == Epilogue::kRelu, y,
                     choices.defined() ? choices : Tensor::empty(allocator_, y.shape(), choice_type(window)));
  }

  void max_backward(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx) override {
    if (dx.count() > 0) max_pool_backward(dy, choices, window, dx, allocator_);
  }

  void average_forward(const Tensor& x, const Window& window, const Tensor& y) override {
    if (y.count() == 0) return;
    auto& held = average(x.shape(), y.shape(), window);
    run(held.forward, DNNL_ARG_SRC, x, DNNL_ARG_DST, y);
  }

  void adaptive_average_forward(const Tensor& x, const Tensor& y) override {
    if (y.count() == 0) return;
    const std::int64_t height = x.size(1), width = x.size(2), channels = x.size(3);
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      for_pixels(y, [&](std::int64_t n, std::int64_t row, std::int64_t column, std::int64_t at) {
        const AdaptiveStretch rows = adaptive_stretch(row, y.size(1), height);
        const AdaptiveStretch columns = adaptive_stretch(column, y.size(2), width);
        for_channels(channels, [&](std::int64_t first, std::int64_t count, float* sums) {
          for (std::int64_t r = rows.begin; r < rows.end; ++r)
            for (std::int64_t c = columns.begin; c < columns.end; ++c)
              add_to(x.data<T>() + ((n * height + r) * width + c) * channels + first, sums, count);
          divide(sums, static_cast<float>(length_of(rows) * length_of(columns)), y.data<T>() + at * channels + first,
                 count);
        });
      });
    });
  }

  void adaptive_average_backward(const Tensor& dy, const Tensor& dx) override {
    if (dx.count() == 0) return;
    const std::int64_t height = dy.size(1), width = dy.size(2), channels = dx.size(3);
    with_type(dx.dtype(), [&](auto type) {
      using T = decltype(type);
      for_pixels(dx, [&](std::int64_t n, std::int64_t row, std::int64_t column, std::int64_t at) {
        const AdaptiveStretch rows = adaptive_stretch(row, dx.size(1), height);
        const AdaptiveStretch columns = adaptive_stretch(column, dx.size(2), width);
        for_channels(channels, [&](std::int64_t first, std::int64_t count, float* sums) {
          for (std::int64_t r = rows.begin; r < rows.end; ++r)
            for (std::int64_t c = columns.begin; c < columns.end; ++c) {
              const std::int64_t elements = length_of(adaptive_stretch(r, height, dx.size(1))) *
                                            length_of(adaptive_stretch(c, width, dx.size(2)));
              add_divided(dy.data<T>() + ((n * height + r) * width + c) * channels + first,
                          static_cast<float>(elements), sums, count);
            }
          divide(sums, 1.0f, dx.data<T>() + at * channels + first, count);
        });
      });
    });
  }

  void average_backward(const Tensor& dy, const Window& window, const Tensor& dx) override {
    if (dx.count() == 0) return;
    auto& held = average(dx.shape(), dy.shape(), window);
    run(held.backward, DNNL_ARG_DIFF_DST, dy, DNNL_ARG_DIFF_SRC, dx);
  }

 private:
  // In bf16 oneDNN rounds gradients once for each window that an element is in: it gets f32.
  void run(HeldPrimitive& primitive, int from_argument, const Tensor& from, int to_argument, const Tensor& to) {
    const auto as_f32 = [&](const Tensor& x) {
      return x.dtype() == DType::kF32 ? x : Tensor::empty(allocator_, x.shape());
    };
    const Tensor wide_from = as_f32(from), wide_to = as_f32(to);
    if (from.dtype() == DType::kBF16) convert_all(from.data<BFloat16>(), wide_from.f32(), from.count());
    primitive.bind(from_argument, wide_from);
    primitive.bind(to_argument, wide_to);
    primitive.run();
    if (to.dtype() == DType::kBF16) convert_all(wide_to.f32(), to.data<BFloat16>(), to.count());
  }

  Average& average(const Shape& xs, const Shape& ys, const Window& window) {
    PrimitiveKey key{};
    std::size_t at = 0;
    for (const Shape* shape : {&xs, &ys})
      for (int i = 0; i < 4; ++i) key[at++] = (*shape)[i];
    for (const auto* pair : {&window.kernel, &window.stride, &window.padding})
      for (const auto d : *pair) key[at++] = d;
    auto& held = averages_[key];
    if (!held.forward) held = make(xs, ys, window);
    return held;
  }

  Average make(const Shape& xs, const Shape& ys, const Window& window) {
    const auto algorithm = dnnl::algorithm::pooling_avg_include_padding;
    const auto x = f32_desc({xs[0], xs[3], xs[1], xs[2]}, Tag::nhwc);
    const auto y = f32_desc({ys[0], ys[3], ys[1], ys[2]}, Tag::nhwc);
    const memory::dims strides{window.stride[0], window.stride[1]}, kernel{window.kernel[0], window.kernel[1]};
    // A stride that does not divide the input leaves rows out at the far edge: negative padding there says so.
    memory::dims before{window.padding[0], window.padding[1]}, after(2);
    for (std::size_t a = 0; a < 2; ++a)
      after[a] = (ys[static_cast<int>(a) + 1] - 1) * strides[a] + kernel[a] - xs[static_cast<int>(a) + 1] - before[a];

    const memory::dims undilated{0, 0};
    const auto forward =
        describe<PoolingForward>(onednn_.engine(), user_scratchpad(), dnnl::prop_kind::forward_training, algorithm, x,
                                 y, strides, kernel, undilated, before, after);
    const auto backward = describe_backward<PoolingBackward>(onednn_.engine(), user_scratchpad(), forward, algorithm, x,
                                                             y, strides, kernel, undilated, before, after);
    Average made;
    made.forward = HeldPrimitive(onednn_, PoolingForward(forward), {{DNNL_ARG_SRC, x}, {DNNL_ARG_DST, y}},
                                 forward.scratchpad_desc());
    made.backward = HeldPrimitive(onednn_, PoolingBackward(backward), {{DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_DIFF_SRC, x}},
                                  backward.scratchpad_desc());
    return made;
  }

  OneDnn& onednn_;
  CachingAllocator& allocator_;
  PrimitiveMap<Average> averages_;
};

}  // namespace

std::unique_ptr<PoolKernels> make_pool_kernels(OneDnn& onednn, CachingAllocator& allocator) {
  return std::make_unique<CpuPool>(onednn, allocator);
}

}  // namespace lockstep::nn::cpu
