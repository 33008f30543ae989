#include "nn/ops/cpu/kernels.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/parallel.h"

// What the loops over channels are made of must become part of the clones that call it.
#define LOCKSTEP_IN_CLONE [[gnu::always_inline]] inline

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;   // elements of x a thread
constexpr std::int64_t kChannels = 256;  // done at a time: what is at hand of them stays in the first cache

struct Geometry {
  std::int64_t h, w, c, out_h, out_w;
  Window window;

  // Two by two, side by side, nothing left over at the edges by padding: by far the most frequent.
  bool is_two_by_two() const { return window.kernel == std::array<std::int64_t, 2>{2, 2} && tiles(); }
  // No element belongs to two windows, and none is padding.
  bool tiles() const { return window.stride == window.kernel && window.padding == std::array<std::int64_t, 2>{0, 0}; }
  // And none to no window.
  bool covers() const { return tiles() && out_h * window.kernel[0] == h && out_w * window.kernel[1] == w; }
  std::int64_t x_count() const { return h * w * c; }
  std::int64_t y_count() const { return out_h * out_w * c; }
};

Geometry geometry_of(const Shape& x, const Shape& y, const Window& window) {
  return {.h = x[1], .w = x[2], .c = x[3], .out_h = y[1], .out_w = y[2], .window = window};
}

template <class Choice>
constexpr Choice kNone = std::numeric_limits<Choice>::max();

// Which elements of its window output pixel `i` has along one axis: [begin, end), the first of them `at` in x.
struct Taps {
  std::int64_t begin, end, at;
};
LOCKSTEP_IN_CLONE Taps taps_of(const Geometry& g, std::size_t axis, std::int64_t i) {
  const std::int64_t first = i * g.window.stride[axis] - g.window.padding[axis];
  const std::int64_t begin = std::max<std::int64_t>(0, -first);
  return {begin, std::min(g.window.kernel[axis], (axis == 0 ? g.h : g.w) - first), first + begin};
}

LOCKSTEP_IN_CLONE bool wins(float value, float best) { return (value > best) | (value != value); }

LOCKSTEP_IN_CLONE float relu_of(bool relu, float value) { return relu && value < 0.0f ? 0.0f : value; }

// `n` elements as f32: in `memory`, or where they are. Compilers do not vectorise a loop that mixes f32, bf16 and
// bytes.
LOCKSTEP_IN_CLONE const float* widened(const float* from, std::int64_t, float*) { return from; }
LOCKSTEP_IN_CLONE const float* widened(const BFloat16* from, std::int64_t n, float* memory) {
  for (std::int64_t k = 0; k < n; ++k) memory[k] = wide(from[k]);
  return memory;
}
LOCKSTEP_IN_CLONE float* place_for(float* to, float*) { return to; }
LOCKSTEP_IN_CLONE float* place_for(BFloat16*, float* memory) { return memory; }
LOCKSTEP_IN_CLONE void put(const float*, std::int64_t, float*) {}
LOCKSTEP_IN_CLONE void put(const float* from, std::int64_t n, BFloat16* to) {
  for (std::int64_t k = 0; k < n; ++k) to[k] = narrow<BFloat16>(from[k]);
}

LOCKSTEP_IN_CLONE void largest_of_four(const float* __restrict a, const float* __restrict b, const float* __restrict c,
                                       const float* __restrict d, std::int64_t n, bool relu, float* __restrict y,
                                       std::uint8_t* __restrict choices) {
  for (std::int64_t k = 0; k < n; ++k) {
    float best = a[k];
    int at = 0;
    bool taken = wins(b[k], best);
    best = taken ? b[k] : best;
    at = taken ? 1 : at;
    taken = wins(c[k], best);
    best = taken ? c[k] : best;
    at = taken ? 2 : at;
    taken = wins(d[k], best);
    best = taken ? d[k] : best;
    at = taken ? 3 : at;
    const int none = kNone<std::uint8_t>;
    at = relu && !(best > 0.0f) ? none : at;
    y[k] = relu_of(relu, best);
    choices[k] = static_cast<std::uint8_t>(at);
  }
}

// Row `i` of a sample's result; x is the sample, y and choices the row.
template <class T>
LOCKSTEP_IN_CLONE void row_of_two_by_two(const Geometry& g, const T* x, std::int64_t i, bool relu, T* __restrict y,
                                         std::uint8_t* __restrict choices) {
  const std::int64_t c = g.c, down = g.w * g.c;
  float memory[sizeof(T) < sizeof(float) ? 5 : 1][sizeof(T) < sizeof(float) ? kChannels : 1];
  constexpr int kLast = sizeof(T) < sizeof(float) ? 4 : 0, kOne = kLast / 4;  // of what f32 does not use
  for (std::int64_t j = 0; j < g.out_w; ++j, y += c, choices += c)
    for (std::int64_t first = 0; first < c; first += kChannels) {
      const std::int64_t n = std::min(kChannels, c - first);
      const T* const a = x + 2 * (i * down + j * c) + first;
      float* const to = place_for(y + first, memory[kLast]);
      largest_of_four(widened(a, n, memory[0]), widened(a + c, n, memory[kOne]), widened(a + down, n, memory[2 * kOne]),
                      widened(a + down + c, n, memory[3 * kOne]), n, relu, to, choices + first);
      put(to, n, y + first);
    }
}

