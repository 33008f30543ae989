#include "lockstep/nn/ops/pool.h"

#include <limits>
#include <type_traits>

#include "base/error.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

// Extents of one sample, all within 31 bits. `packs` of channels make a pixel.
struct Geometry {
  int h, w, packs, out_h, out_w;
  int kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
  unsigned count;  // packs of the larger side that are worked on: a sample's, times the samples of this launch
};

template <class Choice>
constexpr Choice kNowhere = std::numeric_limits<Choice>::max();  // no place in a window

// Where a pack lies: pixel (row, column) of sample n.
struct PackPlace {
  unsigned n;
  int row, column, pack;
};
__device__ PackPlace pack_place(unsigned i, int h, int w, int packs) {
  const unsigned pixel = i / static_cast<unsigned>(packs), line = pixel / static_cast<unsigned>(w);
  const unsigned n = line / static_cast<unsigned>(h);
  return {n, static_cast<int>(line - n * static_cast<unsigned>(h)),
          static_cast<int>(pixel - line * static_cast<unsigned>(w)),
          static_cast<int>(i - pixel * static_cast<unsigned>(packs))};
}
__device__ std::int64_t index_of(std::int64_t n, int row, int column, int pack, int h, int w, int packs) {
  return ((n * h + row) * w + column) * packs + pack;
}

// Outputs whose windows reach an input at `at` (padding included): [first, end).
struct Reach {
  int first, end;
};
__device__ Reach reach_of(int at, int kernel, int stride, int outputs) {
  const int before = at - kernel + stride;  // the first of them starts after at - kernel
  const int first = before < 0 ? 0 : before / stride, last = at / stride;
  return {first, last + 1 < outputs ? last + 1 : outputs};
}

// One thread a pack of y. kExtent is the window's, both ways, where it is known: then its elements are read at once.
// A larger element takes the place of the best so far, and so does NaN, which nothing but another NaN replaces.
template <int kWidth, int kExtent, class T, class Choice>
__global__ void __launch_bounds__(kBlock) max_forward_kernel(Geometry g, bool relu, const T* x, T* y, Choice* choices) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= g.count) return;
  const PackPlace at = pack_place(i, g.out_h, g.out_w, g.packs);
  const int top = at.row * g.stride_h - g.padding_h, left = at.column * g.stride_w - g.padding_w;
  float best[kWidth];
  int chosen[kWidth];
  for (int k = 0; k < kWidth; ++k) {
    best[k] = -std::numeric_limits<float>::infinity();
    chosen[k] = kNowhere<Choice>;
  }
  bool begun = false;
  const auto take = [&](const Pack<T, kWidth>& values, int tap) {
    for (int k = 0; k < kWidth; ++k) {
      const float value = to_float(values.of[k]);
      const bool wins = !begun || value > best[k] || value != value;
      best[k] = wins ? value : best[k];
      chosen[k] = wins ? tap : chosen[k];
    }
    begun = true;
  };
  if constexpr (kExtent > 0) {
    Pack<T, kWidth> values[kExtent * kExtent];
    bool inside[kExtent * kExtent];
    for (int a = 0; a < kExtent; ++a)
      for (int b = 0; b < kExtent; ++b) {
        const int row = top + a, column = left + b, tap = a * kExtent + b;
        inside[tap] = row >= 0 && row < g.h && column >= 0 && column < g.w;
        if (inside[tap])
          values[tap] = load_pack<kWidth>(x + index_of(at.n, row, column, at.pack, g.h, g.w, g.packs) * kWidth);
      }
    for (int tap = 0; tap < kExtent * kExtent; ++tap)
      if (inside[tap]) take(values[tap], tap);
  } else {
    for (int a = 0; a < g.kernel_h; ++a)
      for (int b = 0; b < g.kernel_w; ++b) {
        const int row = top + a, column = left + b;
        if (row < 0 || row >= g.h || column < 0 || column >= g.w) continue;
        take(load_pack<kWidth>(x + index_of(at.n, row, column, at.pack, g.h, g.w, g.packs) * kWidth),
             a * g.kernel_w + b);
      }
  }
  Pack<T, kWidth> made;
  Pack<Choice, kWidth> made_choices;
  for (int k = 0; k < kWidth; ++k) {
    const bool nowhere = relu && !(best[k] > 0.0f);
    made.of[k] = from_float<T>(relu && best[k] < 0.0f ? 0.0f : best[k]);
    made_choices.of[k] = nowhere ? kNowhere<Choice> : static_cast<Choice>(chosen[k]);
  }
  const std::int64_t to = std::int64_t{i} * kWidth;
  store_pack(y + to, made);
  if (choices != nullptr) store_pack(choices + to, made_choices);
}

