#include "data/rand_augment.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>

#include "base/error.h"
#include "base/splitmix.h"

namespace lockstep::data {
namespace {

using Bytes = std::span<std::uint8_t>;
using ConstBytes = std::span<const std::uint8_t>;
using Table = std::array<std::uint8_t, 256>;
using Histogram = std::array<std::int64_t, 256>;

/// Where a pixel comes from: (m[0] x + m[1] y + m[2], m[3] x + m[4] y + m[5]) of its middle.
using Matrix = std::array<double, 6>;

// Pillow's blend() at one byte, whose numbers are f32: the exact products and sums of f64 are rounded to it, so that no
// compiler's fused operations make another result.
std::uint8_t blended(int from, int to, float alpha) {
  const auto change = static_cast<float>(static_cast<double>(alpha) * (to - from));
  const auto value = static_cast<float>(static_cast<double>(from) + static_cast<double>(change));
  return static_cast<std::uint8_t>(std::clamp(value, 0.0f, 255.0f));
}

Table blended_with(int from, float alpha) {
  Table table;
  for (int v = 0; v < 256; ++v) table[static_cast<std::size_t>(v)] = blended(from, v, alpha);
  return table;
}

void look_up(Bytes image, const std::array<Table, 3>& tables) {
  for (std::size_t i = 0; i < image.size(); i += 3)
    for (std::size_t c = 0; c < 3; ++c) image[i + c] = tables[c][image[i + c]];
}
void look_up(Bytes image, const Table& table) {
  for (std::uint8_t& v : image) v = table[v];
}

template <class Of>
Table table_of(const Of& of) {
  Table table;
  for (int v = 0; v < 256; ++v)
    table[static_cast<std::size_t>(v)] = static_cast<std::uint8_t>(std::clamp(of(v), 0, 255));
  return table;
}

std::array<Histogram, 3> histograms_of(ConstBytes image) {
  std::array<Histogram, 3> counts{};
  for (std::size_t i = 0; i < image.size(); i += 3)
    for (std::size_t c = 0; c < 3; ++c) ++counts[c][image[i + c]];
  return counts;
}

// A line that takes the darkest value to 0 and the brightest to 255.
Table stretched(const Histogram& counts) {
  int low = 0, high = 255;
  while (low < 255 && counts[static_cast<std::size_t>(low)] == 0) ++low;
  while (high > 0 && counts[static_cast<std::size_t>(high)] == 0) --high;
  if (high <= low) return table_of([](int v) { return v; });
  const double scale = 255.0 / (high - low), offset = -low * scale;
  return table_of([&](int v) { return static_cast<int>(v * scale + offset); });
}

Table equalized(const Histogram& counts) {
  const auto last = std::find_if(counts.rbegin(), counts.rend(), [](std::int64_t n) { return n > 0; });
  const std::int64_t all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const std::int64_t step = last == counts.rend() ? 0 : (all - *last) / 255;
  if (step == 0) return table_of([](int v) { return v; });
  std::int64_t n = step / 2;
  return table_of([&](int v) {
    const auto value = static_cast<int>(std::min<std::int64_t>(n / step, 255));
    n += counts[static_cast<std::size_t>(v)];
    return value;
  });
}

std::uint8_t grey_at(ConstBytes image, std::size_t i) { return grey_of(image[i], image[i + 1], image[i + 2]); }

// Pillow's fixed point: 16 bits after it. What lies outside becomes black.
void transform(ConstBytes from, Bytes to, ImageSize size, const Matrix& m) {
  const auto fixed = [](double v) { return static_cast<std::int64_t>(std::floor(v * 65536.0 + 0.5)); };
  const std::int64_t across[2] = {fixed(m[0]), fixed(m[3])}, down[2] = {fixed(m[1]), fixed(m[4])};
  std::int64_t first[2] = {fixed(m[2] + m[0] * 0.5 + m[1] * 0.5), fixed(m[5] + m[3] * 0.5 + m[4] * 0.5)};
  std::uint8_t* out = to.data();
  for (int y = 0; y < size.height; ++y) {
    std::int64_t at[2] = {first[0], first[1]};
    for (int x = 0; x < size.width; ++x, out += 3) {
      const std::int64_t column = at[0] >> 16, row = at[1] >> 16;
      const bool inside = column >= 0 && column < size.width && row >= 0 && row < size.height;
      const std::uint8_t* const in = from.data() + (inside ? 3 * (row * size.width + column) : 0);
      for (int c = 0; c < 3; ++c) out[c] = inside ? in[c] : 0;
      for (int i = 0; i < 2; ++i) at[i] += across[i];
    }
    for (int i = 0; i < 2; ++i) first[i] += down[i];
  }
}

// As Pillow's Image.rotate() makes it, counterclockwise around the middle.
Matrix rotation(double degrees, ImageSize size) {
  double turn = std::fmod(degrees, 360.0);
  if (turn < 0) turn += 360.0;
  const double angle = -turn * (std::numbers::pi / 180.0);
  const auto rounded = [](double v) { return std::nearbyint(v * 1e15) / 1e15; };
  Matrix m = {rounded(std::cos(angle)),  rounded(std::sin(angle)), 0,
              rounded(-std::sin(angle)), rounded(std::cos(angle)), 0};
  const double x = size.width / 2.0, y = size.height / 2.0;
  m[2] = m[0] * -x + m[1] * -y + x;
  m[5] = m[3] * -x + m[4] * -y + y;
  return m;
}

// Pillow's SMOOTH: neighbours weigh 1 and the pixel 5, of 13. Edges stay, and images that are smaller.
void smooth(ConstBytes from, Bytes to, ImageSize size) {
  std::ranges::copy(from, to.begin());
  const auto line = 3 * static_cast<std::size_t>(size.width);
  for (int y = 1; y + 1 < size.height; ++y)
    for (std::size_t i = 3; i + 3 < line; ++i) {
      const std::uint8_t* const at = from.data() + static_cast<std::size_t>(y) * line + i;
      int sum = 4 * at[0];
      for (const std::uint8_t* row : {at - line, at, at + line}) sum += row[-3] + row[0] + row[3];
      to[static_cast<std::size_t>(y) * line + i] = static_cast<std::uint8_t>((2 * sum + 13) / 26);
    }
}

}  // namespace

// torch.linspace() is f32, which shows where numbers are cut to whole ones.
double magnitude_of(PixelOp op, int bin, ImageSize size) {
  const auto up_to = [&](double most) {
    const auto end = static_cast<float>(most);
    const float step = end / (kMagnitudes - 1);
    const int left = kMagnitudes - 1 - bin;
    return static_cast<double>(bin < kMagnitudes / 2 ? step * static_cast<float>(bin)
                                                     : end - step * static_cast<float>(left));
  };
  switch (op) {
    case PixelOp::kShearX:
    case PixelOp::kShearY: return up_to(0.3);
    case PixelOp::kTranslateX: return up_to(150.0 / 331.0 * size.width);
    case PixelOp::kTranslateY: return up_to(150.0 / 331.0 * size.height);
    case PixelOp::kRotate: return up_to(30.0);
    case PixelOp::kBrightness:
    case PixelOp::kColor:
    case PixelOp::kContrast:
    case PixelOp::kSharpness: return up_to(0.9);
    case PixelOp::kPosterize: return 8 - std::nearbyint(bin / ((kMagnitudes - 1) / 4.0));  // bits that stay
    case PixelOp::kSolarize: return 255.0 - 8.5 * bin;
    case PixelOp::kIdentity:
    case PixelOp::kAutoContrast:
    case PixelOp::kEqualize: return 0;
  }
  return 0;
}

bool has_sign(PixelOp op) { return op >= PixelOp::kShearX && op <= PixelOp::kSharpness; }

void PixelChanger::apply(PixelOp op, double magnitude, Bytes image, ImageSize size) {
  LOCKSTEP_ASSERT(image.size() == 3 * static_cast<std::size_t>(size.width) * static_cast<std::size_t>(size.height));
  const auto alpha = static_cast<float>(1.0 + magnitude);
  const auto transformed = [&](const Matrix& matrix) {
    before_.assign(image.begin(), image.end());
    transform(before_, image, size, matrix);
  };
  switch (op) {
    case PixelOp::kIdentity: return;
    case PixelOp::kShearX: return transformed({1, magnitude, 0, 0, 1, 0});
    case PixelOp::kShearY: return transformed({1, 0, 0, magnitude, 1, 0});
    case PixelOp::kTranslateX: return transformed({1, 0, -std::trunc(magnitude), 0, 1, 0});
    case PixelOp::kTranslateY: return transformed({1, 0, 0, 0, 1, -std::trunc(magnitude)});
    case PixelOp::kRotate: return transformed(rotation(magnitude, size));
    case PixelOp::kBrightness: return look_up(image, blended_with(0, alpha));
    case PixelOp::kColor:
      for (std::size_t i = 0; i < image.size(); i += 3) {
        const int grey = grey_at(image, i);
        for (std::size_t c = 0; c < 3; ++c) image[i + c] = blended(grey, image[i + c], alpha);
      }
      return;
    case PixelOp::kContrast: {
      std::uint64_t sum = 0;
      for (std::size_t i = 0; i < image.size(); i += 3) sum += grey_at(image, i);
      const double mean = static_cast<double>(sum) / (static_cast<double>(image.size()) / 3);
      return look_up(image, blended_with(static_cast<int>(mean + 0.5), alpha));
    }
    case PixelOp::kSharpness:
      before_.resize(image.size());
      smooth(image, before_, size);
      for (std::size_t i = 0; i < image.size(); ++i) image[i] = blended(before_[i], image[i], alpha);
      return;
    case PixelOp::kPosterize: {
      const int dropped = (1 << (8 - static_cast<int>(magnitude))) - 1;
      return look_up(image, table_of([&](int v) { return v & ~dropped; }));
    }
    case PixelOp::kSolarize: return look_up(image, table_of([&](int v) { return v < magnitude ? v : 255 - v; }));
    case PixelOp::kAutoContrast:
    case PixelOp::kEqualize: {
      std::array<Table, 3> tables;
      std::ranges::transform(histograms_of(image), tables.begin(), op == PixelOp::kEqualize ? equalized : stretched);
      return look_up(image, tables);
    }
  }
}

void PixelChanger::apply(const RandAugment& what, std::uint64_t draw, Bytes image, ImageSize size) {
  constexpr std::uint64_t kOther = 0x72616e64;
  SplitMix64 random(mix64(draw, kOther));
  for (int i = 0; i < what.count; ++i) {
    const auto op = static_cast<PixelOp>(random.below(kPixelOps));
    const bool negative = has_sign(op) && (random.next() >> 63) != 0;
    const double magnitude = magnitude_of(op, what.bin, size);
    apply(op, negative ? -magnitude : magnitude, image, size);
  }
}

}  // namespace lockstep::data
