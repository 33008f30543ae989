#include "data/resample.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "base/error.h"

namespace lockstep::data {
namespace {

// row[i] = Σ weights[k] · rows[k][i], over bytes.
LOCKSTEP_SIMD_CLONES
void mix_rows(float* __restrict row, const std::uint8_t* __restrict first, std::size_t stride, const float* weights,
              std::size_t taps, std::size_t count) {
  std::size_t k = 0;
  if (taps == 1) {
    for (std::size_t i = 0; i < count; ++i) row[i] = weights[0] * static_cast<float>(first[i]);
    return;
  }
  for (; k + 2 <= taps; k += 2) {
    const std::uint8_t* __restrict a = first + k * stride;
    const std::uint8_t* __restrict b = a + stride;
    const float weight_a = weights[k], weight_b = weights[k + 1];
    if (k == 0) {
      for (std::size_t i = 0; i < count; ++i)
        row[i] = weight_a * static_cast<float>(a[i]) + weight_b * static_cast<float>(b[i]);
    } else {
      for (std::size_t i = 0; i < count; ++i)
        row[i] += weight_a * static_cast<float>(a[i]) + weight_b * static_cast<float>(b[i]);
    }
  }
  if (k == taps) return;
  const std::uint8_t* __restrict last = first + k * stride;
  for (std::size_t i = 0; i < count; ++i) row[i] += weights[k] * static_cast<float>(last[i]);
}

// The weighted sum of neighbouring pixels of four numbers, scaled and shifted: a pixel of the result.
inline void mix_pixels(float* __restrict out, const float* __restrict pixels, const float* __restrict weights,
                       std::size_t taps, const std::array<float, 4>& scale, const std::array<float, 4>& shift) {
  float sum[4] = {};
  for (std::size_t k = 0; k < taps; ++k)
    for (std::size_t c = 0; c < 4; ++c) sum[c] += weights[k] * pixels[4 * k + c];
  for (std::size_t c = 0; c < 3; ++c) out[c] = sum[c] * scale[c] + shift[c];
}

}  // namespace

// Pillow's rule (precompute_coeffs in its Resample.c): pixel i looks from begin + (i + 1/2) · step, and what lies
// nearer than max(1, step) counts the less the farther it is.
void Resampler::Taps::plan(double begin, double extent, int limit, int pixels, int from, int to) {
  const double step = extent / pixels, reach = std::max(1.0, step);
  const int low = static_cast<int>(std::floor(begin));
  const int high = std::min(limit, static_cast<int>(std::ceil(begin + extent)));
  most = 2 * static_cast<int>(std::ceil(reach)) + 1;
  const auto made = static_cast<std::size_t>(to - from);
  first.resize(made);
  count.resize(made);
  weights.assign(made * static_cast<std::size_t>(most), 0.0f);
  for (std::size_t i = 0; i < made; ++i) {
    const double center = begin + (from + static_cast<double>(i) + 0.5) * step;
    int least = std::clamp(static_cast<int>(std::floor(center - reach + 0.5)), low, high - 1);
    const int end = std::clamp(static_cast<int>(std::floor(center + reach + 0.5)), least + 1, high);
    double sum = 0;
    const auto weight_of = [&](int x) { return std::max(0.0, 1 - std::abs(x - center + 0.5) / reach); };
    for (int x = least; x < end; ++x) sum += weight_of(x);
    first[i] = least;
    count[i] = end - least;
    for (int x = least; x < end; ++x)
      weights[i * static_cast<std::size_t>(most) + static_cast<std::size_t>(x - least)] =
          sum > 0 ? static_cast<float>(weight_of(x) / sum) : 1.0f / static_cast<float>(end - least);
  }
}

// Rows first: there, neighbours in memory are neighbours in the sum, and only rows that are needed are touched.
void Resampler::run(ImageView source, const Resampling& what, const Normalisation& normalisation,
                    std::span<float> out) {
  const auto width = static_cast<std::size_t>(what.window.width), height = static_cast<std::size_t>(what.window.height);
  const Box& box = what.box;
  LOCKSTEP_ASSERT(out.size() == width * height * 3 && width > 0 && height > 0);
  LOCKSTEP_ASSERT(what.left >= 0 && what.top >= 0 && what.left + what.window.width <= what.size.width &&
                  what.top + what.window.height <= what.size.height);
  LOCKSTEP_ASSERT(box.left >= 0 && box.top >= 0 && box.width > 0 && box.height > 0 &&
                  box.left + box.width <= source.size.width + 1e-6 &&
                  box.top + box.height <= source.size.height + 1e-6);
  columns_.plan(box.left, box.width, source.size.width, what.size.width, what.left, what.left + what.window.width);
  rows_.plan(box.top, box.height, source.size.height, what.size.height, what.top, what.top + what.window.height);
  const int begin = columns_.first.front();
  const auto used = static_cast<std::size_t>(columns_.first.back() + columns_.count.back() - begin) * 4;
  row_.resize(used);

  std::array<float, 4> scale{}, shift{};
  for (std::size_t c = 0; c < 3; ++c) {
    scale[c] = 1 / (255 * normalisation.std[c]);
    shift[c] = -normalisation.mean[c] / normalisation.std[c];
  }
  const std::size_t stride = static_cast<std::size_t>(source.size.width) * 4;
  for (std::size_t y = 0; y < height; ++y) {
    const auto weights = rows_.weights_of(y);
    mix_rows(row_.data(), source.row(rows_.first[y]) + 4 * static_cast<std::size_t>(begin), stride, weights.data(),
             weights.size(), used);
    float* const line = out.data() + y * width * 3;
    for (std::size_t x = 0; x < width; ++x) {
      const auto across = columns_.weights_of(x);
      mix_pixels(line + 3 * (what.mirrored ? width - 1 - x : x),
                 row_.data() + 4 * static_cast<std::size_t>(columns_.first[x] - begin), across.data(), across.size(),
                 scale, shift);
    }
  }
}

}  // namespace lockstep::data