// One thread a pack of dx: the windows that reach it, in their order.
template <int kWidth, class T, class Choice>
__global__ void __launch_bounds__(kBlock) max_backward_kernel(Geometry g, const T* dy, const Choice* choices, T* dx) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= g.count) return;
  const PackPlace at = pack_place(i, g.h, g.w, g.packs);
  const int down = at.row + g.padding_h, across = at.column + g.padding_w;
  const Reach rows = reach_of(down, g.kernel_h, g.stride_h, g.out_h);
  const Reach columns = reach_of(across, g.kernel_w, g.stride_w, g.out_w);
  float sum[kWidth] = {};
  for (int row = rows.first; row < rows.end; ++row)
    for (int column = columns.first; column < columns.end; ++column) {
      const int tap = (down - row * g.stride_h) * g.kernel_w + across - column * g.stride_w;
      const std::int64_t from = index_of(at.n, row, column, at.pack, g.out_h, g.out_w, g.packs) * kWidth;
      const auto chosen = load_pack<kWidth>(choices + from);
      const auto gradient = load_pack<kWidth>(dy + from);
      for (int k = 0; k < kWidth; ++k)
        sum[k] += static_cast<int>(chosen.of[k]) == tap ? to_float(gradient.of[k]) : 0.0f;
    }
  Pack<T, kWidth> made;
  for (int k = 0; k < kWidth; ++k) made.of[k] = from_float<T>(sum[k]);
  store_pack(dx + std::int64_t{i} * kWidth, made);
}

// One thread a pack of y.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock) average_forward_kernel(Geometry g, const T* x, T* y) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= g.count) return;
  const PackPlace at = pack_place(i, g.out_h, g.out_w, g.packs);
  const int top = at.row * g.stride_h - g.padding_h, left = at.column * g.stride_w - g.padding_w;
  float sum[kWidth] = {};
  for (int a = 0; a < g.kernel_h; ++a)
    for (int b = 0; b < g.kernel_w; ++b) {
      const int row = top + a, column = left + b;
      if (row < 0 || row >= g.h || column < 0 || column >= g.w) continue;
      const auto values = load_pack<kWidth>(x + index_of(at.n, row, column, at.pack, g.h, g.w, g.packs) * kWidth);
      for (int k = 0; k < kWidth; ++k) sum[k] += to_float(values.of[k]);
    }
  const auto divisor = static_cast<float>(g.kernel_h * g.kernel_w);
  Pack<T, kWidth> made;
  for (int k = 0; k < kWidth; ++k) made.of[k] = from_float<T>(sum[k] / divisor);
  store_pack(y + std::int64_t{i} * kWidth, made);
}

// Large windows, as of a global average: a block has kWarp packs of y next to each other, and its warps share the
// elements of their windows.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock) average_shared_kernel(Geometry g, const T* x, T* y) {
  constexpr int kWarps = kBlock / kWarp;
  __shared__ float sums[kWidth][kBlock];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned i = blockIdx.x * kWarp + threadIdx.x % kWarp;
  float sum[kWidth] = {};
  if (i < g.count) {
    const PackPlace at = pack_place(i, g.out_h, g.out_w, g.packs);
    const int top = at.row * g.stride_h - g.padding_h, left = at.column * g.stride_w - g.padding_w;
    const int taps = g.kernel_h * g.kernel_w;
    for (int tap = warp; tap < taps; tap += kWarps) {
      const int row = top + tap / g.kernel_w, column = left + tap % g.kernel_w;
      if (row < 0 || row >= g.h || column < 0 || column >= g.w) continue;
      const auto values = load_pack<kWidth>(x + index_of(at.n, row, column, at.pack, g.h, g.w, g.packs) * kWidth);
      for (int k = 0; k < kWidth; ++k) sum[k] += to_float(values.of[k]);
    }
  }
  for (int k = 0; k < kWidth; ++k) sums[k][threadIdx.x] = sum[k];
  __syncthreads();
  if (warp > 0 || i >= g.count) return;
  const auto divisor = static_cast<float>(g.kernel_h * g.kernel_w);
  Pack<T, kWidth> made;
  for (int k = 0; k < kWidth; ++k) {
    for (int other = 1; other < kWarps; ++other) sum[k] += sums[k][other * kWarp + threadIdx.x];
    made.of[k] = from_float<T>(sum[k] / divisor);
  }
  store_pack(y + std::int64_t{i} * kWidth, made);
}