template <class T, class Choice>
LOCKSTEP_IN_CLONE void row_of_any(const Geometry& g, const T* x, std::int64_t i, bool relu, T* __restrict y,
                                  Choice* __restrict choices) {
  std::int32_t at[kChannels];
  const Taps rows = taps_of(g, 0, i);
  for (std::int64_t j = 0; j < g.out_w; ++j) {
    const Taps columns = taps_of(g, 1, j);
    for (std::int64_t c0 = 0; c0 < g.c; c0 += kChannels) {
      const std::int64_t n = std::min(kChannels, g.c - c0);
      const T* const first = x + (rows.at * g.w + columns.at) * g.c + c0;
      T* __restrict best = y + j * g.c + c0;
      bool begun = false;
      for (std::int64_t a = rows.begin; a < rows.end; ++a)
        for (std::int64_t b = columns.begin; b < columns.end; ++b) {
          const T* __restrict values = first + ((a - rows.begin) * g.w + (b - columns.begin)) * g.c;
          const auto tap = static_cast<std::int32_t>(a * g.window.kernel[1] + b);
          if (!begun) {
            for (std::int64_t k = 0; k < n; ++k) best[k] = values[k];
            for (std::int64_t k = 0; k < n; ++k) at[k] = tap;
            begun = true;
            continue;
          }
          for (std::int64_t k = 0; k < n; ++k) {
            const bool taken = wins(wide(values[k]), wide(best[k]));
            best[k] = narrow<T>(taken ? wide(values[k]) : wide(best[k]));
            at[k] = taken ? tap : at[k];
          }
        }
      Choice* __restrict to = choices + j * g.c + c0;
      for (std::int64_t k = 0; k < n; ++k) {
        to[k] = relu && !(wide(best[k]) > 0.0f) ? kNone<Choice> : static_cast<Choice>(at[k]);
        best[k] = narrow<T>(relu_of(relu, wide(best[k])));
      }
    }
  }
}

template <class T>
LOCKSTEP_IN_CLONE void back_row_of_two_by_two(const Geometry& g, const T* __restrict dy,
                                              const std::uint8_t* __restrict choices, std::int64_t i, T* dx) {
  const std::int64_t c = g.c, down = g.w * g.c;
  for (std::int64_t j = 0; j < g.out_w; ++j, dy += c, choices += c)
    for (int tap = 0; tap < 4; ++tap) {
      T* __restrict to = dx + 2 * (i * down + j * c) + (tap / 2) * down + (tap % 2) * c;
      const auto wanted = static_cast<std::uint8_t>(tap);
      for (std::int64_t k = 0; k < c; ++k) to[k] = keep_if(choices[k] == wanted, dy[k]);
    }
}

// dx may be f32 where dy is bf16: a sum of several gradients is rounded once.
template <class T, class Sum, class Choice>
LOCKSTEP_IN_CLONE void back_row_of_any(const Geometry& g, const T* dy, const Choice* choices, std::int64_t i, Sum* dx) {
  const Taps rows = taps_of(g, 0, i);
  for (std::int64_t j = 0; j < g.out_w; ++j) {
    const Taps columns = taps_of(g, 1, j);
    const T* __restrict from = dy + j * g.c;
    const Choice* __restrict chosen = choices + j * g.c;
    for (std::int64_t a = rows.begin; a < rows.end; ++a)
      for (std::int64_t b = columns.begin; b < columns.end; ++b) {
        Sum* __restrict to = dx + ((rows.at + a - rows.begin) * g.w + columns.at + b - columns.begin) * g.c;
        const auto tap = static_cast<Choice>(a * g.window.kernel[1] + b);
        for (std::int64_t k = 0; k < g.c; ++k)
          to[k] = narrow<Sum>(wide(to[k]) + (chosen[k] == tap ? wide(from[k]) : 0.0f));
      }
  }
}

// Rows [begin, end) of all samples' results.
template <class T>
LOCKSTEP_SIMD_CLONES void forward_rows(const Geometry& g, const T* x, bool relu, std::int64_t begin, std::int64_t end,
                                       T* y, std::uint8_t* choices) {
  const bool two = g.is_two_by_two();
  const std::int64_t width = g.out_w * g.c;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const sample = x + row / g.out_h * g.x_count();
    if (two)
      row_of_two_by_two(g, sample, row % g.out_h, relu, y + row * width, choices + row * width);
    else
      row_of_any(g, sample, row % g.out_h, relu, y + row * width, choices + row * width);
  }
}

