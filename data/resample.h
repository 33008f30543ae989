// Brings images to another size, as Pillow's resize() with its bilinear filter does: a triangle that widens with the
// reduction, so that nothing is skipped; and which part of an image a model sees, and how large.
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
  /// The same as bytes.
  void run(ImageView source, const Resampling& what, std::span<std::uint8_t> out);

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

  /// write(place, line): `line` has the pixels of a row, four bytes each, from left to right, whose first number is
  /// the result's number `place`.
  template <class Write>
  void each_row(ImageView source, const Resampling& what, std::size_t numbers, const Write& write);

  Taps columns_, rows_;
  // Pixels of four bytes: rows of the source in the result's width, as many as one row of the result needs; that row,
  // and its sums.
  std::vector<std::uint8_t> ring_, line_;
  std::vector<std::int32_t> sums_;
};

/// Numbers of bytes, of the channels in turn.
void normalise(std::span<const std::uint8_t> bytes, const Normalisation& normalisation, std::span<float> out);

inline constexpr int kMostImageSize = 4096;

/// What torchvision evaluates its ImageNet models on: the image with its shorter side brought to 256/224 · `size`
/// (rounded down), of that the middle `size` × `size` pixels.
Resampling evaluation_view(ImageSize image, int size);

/// torchvision's RandomResizedCrop and RandomHorizontalFlip: a part of 8 % to 100 % of the area, 3:4 to 4:3, brought to
/// `size` × `size`, and every other time mirrored. A pure function of `draw`.
Resampling training_view(ImageSize image, int size, std::uint64_t draw);

/// torchvision's RandomErasing, with its defaults: with that probability zeros take the place of a rectangle of 2 to 33
/// % of the area, its ratio of height to width from 0.3 to 3.3. `image` is (height, width, 3). A pure function of
/// `draw` that draws other numbers than the functions above.
void erase_some(std::span<float> image, ImageSize size, double probability, std::uint64_t draw);

/// In how many eighths of its size a JPEG may be decoded so that `what.box` still has no fewer pixels than what becomes
/// of it: 8, 4, 2 or 1.
int eighths_for(const Resampling& what);

/// `what` for the same image in `decoded` pixels instead of `whole`.
Resampling for_decoded(Resampling what, ImageSize whole, ImageSize decoded);

}  // namespace lockstep::data
