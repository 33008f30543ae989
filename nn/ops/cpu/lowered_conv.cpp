#include "nn/ops/cpu/lowered_conv.h"

#include <algorithm>

#include "base/cpu.h"
#include "nn/ops/cpu/column_moments.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/products.h"

namespace lockstep::nn::cpu {
namespace {

// What is copied at a time: enough rows for packed weights to pay, and not more than a last cache holds.
constexpr std::int64_t kElements = 1 << 19;
// With fewer the copies cost more than is won.
constexpr std::int64_t kLeastOutputs = 32, kLeastDepth = 32;

LOCKSTEP_SIMD_CLONES
void add_to(const float* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace

/// How x becomes rows: a row for each pixel of y, in it the window's pixels with their channels, zero where it hangs
/// over.
struct LoweredConv::Lowering {
  Lowering(const Shape& x, const Shape& w, const Shape& y, const Window& window)
      : images(x[0]),
        height(x[1]),
        width(x[2]),
        channels(x[3]),
        outputs(w[0]),
        y_height(y[1]),
        y_width(y[2]),
        kernel(window.kernel),
        stride(window.stride),
        padding(window.padding) {}

  bool is_plain() const {
    const auto all = [](const std::array<std::int64_t, 2>& sides, std::int64_t size) {
      return sides[0] == size && sides[1] == size;
    };
    return all(kernel, 1) && all(stride, 1) && all(padding, 0);
  }
  std::int64_t depth() const { return kernel[0] * kernel[1] * channels; }
  std::int64_t pixels() const { return y_height * y_width; }  // of an image of y

  /// Calls `body(first, some, scratch)` for all images, some at a time: as many as have their rows in kElements, or all
  /// where those are where they should be and there is no scratch memory.
  template <class Body>
  void for_each_part(CachingAllocator& allocator, Body&& body) const {
    const std::int64_t each = pixels() * depth();
    const std::int64_t most = is_plain() ? images : std::clamp<std::int64_t>(kElements / each, 1, images);
    const Tensor scratch = Tensor::empty(allocator, {is_plain() ? 0 : most * each});
    for (std::int64_t first = 0; first < images; first += most)
      body(first, std::min(most, images - first), scratch.f32());
  }

  /// The rows of `some` images from `first` on: where they are, or copied to `rows`.
  const float* rows_of(const float* x, std::int64_t first, std::int64_t some, float* rows) const {
    const float* const from = x + first * height * width * channels;
    if (is_plain()) return from;
    parallel_for(some * y_height, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t line = begin; line < end; ++line)
        lower_line(from + line / y_height * height * width * channels, line % y_height,
                   rows + line * y_width * depth());
    });
    return rows;
  }

  /// dx of `some` images from `first` on = the sums of what rows say of its pixels.
  void add_up(const float* rows, std::int64_t first, std::int64_t some, float* dx) const {
    float* const to = dx + first * height * width * channels;
    parallel_for(some * height, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t line = begin; line < end; ++line)
        raise_line(rows + line / height * pixels() * depth(), line % height, to + line * width * channels);
    });
  }

  const std::int64_t images, height, width, channels, outputs, y_height, y_width;
  const std::array<std::int64_t, 2> kernel, stride, padding;

 private:
  /// Of a window that begins at pixel `begin` of a line, the part that is within [0, width).
  struct Part {
    std::int64_t begin, end;
  };
  Part inside(std::int64_t begin) const {
    const std::int64_t low = std::clamp<std::int64_t>(-begin, 0, kernel[1]);
    return {low, std::max(low, std::min(kernel[1], width - begin))};
  }

  void lower_line(const float* image, std::int64_t line, float* rows) const {
    const std::int64_t window_line = kernel[1] * channels;
    for (std::int64_t px = 0; px < y_width; ++px)
      for (std::int64_t k = 0; k < kernel[0]; ++k, rows += window_line) {
        const std::int64_t at = line * stride[0] - padding[0] + k, begin = px * stride[1] - padding[1];
        const Part part = at < 0 || at >= height ? Part{0, 0} : inside(begin);
        std::fill_n(rows, part.begin * channels, 0.0f);
        if (part.end > part.begin)
          std::copy_n(image + (at * width + begin + part.begin) * channels, (part.end - part.begin) * channels,
                      rows + part.begin * channels);
        std::fill(rows + part.end * channels, rows + window_line, 0.0f);
      }
  }

  void raise_line(const float* rows, std::int64_t line, float* dx) const {
    std::fill_n(dx, width * channels, 0.0f);
    for (std::int64_t k = 0; k < kernel[0]; ++k) {
      const std::int64_t from = line + padding[0] - k;
      if (from < 0 || from % stride[0] != 0 || from / stride[0] >= y_height) continue;
      const float* row = rows + from / stride[0] * y_width * depth() + k * kernel[1] * channels;
      for (std::int64_t px = 0; px < y_width; ++px, row += depth()) {
        const std::int64_t begin = px * stride[1] - padding[1];
        const Part part = inside(begin);
        add_to(row + part.begin * channels, (part.end - part.begin) * channels, dx + (begin + part.begin) * channels);
      }
    }
  }
};

bool LoweredConv::suits(const Shape& x, const Shape& w, const Window& window) {
  const bool strided = window.stride[0] > 1 || window.stride[1] > 1, single = w[1] == 1 && w[2] == 1;
  return (strided || single) && w[0] >= kLeastOutputs && w[1] * w[2] * w[3] >= kLeastDepth && x[0] > 0;
}

void LoweredConv::forward(const Tensor& x, const Tensor& w, const Tensor& b, const Window& window, const Tensor& y) {
  const Lowering at(x.shape(), w.shape(), y.shape(), window);
  at.for_each_part(allocator_, [&](std::int64_t first, std::int64_t some, float* scratch) {
    const float* const rows = at.rows_of(x.f32(), first, some, scratch);
    multiply_rows(rows, w.f32(), false, b.defined() ? b.f32() : nullptr, at.depth(), some * at.pixels(), at.outputs,
                  y.f32() + first * at.pixels() * at.outputs, allocator_);
  });
}

void LoweredConv::backward_input(const Tensor& dy, const Tensor& w, const Window& window, const Tensor& dx) {
  const Lowering at(dx.shape(), w.shape(), dy.shape(), window);
  at.for_each_part(allocator_, [&](std::int64_t first, std::int64_t some, float* scratch) {
    float* const rows = at.is_plain() ? dx.f32() : scratch;
    multiply_rows(dy.f32() + first * at.pixels() * at.outputs, w.f32(), true, nullptr, at.outputs, some * at.pixels(),
                  at.depth(), rows, allocator_);
    if (!at.is_plain()) at.add_up(rows, first, some, dx.f32());
  });
}

void LoweredConv::backward_weight(const Tensor& x, const Tensor& dy, const Window& window, bool accumulate_w,
                                  const Tensor& dw, bool accumulate_b, const Tensor& db) {
  const Lowering at(x.shape(), dw.shape(), dy.shape(), window);
  at.for_each_part(allocator_, [&](std::int64_t first, std::int64_t some, float* scratch) {
    const float* const rows = at.rows_of(x.f32(), first, some, scratch);
    multiply_columns(dy.f32() + first * at.pixels() * at.outputs, rows, some * at.pixels(), at.outputs, at.depth(),
                     accumulate_w || first > 0, dw.f32(), allocator_);
  });
  if (db.defined()) sum_rows(dy.f32(), dy.count() / at.outputs, at.outputs, accumulate_b, db.f32());
}

}  // namespace lockstep::nn::cpu