// Windows of more than 255 elements. Nobody waits for them: one instruction set will do.
template <class T>
void forward_rows(const Geometry& g, const T* x, bool relu, std::int64_t begin, std::int64_t end, T* y,
                  std::int32_t* choices) {
  const std::int64_t width = g.out_w * g.c;
  for (std::int64_t row = begin; row < end; ++row)
    row_of_any(g, x + row / g.out_h * g.x_count(), row % g.out_h, relu, y + row * width, choices + row * width);
}

template <class T>
LOCKSTEP_SIMD_CLONES void backward_two_by_two(const Geometry& g, const T* dy, const std::uint8_t* choices,
                                              std::int64_t begin, std::int64_t end, T* dx) {
  const std::int64_t width = g.out_w * g.c;
  for (std::int64_t row = begin; row < end; ++row)
    back_row_of_two_by_two(g, dy + row * width, choices + row * width, row % g.out_h, dx + row / g.out_h * g.x_count());
}

// One sample.
template <class T, class Sum>
LOCKSTEP_SIMD_CLONES void backward_sample(const Geometry& g, const T* dy, const std::uint8_t* choices, Sum* dx) {
  for (std::int64_t i = 0; i < g.out_h; ++i)
    back_row_of_any(g, dy + i * g.out_w * g.c, choices + i * g.out_w * g.c, i, dx);
}

template <class T, class Sum>
void backward_sample(const Geometry& g, const T* dy, const std::int32_t* choices, Sum* dx) {
  for (std::int64_t i = 0; i < g.out_h; ++i)
    back_row_of_any(g, dy + i * g.out_w * g.c, choices + i * g.out_w * g.c, i, dx);
}

LOCKSTEP_SIMD_CLONES
void round_all(const float* from, std::int64_t count, BFloat16* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = narrow<BFloat16>(from[i]);
}

template <class T, class Choice>
void forward_as(const Tensor& x, const Window& window, bool relu, const Tensor& y, const Tensor& choices) {
  const Geometry g = geometry_of(x.shape(), y.shape(), window);
  const std::int64_t row_cost = std::max<std::int64_t>(1, g.x_count() / g.out_h);
  parallel_for(y.size(0) * g.out_h, std::max<std::int64_t>(1, kGrain / row_cost),
               [&](std::int64_t begin, std::int64_t end) {
                 forward_rows(g, x.data<T>(), relu, begin, end, y.data<T>(), choices.data<Choice>());
               });
}

template <class T, class Choice>
void backward_as(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx,
                 CachingAllocator& allocator) {
  const Geometry g = geometry_of(dx.shape(), dy.shape(), window);
  const auto* const chosen = choices.data<Choice>();
  if constexpr (sizeof(Choice) == 1) {
    if (g.is_two_by_two() && g.covers()) {
      const std::int64_t row_cost = std::max<std::int64_t>(1, g.x_count() / g.out_h);
      parallel_for(dy.size(0) * g.out_h, std::max<std::int64_t>(1, kGrain / row_cost),
                   [&](std::int64_t begin, std::int64_t end) {
                     backward_two_by_two(g, dy.data<T>(), chosen, begin, end, dx.data<T>());
                   });
      return;
    }
  }
  // Neighbouring rows may write to the same elements: a sample is one thread's.
  const bool apart = sizeof(T) < sizeof(float) && !g.tiles();
  const Tensor sums = apart ? Tensor::empty(allocator, {omp_get_max_threads(), g.x_count()}) : Tensor();
  const auto one = [&](std::int64_t n, auto* to) {
    std::fill_n(to, g.x_count(), std::remove_reference_t<decltype(*to)>());
    backward_sample(g, dy.data<T>() + n * g.y_count(), chosen + n * g.y_count(), to);
  };
  parallel_for(dy.size(0), std::max<std::int64_t>(1, kGrain / g.x_count()), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      T* const to = dx.data<T>() + n * g.x_count();
      if constexpr (sizeof(T) < sizeof(float)) {
        if (apart) {
          float* const sum = sums.f32() + omp_get_thread_num() * g.x_count();
          one(n, sum);
          round_all(sum, g.x_count(), to);
          continue;
        }
      }
      one(n, to);
    }
  });
}

}  // namespace

void max_pool_forward(const Tensor& x, const Window& window, bool relu, const Tensor& y, const Tensor& choices) {
  with_type(y.dtype(), [&](auto type) {
    if (choices.dtype() == DType::kU8)
      forward_as<decltype(type), std::uint8_t>(x, window, relu, y, choices);
    else
      forward_as<decltype(type), std::int32_t>(x, window, relu, y, choices);
  });
}

void max_pool_backward(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx,
                       CachingAllocator& allocator) {
  with_type(dx.dtype(), [&](auto type) {
    if (choices.dtype() == DType::kU8)
      backward_as<decltype(type), std::uint8_t>(dy, choices, window, dx, allocator);
    else
      backward_as<decltype(type), std::int32_t>(dy, choices, window, dx, allocator);
  });
}

}  // namespace lockstep::nn::cpu
