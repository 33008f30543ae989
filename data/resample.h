// Brings images to another size, as Pillow's resize() with its bilinear filter does: a triangle that widens with the
// reduction, so that nothing is skipped.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "data/image_decoder.h"

namespace lockstep::data {

/// A rectangle in pixels of a source; edges may lie within pixels.
struct Box {
  double left = 0, top = 0, width = 0, height = 0;
};

/// A channel's numbers are (v / 255 - mean) / std of its bytes v.
struct Normalisation {
  std::array<float, 3> mean, std;
};

/// torchvision's constants for ImageNet, of models that it publishes.
inline constexpr Normalisation kImageNet = {{0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}};

/// What is to be made: `box` of the source becomes `size` pixels, of which those from (left, top) on are written, as
/// many as `window` says, from right to left if `mirrored`.
struct Resampling {
  Box box;
  ImageSize size;
  int left = 0, top = 0;
  ImageSize window;
  bool mirrored = false;
};

/// Resamples, with memory that it keeps. One thread at a time.
class Resampler {
 public:
  /// Writes window.height × window.width × 3 numbers to `out`. Pixels outside of `box` count nothing. For edges of the
  /// box between pixels, the bytes equal those of Pillow's crop() and resize(), bit for bit. These resize the width,
  /// then the height, and round after each (Pillow 13 begins with the height if that saves much). The numbers equal
  /// those of torchvision's ToTensor and Normalize, bit for bit.
  void run(ImageView source, const Resampling& what, const Normalisation& normalisation, std::span<float> out);

 private:
  /// For each of some output pixels along one axis: which source pixels count, and how much.
  struct Taps {
    std::vector<int> first;             // of the source
    std::vector<int> count;             // at least 1
    std::vector<std::int32_t> weights;  // `most` a pixel, in parts of 2^22; those after its count are 0
    int most = 0;
    std::vector<double> exact;  // one pixel's, while they are computed

    void plan(double begin, double extent, int limit, int pixels, int from, int to);
    std::span<const std::int32_t> weights_of(std::size_t pixel) const {
      return std::span(weights).subspan(pixel * static_cast<std::size_t>(most), static_cast<std::size_t>(count[pixel]));
    }
  };

  Taps columns_, rows_;
  // Pixels of four bytes: rows of the source in the result's width, as many as one row of the result needs; that row,
  // and its sums.
  std::vector<std::uint8_t> ring_, line_;
  std::vector<std::int32_t> sums_;
};

}  // namespace lockstep::data
