// torchvision's RandAugment (Cubuk, Zoph, Shlens and Le, "RandAugment: Practical automated data augmentation with a
// reduced search space", 2020), with its operations and magnitudes, nearest interpolation and black outside. Bytes
// equal those that it makes of Pillow's images; of tensors it makes slightly others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/image_decoder.h"

namespace lockstep::data {

/// In torchvision's order.
enum class PixelOp {
  kIdentity,
  kShearX,
  kShearY,
  kTranslateX,
  kTranslateY,
  kRotate,
  kBrightness,
  kColor,
  kContrast,
  kSharpness,
  kPosterize,
  kSolarize,
  kAutoContrast,
  kEqualize
};
inline constexpr int kPixelOps = 14, kMagnitudes = 31;

/// Its magnitude number `bin`, of kMagnitudes, for images of this size.
double magnitude_of(PixelOp op, int bin, ImageSize size);
/// Whether every other time it is the negative one.
bool has_sign(PixelOp op);

struct RandAugment {
  int count = 0;  // operations on each image, one after the other
  int bin = 0;    // of their magnitudes
};

/// Changes pixels, with memory that it keeps. One thread at a time. Images are bytes (height, width, 3).
class PixelChanger {
 public:
  void apply(PixelOp op, double magnitude, std::span<std::uint8_t> image, ImageSize size);
  /// A pure function of `draw`, which draws other numbers than those of views and erased rectangles.
  void apply(const RandAugment& what, std::uint64_t draw, std::span<std::uint8_t> image, ImageSize size);

 private:
  std::vector<std::uint8_t> before_;
};

}  // namespace lockstep::data
