#include "nn/ops/cpu/max_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/cpu.h"
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

// Row `i` of a sample's result; x is the sample, y and choices the row.
LOCKSTEP_IN_CLONE void row_of_two_by_two(const Geometry& g, const float* x, std::int64_t i, bool relu,
                                         float* __restrict y, std::uint8_t* __restrict choices) {
  const std::int64_t c = g.c, down = g.w * g.c;
  for (std::int64_t j = 0; j < g.out_w; ++j, y += c, choices += c) {
    const float* const a = x + 2 * (i * down + j * c);
    for (std::int64_t k = 0; k < c; ++k) {
      float best = a[k];
      int at = 0;
      bool taken = wins(a[c + k], best);
      best = taken ? a[c + k] : best;
      at = taken ? 1 : at;
      taken = wins(a[down + k], best);
      best = taken ? a[down + k] : best;
      at = taken ? 2 : at;
      taken = wins(a[down + c + k], best);
      best = taken ? a[down + c + k] : best;
      at = taken ? 3 : at;
      const int none = kNone<std::uint8_t>;
      at = relu && !(best > 0.0f) ? none : at;
      y[k] = relu_of(relu, best);
      choices[k] = static_cast<std::uint8_t>(at);
    }
  }
}

template <class Choice>
LOCKSTEP_IN_CLONE void row_of_any(const Geometry& g, const float* x, std::int64_t i, bool relu, float* __restrict y,
                                  Choice* __restrict choices) {
  std::int32_t at[kChannels];
  const Taps rows = taps_of(g, 0, i);
  for (std::int64_t j = 0; j < g.out_w; ++j) {
    const Taps columns = taps_of(g, 1, j);
    for (std::int64_t c0 = 0; c0 < g.c; c0 += kChannels) {
      const std::int64_t n = std::min(kChannels, g.c - c0);
      const float* const first = x + (rows.at * g.w + columns.at) * g.c + c0;
      float* __restrict best = y + j * g.c + c0;
      bool begun = false;
      for (std::int64_t a = rows.begin; a < rows.end; ++a)
        for (std::int64_t b = columns.begin; b < columns.end; ++b) {
          const float* __restrict values = first + ((a - rows.begin) * g.w + (b - columns.begin)) * g.c;
          const auto tap = static_cast<std::int32_t>(a * g.window.kernel[1] + b);
          if (!begun) {
            for (std::int64_t k = 0; k < n; ++k) best[k] = values[k];
            for (std::int64_t k = 0; k < n; ++k) at[k] = tap;
            begun = true;
            continue;
          }
          for (std::int64_t k = 0; k < n; ++k) {
            const bool taken = wins(values[k], best[k]);
            best[k] = taken ? values[k] : best[k];
            at[k] = taken ? tap : at[k];
          }
        }
      Choice* __restrict to = choices + j * g.c + c0;
      for (std::int64_t k = 0; k < n; ++k) {
        to[k] = relu && !(best[k] > 0.0f) ? kNone<Choice> : static_cast<Choice>(at[k]);
        best[k] = relu_of(relu, best[k]);
      }
    }
  }
}

LOCKSTEP_IN_CLONE void back_row_of_two_by_two(const Geometry& g, const float* __restrict dy,
                                              const std::uint8_t* __restrict choices, std::int64_t i, float* dx) {
  const std::int64_t c = g.c, down = g.w * g.c;
  for (std::int64_t j = 0; j < g.out_w; ++j, dy += c, choices += c)
    for (int tap = 0; tap < 4; ++tap) {
      float* __restrict to = dx + 2 * (i * down + j * c) + (tap / 2) * down + (tap % 2) * c;
      const auto wanted = static_cast<std::uint8_t>(tap);
      for (std::int64_t k = 0; k < c; ++k) to[k] = choices[k] == wanted ? dy[k] : 0.0f;
    }
}

template <class Choice>
LOCKSTEP_IN_CLONE void back_row_of_any(const Geometry& g, const float* dy, const Choice* choices, std::int64_t i,
                                       float* dx) {
  const Taps rows = taps_of(g, 0, i);
  for (std::int64_t j = 0; j < g.out_w; ++j) {
    const Taps columns = taps_of(g, 1, j);
    const float* __restrict from = dy + j * g.c;
    const Choice* __restrict chosen = choices + j * g.c;
    for (std::int64_t a = rows.begin; a < rows.end; ++a)
      for (std::int64_t b = columns.begin; b < columns.end; ++b) {
        float* __restrict to = dx + ((rows.at + a - rows.begin) * g.w + columns.at + b - columns.begin) * g.c;
        const auto tap = static_cast<Choice>(a * g.window.kernel[1] + b);
        for (std::int64_t k = 0; k < g.c; ++k) to[k] += chosen[k] == tap ? from[k] : 0.0f;
      }
  }
}