// One thread a pack of dx: the windows that reach it, in their order.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock) average_backward_kernel(Geometry g, const T* dy, T* dx) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= g.count) return;
  const PackPlace at = pack_place(i, g.h, g.w, g.packs);
  const Reach rows = reach_of(at.row + g.padding_h, g.kernel_h, g.stride_h, g.out_h);
  const Reach columns = reach_of(at.column + g.padding_w, g.kernel_w, g.stride_w, g.out_w);
  float sum[kWidth] = {};
  for (int row = rows.first; row < rows.end; ++row)
    for (int column = columns.first; column < columns.end; ++column) {
      const auto gradient =
          load_pack<kWidth>(dy + index_of(at.n, row, column, at.pack, g.out_h, g.out_w, g.packs) * kWidth);
      for (int k = 0; k < kWidth; ++k) sum[k] += to_float(gradient.of[k]);
    }
  const auto divisor = static_cast<float>(g.kernel_h * g.kernel_w);
  Pack<T, kWidth> made;
  for (int k = 0; k < kWidth; ++k) made.of[k] = from_float<T>(sum[k] / divisor);
  store_pack(dx + std::int64_t{i} * kWidth, made);
}

__device__ AdaptiveStretch stretch(int at, int here, int there) { return adaptive_stretch(at, here, there); }
__device__ int length_of(const AdaptiveStretch& of) { return static_cast<int>(of.end - of.begin); }

// One thread a pack of y.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock) adaptive_forward_kernel(Geometry g, const T* x, T* y) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= g.count) return;
  const PackPlace at = pack_place(i, g.out_h, g.out_w, g.packs);
  const AdaptiveStretch rows = stretch(at.row, g.out_h, g.h), columns = stretch(at.column, g.out_w, g.w);
  float sum[kWidth] = {};
  for (auto row = static_cast<int>(rows.begin); row < rows.end; ++row)
    for (auto column = static_cast<int>(columns.begin); column < columns.end; ++column) {
      const auto values = load_pack<kWidth>(x + index_of(at.n, row, column, at.pack, g.h, g.w, g.packs) * kWidth);
      for (int k = 0; k < kWidth; ++k) sum[k] += to_float(values.of[k]);
    }
  const auto divisor = static_cast<float>(length_of(rows) * length_of(columns));
  Pack<T, kWidth> made;
  for (int k = 0; k < kWidth; ++k) made.of[k] = from_float<T>(sum[k] / divisor);
  store_pack(y + std::int64_t{i} * kWidth, made);
}

// One thread a pack of dx: the windows that it is in, in their order.
template <int kWidth, class T>
__global__ void __launch_bounds__(kBlock) adaptive_backward_kernel(Geometry g, const T* dy, T* dx) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= g.count) return;
  const PackPlace at = pack_place(i, g.h, g.w, g.packs);
  const AdaptiveStretch rows = stretch(at.row, g.h, g.out_h), columns = stretch(at.column, g.w, g.out_w);
  float sum[kWidth] = {};
  for (auto row = static_cast<int>(rows.begin); row < rows.end; ++row)
    for (auto column = static_cast<int>(columns.begin); column < columns.end; ++column) {
      const auto divisor =
          static_cast<float>(length_of(stretch(row, g.out_h, g.h)) * length_of(stretch(column, g.out_w, g.w)));
      const auto gradient =
          load_pack<kWidth>(dy + index_of(at.n, row, column, at.pack, g.out_h, g.out_w, g.packs) * kWidth);
      for (int k = 0; k < kWidth; ++k) sum[k] += to_float(gradient.of[k]) / divisor;
    }
  Pack<T, kWidth> made;
  for (int k = 0; k < kWidth; ++k) made.of[k] = from_float<T>(sum[k]);
  store_pack(dx + std::int64_t{i} * kWidth, made);
}

