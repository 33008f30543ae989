// How two samples of a training become one: Dataset::Info::mixing.
#pragma once

#include <cstdint>
#include <span>

#include "base/splitmix.h"
#include "data/image_decoder.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data {

/// What becomes of one sample.
struct Mix {
  std::uint64_t partner = 0;  // the other sample's number, which may be its own
  double share = 1;           // of the sample itself in its target; 1: it stays as it is
  bool pasted = false;  // a rectangle is the partner's; else numbers are share · own + (1 − share) · partner's
  int left = 0, top = 0, width = 0, height = 0;
};

/// Of Beta(alpha, alpha), alpha > 0: in [0, 1].
double draw_share(SplitMix64& random, double alpha);

/// What `mixing`, of which something is asked for, makes of the sample with this draw (Sample::draw), an image of this
/// size. A pure function that draws other numbers than data sets do. The partner is any of `samples`. A rectangle has
/// √(1 − share) of each side around a point of the image, of which what lies inside is pasted, and counts (Yun et al.;
/// torchvision's CutMix).
Mix draw_mix(const Mixing& mixing, std::uint64_t draw, std::uint64_t samples, ImageSize size);

/// Both are (height, width, channels).
void mix_into(std::span<float> x, std::span<const float> partner, const Mix& mix, ImageSize size);

}  // namespace lockstep::data
