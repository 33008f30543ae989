#include "data/image_views.h"

#include <algorithm>
#include <cmath>

#include "base/splitmix.h"

namespace lockstep::data {
namespace {

// In [0, 1).
double uniform(SplitMix64& random) { return static_cast<double>(random.next() >> 11) * 0x1p-53; }

// Python's round(), which torchvision calls: halves go to the even neighbour.
int rounded(double value) { return static_cast<int>(std::nearbyint(value)); }

int below(SplitMix64& random, int bound) { return static_cast<int>(random.below(static_cast<std::uint32_t>(bound))); }

}  // namespace

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

Resampling training_view(ImageSize image, int size, std::uint64_t draw) {
  constexpr double kLeastArea = 0.08, kLeastRatio = 3.0 / 4, kMostRatio = 4.0 / 3;
  constexpr int kTries = 10;
  SplitMix64 random(draw);
  Resampling what;
  what.size = what.window = {size, size};
  what.mirrored = (random.next() >> 63) != 0;
  const double area = static_cast<double>(image.width) * image.height;
  for (int i = 0; i < kTries; ++i) {
    const double part = area * (kLeastArea + (1 - kLeastArea) * uniform(random));
    const double ratio = std::exp(std::log(kLeastRatio) + std::log(kMostRatio / kLeastRatio) * uniform(random));
    const int width = rounded(std::sqrt(part * ratio)), height = rounded(std::sqrt(part / ratio));
    if (width < 1 || height < 1 || width > image.width || height > image.height) continue;
    const int top = below(random, image.height - height + 1), left = below(random, image.width - width + 1);
    what.box = {static_cast<double>(left), static_cast<double>(top), static_cast<double>(width),
                static_cast<double>(height)};
    return what;
  }
  // None fits: as much of the middle as has such a ratio.
  const int width = std::clamp(rounded(image.height * kMostRatio), 1, image.width);
  const int height = std::clamp(rounded(image.width / kLeastRatio), 1, image.height);
  what.box = {static_cast<double>((image.width - width) / 2), static_cast<double>((image.height - height) / 2),
              static_cast<double>(width), static_cast<double>(height)};
  return what;
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