class CudaPool final : public PoolKernels {
 public:
  explicit CudaPool(Context& context) : context_(context) {}

  void max_forward(const Tensor& x, const Window& window, Epilogue epilogue, const Tensor& y,
                   const Tensor& choices) override {
    const OpProfileScope scope(context_, "max pooling", {&x, &y, &choices});
    const bool relu = epilogue == Epilogue::kRelu;
    with_types(y, window, [&]<class T, class Choice>(T, Choice) {
      const auto* const from = x.data<T>();
      auto* const to = y.data<T>();
      Choice* const chosen = choices.defined() ? choices.data<Choice>() : nullptr;
      const auto start = [&](auto width, auto extent) {
        constexpr auto kKernel = max_forward_kernel<decltype(width)::value, decltype(extent)::value, T, Choice>;
        for_pieces(x, y, window, width, y, kBlock, [&](const Geometry& g, std::int64_t n, dim3 grid) {
          launch("max pooling", kKernel, grid, dim3(kBlock), context_.stream, g, relu, from + n * sample(x),
                 to + n * sample(y), chosen == nullptr ? nullptr : chosen + n * sample(y));
        });
      };
      constexpr int kWide = kVector<T, Choice>;
      with_width<kWide>(
          x.size(3) % kWide == 0 && fits_packs(from, kWide) && fits_packs(to, kWide) && fits_packs(chosen, kWide),
          [&](auto width) {
            if constexpr (sizeof(Choice) == 1) {
              if (is_square(window, 2)) return start(width, std::integral_constant<int, 2>{});
              if (is_square(window, 3)) return start(width, std::integral_constant<int, 3>{});
            }
            start(width, std::integral_constant<int, 0>{});
          });
    });
  }

  void max_backward(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx) override {
    const OpProfileScope scope(context_, "max pooling's backward", {&dy, &choices, &dx});
    with_types(dx, window, [&]<class T, class Choice>(T, Choice) {
      const auto* const from = dy.data<T>();
      const auto* const chosen = choices.data<Choice>();
      auto* const to = dx.data<T>();
      constexpr int kWide = kVector<T, Choice>;
      with_width<kWide>(
          dx.size(3) % kWide == 0 && fits_packs(from, kWide) && fits_packs(to, kWide) && fits_packs(chosen, kWide),
          [&](auto width) {
            constexpr auto kKernel = max_backward_kernel<decltype(width)::value, T, Choice>;
            for_pieces(dx, dy, window, width, dx, kBlock, [&](const Geometry& g, std::int64_t n, dim3 grid) {
              launch("max pooling's backward", kKernel, grid, dim3(kBlock), context_.stream, g, from + n * sample(dy),
                     chosen + n * sample(dy), to + n * sample(dx));
            });
          });
    });
  }

