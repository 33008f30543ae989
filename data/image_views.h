// Which part of an image a model sees, and how large.
#pragma once

#include <cstdint>

#include "data/image_decoder.h"
#include "data/resample.h"

namespace lockstep::data {

inline constexpr int kMostImageSize = 4096;

/// What torchvision evaluates its ImageNet models on: the image with its shorter side brought to 256/224 · `size`
/// (rounded down), of that the middle `size` × `size` pixels.
Resampling evaluation_view(ImageSize image, int size);

/// torchvision's RandomResizedCrop and RandomHorizontalFlip: a part of 8 % to 100 % of the area, 3:4 to 4:3, brought to
/// `size` × `size`, and every other time mirrored. A pure function of `draw`.
Resampling training_view(ImageSize image, int size, std::uint64_t draw);

/// In how many eighths of its size a JPEG may be decoded so that `what.box` still has no fewer pixels than what becomes
/// of it: 8, 4, 2 or 1.
int eighths_for(const Resampling& what);

/// `what` for the same image in `decoded` pixels instead of `whole`.
Resampling for_decoded(Resampling what, ImageSize whole, ImageSize decoded);

}  // namespace lockstep::data
