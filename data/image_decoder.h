// From the bytes of a JPEG or PNG file to pixels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace lockstep::data {

struct ImageSize {
  int width = 0, height = 0;

  friend bool operator==(const ImageSize&, const ImageSize&) = default;
};

/// 8-bit pixels row by row, four bytes each: R, G, B and one that means nothing.
struct ImageView {
  const std::uint8_t* pixels = nullptr;
  ImageSize size;

  const std::uint8_t* row(int y) const {
    return pixels + static_cast<std::size_t>(y) * static_cast<std::size_t>(size.width) * 4;
  }
};

/// Of a colour, as Pillow makes it: ITU-R 601 in parts of 2^16.
constexpr std::uint8_t grey_of(int red, int green, int blue) {
  return static_cast<std::uint8_t>((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16);
}

/// What Pillow refuses as a decompression bomb: twice its MAX_IMAGE_PIXELS.
inline constexpr std::uint64_t kMostImagePixels = 178'956'970;
/// JPEGs end at 65,535. Resampling keeps rows, and counts output pixels in int.
inline constexpr std::uint64_t kMostImageSide = 1 << 18;

/// Decodes one image after the other, with memory that it keeps. One thread at a time.
///
/// The content of a file determines its format; its name does not. Grey becomes R = G = B, CMYK and YCCK become RGB by
/// Pillow's formula (no colour profiles), palettes are looked up, 16 bits are cut to 8 (of grey without alpha, as
/// Pillow does, all above 255 becomes white), alpha and transparent colours are dropped, and EXIF's orientation is left
/// alone: what torchvision's ImageFolder makes of a file.
///
/// Throws an IoError with the fault, but without the file's name, which it does not know. Before memory is allocated,
/// the size in a header is checked against `most_pixels` and against the largest image that a file of this length can
/// contain.
class ImageDecoder {
 public:
  explicit ImageDecoder(std::uint64_t most_pixels = kMostImagePixels);
  ~ImageDecoder();
  ImageDecoder(const ImageDecoder&) = delete;
  ImageDecoder& operator=(const ImageDecoder&) = delete;

  /// Reads the header of `file`, which must stay until decode() is done.
  ImageSize open(std::span<const std::byte> file);

  /// The opened image, valid until the next call. JPEGs can come in `eighths`/8 of their size (1, 2, 4 or 8; rounded
  /// up), which is as much faster; PNGs always come whole.
  ImageView decode(int eighths = 8);

 private:
  class Jpeg;
  class Png;

  std::uint64_t most_pixels_;
  std::unique_ptr<Jpeg> jpeg_;
  std::unique_ptr<Png> png_;
  bool is_jpeg_ = false;
};

}  // namespace lockstep::data