  void average_forward(const Tensor& x, const Window& window, const Tensor& y) override {
    const OpProfileScope scope(context_, "average pooling", {&x, &y});
    const bool shared = window.kernel[0] * window.kernel[1] >= kSharedWindow;
    with_float_type(y.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(x, y), [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        const auto kernel = shared ? average_shared_kernel<kWidth, T> : average_forward_kernel<kWidth, T>;
        for_pieces(x, y, window, width, y, shared ? kWarp : kBlock, [&](const Geometry& g, std::int64_t n, dim3 grid) {
          launch("average pooling", kernel, grid, dim3(kBlock), context_.stream, g, x.data<T>() + n * sample(x),
                 y.data<T>() + n * sample(y));
        });
      });
    });
  }

  void average_backward(const Tensor& dy, const Window& window, const Tensor& dx) override {
    const OpProfileScope scope(context_, "average pooling's backward", {&dy, &dx});
    with_float_type(dx.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(dx, dy), [&](auto width) {
        constexpr auto kKernel = average_backward_kernel<decltype(width)::value, T>;
        for_pieces(dx, dy, window, width, dx, kBlock, [&](const Geometry& g, std::int64_t n, dim3 grid) {
          launch("average pooling's backward", kKernel, grid, dim3(kBlock), context_.stream, g,
                 dy.data<T>() + n * sample(dy), dx.data<T>() + n * sample(dx));
        });
      });
    });
  }

  void adaptive_average_forward(const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "average pooling", {&x, &y});
    with_float_type(y.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(x, y), [&](auto width) {
        constexpr auto kKernel = adaptive_forward_kernel<decltype(width)::value, T>;
        for_pieces(x, y, Window{}, width, y, kBlock, [&](const Geometry& g, std::int64_t n, dim3 grid) {
          launch("adaptive average pooling", kKernel, grid, dim3(kBlock), context_.stream, g,
                 x.data<T>() + n * sample(x), y.data<T>() + n * sample(y));
        });
      });
    });
  }

  void adaptive_average_backward(const Tensor& dy, const Tensor& dx) override {
    const OpProfileScope scope(context_, "average pooling's backward", {&dy, &dx});
    with_float_type(dx.dtype(), [&]<class T>(T) {
      with_width<kVector<T>>(takes_packs<T>(dx, dy), [&](auto width) {
        constexpr auto kKernel = adaptive_backward_kernel<decltype(width)::value, T>;
        for_pieces(dx, dy, Window{}, width, dx, kBlock, [&](const Geometry& g, std::int64_t n, dim3 grid) {
          launch("adaptive average pooling's backward", kKernel, grid, dim3(kBlock), context_.stream, g,
                 dy.data<T>() + n * sample(dy), dx.data<T>() + n * sample(dx));
        });
      });
    });
  }

 private:
  static constexpr int kSharedWindow = 16;  // elements, from which on several warps share a window
  static constexpr std::int64_t kMostPacks = 0x7fffffff;

  static std::int64_t sample(const Tensor& t) { return t.size(1) * t.size(2) * t.size(3); }
  static bool is_square(const Window& window, std::int64_t extent) {
    return window.kernel[0] == extent && window.kernel[1] == extent;
  }
  template <class T>
  static bool takes_packs(const Tensor& x, const Tensor& y) {
    return x.size(3) % kVector<T> == 0 && fits_packs(x.data<T>(), kVector<T>) && fits_packs(y.data<T>(), kVector<T>);
  }

  template <class F>
  static void with_types(const Tensor& activation, const Window& window, F&& run) {
    with_float_type(activation.dtype(), [&]<class T>(T type) {
      if (choice_type(window) == DType::kU8)
        run(type, std::uint8_t{});
      else
        run(type, std::int32_t{});
    });
  }

  // Calls start(geometry, first sample, grid) for as many samples at a time as 31 bits can number packs of: those of
  // `over`, which is x or y, `per_block` a block.
  template <class F>
  static void for_pieces(const Tensor& x, const Tensor& y, const Window& window, int width, const Tensor& over,
                         int per_block, F&& start) {
    if (over.count() == 0) return;
    LOCKSTEP_ASSERT(sample(x) <= kMostPacks && sample(y) <= kMostPacks, "pooling of {}", to_string(x.shape()));
    const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
    Geometry g{.h = narrow(x.size(1)),
               .w = narrow(x.size(2)),
               .packs = narrow(x.size(3) / width),
               .out_h = narrow(y.size(1)),
               .out_w = narrow(y.size(2)),
               .kernel_h = narrow(window.kernel[0]),
               .kernel_w = narrow(window.kernel[1]),
               .stride_h = narrow(window.stride[0]),
               .stride_w = narrow(window.stride[1]),
               .padding_h = narrow(window.padding[0]),
               .padding_w = narrow(window.padding[1]),
               .count = 0};
    const std::int64_t packs = sample(over) / width, at_once = kMostPacks / packs;
    for (std::int64_t n = 0; n < over.size(0); n += at_once) {
      const std::int64_t count = at_most(over.size(0) - n, at_once) * packs;
      g.count = static_cast<unsigned>(count);
      start(g, n, dim3(static_cast<unsigned>(ceil_div(count, per_block))));
    }
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<PoolKernels> make_pool_kernels(Context& context) { return std::make_unique<CudaPool>(context); }

}  // namespace lockstep::nn::cuda