// Rows [begin, end) of all samples' results.
LOCKSTEP_SIMD_CLONES
void forward_rows(const Geometry& g, const float* x, bool relu, std::int64_t begin, std::int64_t end, float* y,
                  std::uint8_t* choices) {
  const bool two = g.is_two_by_two();
  const std::int64_t width = g.out_w * g.c;
  for (std::int64_t row = begin; row < end; ++row) {
    const float* const sample = x + row / g.out_h * g.x_count();
    if (two)
      row_of_two_by_two(g, sample, row % g.out_h, relu, y + row * width, choices + row * width);
    else
      row_of_any(g, sample, row % g.out_h, relu, y + row * width, choices + row * width);
  }
}

// Windows of more than 255 elements. Nobody waits for them: one instruction set will do.
void forward_rows(const Geometry& g, const float* x, bool relu, std::int64_t begin, std::int64_t end, float* y,
                  std::int32_t* choices) {
  const std::int64_t width = g.out_w * g.c;
  for (std::int64_t row = begin; row < end; ++row)
    row_of_any(g, x + row / g.out_h * g.x_count(), row % g.out_h, relu, y + row * width, choices + row * width);
}

LOCKSTEP_SIMD_CLONES
void backward_rows(const Geometry& g, const float* dy, const std::uint8_t* choices, std::int64_t begin,
                   std::int64_t end, float* dx) {
  const bool two = g.is_two_by_two();
  const std::int64_t width = g.out_w * g.c;
  for (std::int64_t row = begin; row < end; ++row) {
    float* const sample = dx + row / g.out_h * g.x_count();
    if (two)
      back_row_of_two_by_two(g, dy + row * width, choices + row * width, row % g.out_h, sample);
    else
      back_row_of_any(g, dy + row * width, choices + row * width, row % g.out_h, sample);
  }
}

void backward_rows(const Geometry& g, const float* dy, const std::int32_t* choices, std::int64_t begin,
                   std::int64_t end, float* dx) {
  const std::int64_t width = g.out_w * g.c;
  for (std::int64_t row = begin; row < end; ++row)
    back_row_of_any(g, dy + row * width, choices + row * width, row % g.out_h, dx + row / g.out_h * g.x_count());
}

template <class Choice>
void forward_as(const Tensor& x, const Window& window, bool relu, const Tensor& y, const Tensor& choices) {
  const Geometry g = geometry_of(x.shape(), y.shape(), window);
  const std::int64_t row_cost = std::max<std::int64_t>(1, g.x_count() / g.out_h);
  parallel_for(y.size(0) * g.out_h, std::max<std::int64_t>(1, kGrain / row_cost),
               [&](std::int64_t begin, std::int64_t end) {
                 forward_rows(g, x.f32(), relu, begin, end, y.f32(), choices.data<Choice>());
               });
}

template <class Choice>
void backward_as(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx) {
  const Geometry g = geometry_of(dx.shape(), dy.shape(), window);
  const auto* const chosen = choices.data<Choice>();
  if (g.is_two_by_two() && g.covers()) {
    const std::int64_t row_cost = std::max<std::int64_t>(1, g.x_count() / g.out_h);
    parallel_for(
        dy.size(0) * g.out_h, std::max<std::int64_t>(1, kGrain / row_cost),
        [&](std::int64_t begin, std::int64_t end) { backward_rows(g, dy.f32(), chosen, begin, end, dx.f32()); });
    return;
  }
  // Neighbouring rows may write to the same elements: a sample is one thread's.
  parallel_for(dy.size(0), std::max<std::int64_t>(1, kGrain / g.x_count()), [&](std::int64_t begin, std::int64_t end) {
    std::memset(dx.f32() + begin * g.x_count(), 0,
                static_cast<std::size_t>((end - begin) * g.x_count()) * sizeof(float));
    backward_rows(g, dy.f32(), chosen, begin * g.out_h, end * g.out_h, dx.f32());
  });
}

}  // namespace

void max_pool_forward(const Tensor& x, const Window& window, bool relu, const Tensor& y, const Tensor& choices) {
  if (choices.dtype() == DType::kU8)
    forward_as<std::uint8_t>(x, window, relu, y, choices);
  else
    forward_as<std::int32_t>(x, window, relu, y, choices);
}

void max_pool_backward(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx) {
  if (choices.dtype() == DType::kU8)
    backward_as<std::uint8_t>(dy, choices, window, dx);
  else
    backward_as<std::int32_t>(dy, choices, window, dx);
}

}  // namespace lockstep::nn::cpu
