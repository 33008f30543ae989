#include "data/resample.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/cpu.h"
#include "base/error.h"
#include "base/splitmix.h"

namespace lockstep::data {
namespace {

// Pillow's: weights have so many bits after the point, and each pass rounds to bytes.
constexpr int kFraction = 32 - 8 - 2;
constexpr std::int32_t kHalf = 1 << (kFraction - 1);

inline std::uint8_t rounded(std::int32_t sum) {
  return static_cast<std::uint8_t>(std::clamp(sum >> kFraction, 0, 255));
}

// Pixels of four bytes, the fourth of which means nothing: out[x] = Σ weights[x][k] · row[first[x] + k].
LOCKSTEP_SIMD_CLONES
void mix_pixels(std::uint8_t* __restrict out, const std::uint8_t* __restrict row, const int* __restrict first,
                const int* __restrict count, const std::int32_t* __restrict weights, std::size_t most,
                std::size_t pixels) {
  for (std::size_t x = 0; x < pixels; ++x) {
    const std::uint8_t* __restrict from = row + 4 * static_cast<std::size_t>(first[x]);
    const std::int32_t* __restrict by = weights + x * most;
    std::int32_t sum[4] = {kHalf, kHalf, kHalf, kHalf};
    for (std::size_t k = 0; k < static_cast<std::size_t>(count[x]); ++k)
      for (std::size_t c = 0; c < 4; ++c) sum[c] += by[k] * static_cast<std::int32_t>(from[4 * k + c]);
    for (std::size_t c = 0; c < 4; ++c) out[4 * x + c] = rounded(sum[c]);
  }
}

// sums[i] += weight · row[i]
LOCKSTEP_SIMD_CLONES
void add_row(std::int32_t* __restrict sums, const std::uint8_t* __restrict row, std::int32_t weight,
             std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sums[i] += weight * static_cast<std::int32_t>(row[i]);
}

LOCKSTEP_SIMD_CLONES
void round_row(std::uint8_t* __restrict out, const std::int32_t* __restrict sums, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = rounded(sums[i]);
}

// Python's round(), which torchvision calls: halves go to the even neighbour.
int rounded(double value) { return static_cast<int>(std::nearbyint(value)); }

// What a byte becomes, as torchvision's ToTensor and Normalize have it.
using Numbers = std::array<std::array<float, 256>, 3>;
Numbers numbers_of(const Normalisation& normalisation) {
  Numbers numbers;
  for (std::size_t c = 0; c < 3; ++c)
    for (std::size_t v = 0; v < 256; ++v)
      numbers[c][v] = (static_cast<float>(v) / 255.0f - normalisation.mean[c]) / normalisation.std[c];
  return numbers;
}

int below(SplitMix64& random, int bound) { return static_cast<int>(random.below(static_cast<std::uint32_t>(bound))); }

}  // namespace

// Pillow's rule (precompute_coeffs and normalize_coeffs_8bpc in its Resample.c), operation by operation, in what a crop
// of the source to whole pixels would be: pixel i looks from begin + (i + 1/2) · step, and what lies nearer than
// max(1, step) counts the less the farther it is.
void Resampler::Taps::plan(double begin, double extent, int limit, int pixels, int from, int to) {
  const int low = static_cast<int>(std::floor(begin));
  const int high = std::min(limit, static_cast<int>(std::ceil(begin + extent))) - low;
  const double step = extent / pixels, reach = std::max(1.0, step), narrowing = 1.0 / reach;
  most = 2 * static_cast<int>(std::ceil(reach)) + 1;
  const auto made = static_cast<std::size_t>(to - from), width = static_cast<std::size_t>(most);
  first.resize(made);
  count.resize(made);
  weights.assign(made * width, 0);
  exact.resize(width);
  for (std::size_t i = 0; i < made; ++i) {
    const double center = begin - low + (from + static_cast<double>(i) + 0.5) * step;
    const int least = std::clamp(static_cast<int>(center - reach + 0.5), 0, high - 1);
    const int end = std::clamp(static_cast<int>(center + reach + 0.5), least + 1, high);
    double sum = 0;
    for (int x = least; x < end; ++x) {
      const double weight = std::max(0.0, 1.0 - std::abs((x - center + 0.5) * narrowing));
      exact[static_cast<std::size_t>(x - least)] = weight;
      sum += weight;
    }
    first[i] = low + least;
    count[i] = end - least;
    for (std::size_t k = 0; k < static_cast<std::size_t>(count[i]); ++k) {
      const double weight = sum != 0 ? exact[k] / sum : 1.0 / count[i];
      weights[i * width + k] = static_cast<std::int32_t>(0.5 + weight * (1 << kFraction));
    }
  }
}

// Columns first, as Pillow: the order shows, as each pass rounds. A row of the source is brought to the result's width
// when the first row that needs it is made, and held as long as others may.
template <class Write>
void Resampler::each_row(ImageView source, const Resampling& what, std::size_t numbers, const Write& write) {
  const auto width = static_cast<std::size_t>(what.window.width), height = static_cast<std::size_t>(what.window.height);
  const Box& box = what.box;
  LOCKSTEP_ASSERT(numbers == width * height * 3 && width > 0 && height > 0);
  LOCKSTEP_ASSERT(what.left >= 0 && what.top >= 0 && what.left + what.window.width <= what.size.width &&
                  what.top + what.window.height <= what.size.height);
  LOCKSTEP_ASSERT(box.left >= 0 && box.top >= 0 && box.width > 0 && box.height > 0 &&
                  box.left + box.width <= source.size.width + 1e-6 &&
                  box.top + box.height <= source.size.height + 1e-6);
  columns_.plan(box.left, box.width, source.size.width, what.size.width, what.left, what.left + what.window.width);
  rows_.plan(box.top, box.height, source.size.height, what.size.height, what.top, what.top + what.window.height);

  const std::size_t used = 4 * width, held = static_cast<std::size_t>(rows_.most);
  ring_.resize(held * used);
  sums_.resize(used);
  line_.resize(used);
  int next = rows_.first.front();  // of the source's rows, the first that has not been brought to the width
  for (std::size_t y = 0; y < height; ++y) {
    const auto weights = rows_.weights_of(y);
    const int first = rows_.first[y], end = first + rows_.count[y];
    for (next = std::max(next, first); next < end; ++next)
      mix_pixels(ring_.data() + static_cast<std::size_t>(next) % held * used, source.row(next), columns_.first.data(),
                 columns_.count.data(), columns_.weights.data(), static_cast<std::size_t>(columns_.most), width);
    std::ranges::fill(sums_, kHalf);
    for (std::size_t k = 0; k < weights.size(); ++k)
      add_row(sums_.data(), ring_.data() + (static_cast<std::size_t>(first) + k) % held * used, weights[k], used);
    round_row(line_.data(), sums_.data(), used);
    write(y * width * 3, std::span<const std::uint8_t>(line_));
  }
}

namespace {

/// to[x] = value(channel, byte) of the pixels of `line`, of four bytes each.
template <class T, class Value>
void write_row(std::span<const std::uint8_t> line, bool mirrored, T* to, const Value& value) {
  const std::size_t width = line.size() / 4;
  for (std::size_t x = 0; x < width; ++x) {
    T* const pixel = to + 3 * (mirrored ? width - 1 - x : x);
    for (std::size_t c = 0; c < 3; ++c) pixel[c] = value(c, line[4 * x + c]);
  }
}

}  // namespace

void Resampler::run(ImageView source, const Resampling& what, const Normalisation& normalisation,
                    std::span<float> out) {
  const Numbers numbers = numbers_of(normalisation);
  each_row(source, what, out.size(), [&](std::size_t place, std::span<const std::uint8_t> line) {
    write_row(line, what.mirrored, out.data() + place, [&](std::size_t c, std::uint8_t v) { return numbers[c][v]; });
  });
}

void Resampler::run(ImageView source, const Resampling& what, std::span<std::uint8_t> out) {
  each_row(source, what, out.size(), [&](std::size_t place, std::span<const std::uint8_t> line) {
    write_row(line, what.mirrored, out.data() + place, [](std::size_t, std::uint8_t v) { return v; });
  });
}

void normalise(std::span<const std::uint8_t> bytes, const Normalisation& normalisation, std::span<float> out) {
  LOCKSTEP_ASSERT(bytes.size() == out.size());
  const Numbers numbers = numbers_of(normalisation);
  for (std::size_t i = 0; i < out.size(); i += 3)
    for (std::size_t c = 0; c < 3; ++c) out[i + c] = numbers[c][bytes[i + c]];
}

Resampling evaluation_view(ImageSize image, int size) {
  const std::int64_t shorter = std::int64_t{size} * 256 / 224;
  const bool upright = image.width <= image.height;
  const std::int64_t least = upright ? image.width : image.height, most = upright ? image.height : image.width;
  const auto longer = static_cast<int>(shorter * most / least);
  Resampling what;
  what.box = {0, 0, static_cast<double>(image.width), static_cast<double>(image.height)};
  what.size = upright ? ImageSize{static_cast<int>(shorter), longer} : ImageSize{longer, static_cast<int>(shorter)};
  what.left = rounded((what.size.width - size) / 2.0);
  what.top = rounded((what.size.height - size) / 2.0);
  what.window = {size, size};
  return what;
}

namespace {

struct Range {
  double least, most;
};

/// Two sides, rounded: their product is a share of `area`, their quotient even on a logarithmic scale.
std::pair<int, int> draw_sides(SplitMix64& random, double area, Range share, Range ratio) {
  const double part = area * (share.least + (share.most - share.least) * random.uniform());
  const double quotient = std::exp(std::log(ratio.least) + std::log(ratio.most / ratio.least) * random.uniform());
  return {rounded(std::sqrt(part * quotient)), rounded(std::sqrt(part / quotient))};
}

}  // namespace

Resampling training_view(ImageSize image, int size, std::uint64_t draw) {
  constexpr double kLeastArea = 0.08, kLeastRatio = 3.0 / 4, kMostRatio = 4.0 / 3;
  constexpr int kTries = 10;
  SplitMix64 random(draw);
  Resampling what;
  what.size = what.window = {size, size};
  what.mirrored = (random.next() >> 63) != 0;
  const double area = static_cast<double>(image.width) * image.height;
  for (int i = 0; i < kTries; ++i) {
    const auto [width, height] = draw_sides(random, area, {kLeastArea, 1}, {kLeastRatio, kMostRatio});
    if (width < 1 || height < 1 || width > image.width || height > image.height) continue;
    const int top = below(random, image.height - height + 1), left = below(random, image.width - width + 1);
    what.box = {static_cast<double>(left), static_cast<double>(top), static_cast<double>(width),
                static_cast<double>(height)};
    return what;
  }
  // None fits: as much of the middle as has such a ratio.
  const int width = std::clamp(rounded(image.height * kMostRatio), 1, image.width);
  const int height = std::clamp(rounded(image.width / kLeastRatio), 1, image.height);
  const int left = (image.width - width) / 2, top = (image.height - height) / 2;
  what.box = {static_cast<double>(left), static_cast<double>(top), static_cast<double>(width),
              static_cast<double>(height)};
  return what;
}

void erase_some(std::span<float> image, ImageSize size, double probability, std::uint64_t draw) {
  constexpr double kLeastArea = 0.02, kMostArea = 0.33, kLeastRatio = 0.3, kMostRatio = 3.3;
  constexpr int kTries = 10;
  constexpr std::uint64_t kOther = 0x65726173;
  SplitMix64 random(mix64(draw, kOther));
  if (!(random.uniform() < probability)) return;
  const double area = static_cast<double>(size.width) * size.height;
  for (int i = 0; i < kTries; ++i) {
    const auto [height, width] = draw_sides(random, area, {kLeastArea, kMostArea}, {kLeastRatio, kMostRatio});
    if (height >= size.height || width >= size.width) continue;
    const int top = below(random, size.height - height + 1), left = below(random, size.width - width + 1);
    for (int row = top; row < top + height; ++row)
      std::ranges::fill(image.subspan(3 * (static_cast<std::size_t>(row) * static_cast<std::size_t>(size.width) +
                                           static_cast<std::size_t>(left)),
                                      3 * static_cast<std::size_t>(width)),
                        0.0f);
    return;
  }
}

int eighths_for(const Resampling& what) {
  int eighths = 8;
  while (eighths > 1 && what.box.width * eighths / 16 >= what.size.width &&
         what.box.height * eighths / 16 >= what.size.height)
    eighths /= 2;
  return eighths;
}

Resampling for_decoded(Resampling what, ImageSize whole, ImageSize decoded) {
  if (whole == decoded) return what;
  const double across = static_cast<double>(decoded.width) / whole.width;
  const double down = static_cast<double>(decoded.height) / whole.height;
  what.box = {what.box.left * across, what.box.top * down, what.box.width * across, what.box.height * down};
  return what;
}

}  // namespace lockstep::data
