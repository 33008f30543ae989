#include "data/image_decoder.h"

#include <spng.h>
#include <turbojpeg.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace lockstep::data {
namespace {

constexpr std::array<std::uint8_t, 3> kJpegStart = {0xff, 0xd8, 0xff};
constexpr std::array<std::uint8_t, 8> kPngStart = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};

template <std::size_t kSize>
bool starts_with(std::span<const std::byte> file, const std::array<std::uint8_t, kSize>& start) {
  return file.size() >= kSize && std::memcmp(file.data(), start.data(), kSize) == 0;
}

void check_size(std::uint64_t width, std::uint64_t height, std::uint64_t most_pixels) {
  if (width == 0 || height == 0) throw IoError("it has no pixels");
  if (width > kMostImageSide || height > kMostImageSide)
    throw IoError(fmt::format("its header claims {} x {} pixels; a side of {} is the longest that is read", width,
                              height, kMostImageSide));
  if (width > most_pixels / height)
    throw IoError(
        fmt::format("its header claims {} x {} pixels; {} are the most that are read", width, height, most_pixels));
}

[[noreturn]] void fail_bomb(std::uint64_t width, std::uint64_t height, std::size_t bytes) {
  throw IoError(fmt::format("its header claims {} x {} pixels, which {} bytes cannot hold", width, height, bytes));
}

/// Memory for pixels that is not cleared, and not kept if it is very large.
class PixelBuffer {
 public:
  std::uint8_t* room_for(ImageSize size) {
    constexpr std::size_t kKept = std::size_t{64} << 20;
    const std::size_t bytes = static_cast<std::size_t>(size.width) * static_cast<std::size_t>(size.height) * 4;
    if (bytes > bytes_ || bytes_ > kKept) {
      pixels_.reset();
      bytes_ = 0;
      pixels_.reset(new (std::nothrow) std::uint8_t[bytes]);
      if (!pixels_) throw IoError(fmt::format("no memory for its {} x {} pixels", size.width, size.height));
      bytes_ = bytes;
    }
    return pixels_.get();
  }

 private:
  std::unique_ptr<std::uint8_t[]> pixels_;
  std::size_t bytes_ = 0;
};

// C, M, Y and K as Adobe's JPEGs have them, inverted, to R, G and B: Pillow's integer formula.
void cmyk_to_rgb(std::uint8_t* pixels, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t* const at = pixels + 4 * i;
    const unsigned black = at[3];
    for (int c = 0; c < 3; ++c) {
      const unsigned product = at[c] * black + 128;
      at[c] = static_cast<std::uint8_t>((product + (product >> 8)) >> 8);
    }
  }
}

// Numbers of 16 bits, of this machine's byte order, to R = G = B: Pillow's convert("RGB") takes 255 for all above.
void clip_grey(std::uint8_t* pixels, std::size_t count) {
  for (std::size_t i = count; i-- > 0;) {  // from the end: the four bytes of a pixel lie at or after its two
    std::uint16_t value = 0;
    std::memcpy(&value, pixels + 2 * i, sizeof value);
    std::memset(pixels + 4 * i, std::min<int>(value, 255), 4);
  }
}

struct JpegCloser {
  void operator()(tjhandle handle) const { tjDestroy(handle); }
};

struct PngCloser {
  void operator()(spng_ctx* context) const { spng_ctx_free(context); }
};

}  // namespace

class ImageDecoder::Jpeg {
 public:
  ImageSize open(std::span<const std::byte> file, std::uint64_t most_pixels) {
    // A new one for each file: tables of the last one, which may have been corrupt, are kept and would be used.
    handle_.reset(tjInitDecompress());
    if (handle_ == nullptr) throw IoError("no memory for a JPEG decoder");
    file_ = file;
    size_ = {};
    int subsampling = 0, colours = -1;
    if (tjDecompressHeader3(handle_.get(), data(), file.size(), &size_.width, &size_.height, &subsampling, &colours) !=
        0) {
      // It also fails after a mere warning, and for subsamplings without a name, which can be decoded all the same.
      const bool usable = subsampling < 0 || is_harmless();
      if (!usable || size_.width <= 0 || size_.height <= 0) throw IoError(reason());
    }
    const auto width = static_cast<std::uint64_t>(std::max(size_.width, 0));
    const auto height = static_cast<std::uint64_t>(std::max(size_.height, 0));
    check_size(width, height, most_pixels);
    // A bit for each block of 8 × 8, in the coarsest subsampling.
    constexpr std::uint64_t kMostPixelsPerByte = 8 * 64 * 16;
    if (width * height / kMostPixelsPerByte > file.size()) fail_bomb(width, height, file.size());
    cmyk_ = colours == TJCS_CMYK || colours == TJCS_YCCK;
    return size_;
  }

  ImageView decode(int eighths) {
    const tjscalingfactor factor = {eighths, 8};
    const ImageSize size = {TJSCALED(size_.width, factor), TJSCALED(size_.height, factor)};
    std::uint8_t* const pixels = buffer_.room_for(size);
    const int failed = tjDecompress2(handle_.get(), data(), file_.size(), pixels, size.width, 4 * size.width,
                                     size.height, cmyk_ ? TJPF_CMYK : TJPF_RGBX, TJFLAG_LIMITSCANS);
    if (failed != 0 && !is_harmless()) throw IoError(reason());
    if (cmyk_) cmyk_to_rgb(pixels, static_cast<std::size_t>(size.width) * static_cast<std::size_t>(size.height));
    return {pixels, size};
  }

 private:
  const unsigned char* data() const { return reinterpret_cast<const unsigned char*>(file_.data()); }
  std::string reason() const { return tjGetErrorStr2(handle_.get()); }

  // Whether the last failure was no more than a warning about a file that is odd and yet whole. The code alone does not
  // say: an error after a warning has that of a warning; and of several warnings the text is the first one's, so that
  // the image's end must be there as well.
  bool is_harmless() const {
    constexpr std::array kHarmless = {"extraneous bytes", "bad ICC marker", "unknown JFIF revision", "Unknown Adobe",
                                      "Invalid SOS parameters"};
    if (tjGetErrorCode(handle_.get()) != TJERR_WARNING) return false;
    const std::string warning = reason();
    constexpr std::array kEnd = {std::byte{0xff}, std::byte{0xd9}};
    return std::any_of(kHarmless.begin(), kHarmless.end(),
                       [&](std::string_view part) { return warning.find(part) != std::string::npos; }) &&
           std::find_end(file_.begin(), file_.end(), kEnd.begin(), kEnd.end()) != file_.end();
  }

  std::unique_ptr<void, JpegCloser> handle_;
  std::span<const std::byte> file_;
  ImageSize size_;
  bool cmyk_ = false;
  PixelBuffer buffer_;
};

class ImageDecoder::Png {
 public:
  ImageSize open(std::span<const std::byte> file, std::uint64_t most_pixels) {
    // Before the library looks, which says no more than "arithmetic overflow" of a very long side.
    if (const auto claimed = claimed_size(file)) check_size(claimed->first, claimed->second, most_pixels);
    context_.reset(spng_ctx_new(0));
    if (context_ == nullptr) throw IoError("no memory for a PNG decoder");
    // Comments and colour profiles, which nobody reads here, may not take more.
    constexpr std::size_t kMostChunkBytes = std::size_t{8} << 20;
    spng_set_chunk_limits(context_.get(), kMostChunkBytes, 2 * kMostChunkBytes);
    check(spng_set_png_buffer(context_.get(), file.data(), file.size()));
    spng_ihdr header{};
    check(spng_get_ihdr(context_.get(), &header));
    check_size(header.width, header.height, most_pixels);
    const std::uint64_t channels = header.color_type == SPNG_COLOR_TYPE_TRUECOLOR_ALPHA   ? 4
                                   : header.color_type == SPNG_COLOR_TYPE_TRUECOLOR       ? 3
                                   : header.color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA ? 2
                                                                                          : 1;
    const std::uint64_t row_bytes = (header.width * channels * header.bit_depth + 7) / 8 + 1;
    constexpr std::uint64_t kMostBytesPerCompressedByte = 1032;  // of DEFLATE: 258 bytes in 2 bits
    if (row_bytes * header.height / kMostBytesPerCompressedByte > file.size())
      fail_bomb(header.width, header.height, file.size());
    size_ = {static_cast<int>(header.width), static_cast<int>(header.height)};
    wide_grey_ = header.color_type == SPNG_COLOR_TYPE_GRAYSCALE && header.bit_depth == 16;
    return size_;
  }

  ImageView decode() {
    std::uint8_t* const pixels = buffer_.room_for(size_);
    const std::size_t count = static_cast<std::size_t>(size_.width) * static_cast<std::size_t>(size_.height);
    int code = wide_grey_ ? spng_decode_image(context_.get(), pixels, 2 * count, SPNG_FMT_PNG, 0)
                          : spng_decode_image(context_.get(), pixels, 4 * count, SPNG_FMT_RGBA8, 0);
    // To the end of the file: there the last checksums are.
    if (code == 0) code = spng_decode_chunks(context_.get());
    context_.reset();
    check(code);
    if (wide_grey_) clip_grey(pixels, count);
    return {pixels, size_};
  }

 private:
  static void check(int code) {
    if (code != 0) throw IoError(spng_strerror(code));
  }

  // Width and height, big-endian, which follow the name of the first chunk.
  static std::optional<std::pair<std::uint32_t, std::uint32_t>> claimed_size(std::span<const std::byte> file) {
    constexpr std::size_t kName = 12, kWidth = 16, kHeight = 20, kEnd = 24;
    if (file.size() < kEnd || std::memcmp(file.data() + kName, "IHDR", 4) != 0) return std::nullopt;
    const auto read = [&](std::size_t at) {
      std::uint32_t value = 0;
      for (std::size_t i = 0; i < 4; ++i) value = value << 8 | std::to_integer<std::uint32_t>(file[at + i]);
      return value;
    };
    return std::pair(read(kWidth), read(kHeight));
  }

  std::unique_ptr<spng_ctx, PngCloser> context_;
  ImageSize size_;
  bool wide_grey_ = false;  // 16 bits
  PixelBuffer buffer_;
};

ImageDecoder::ImageDecoder(std::uint64_t most_pixels)
    : most_pixels_(most_pixels), jpeg_(std::make_unique<Jpeg>()), png_(std::make_unique<Png>()) {}

ImageDecoder::~ImageDecoder() = default;

ImageSize ImageDecoder::open(std::span<const std::byte> file) {
  if (file.empty()) throw IoError("it is empty");
  is_jpeg_ = starts_with(file, kJpegStart);
  if (is_jpeg_) return jpeg_->open(file, most_pixels_);
  if (starts_with(file, kPngStart)) return png_->open(file, most_pixels_);
  throw IoError("it starts as neither a JPEG nor a PNG file does");
}

ImageView ImageDecoder::decode(int eighths) {
  LOCKSTEP_ASSERT(eighths == 1 || eighths == 2 || eighths == 4 || eighths == 8, "{}/8", eighths);
  return is_jpeg_ ? jpeg_->decode(eighths) : png_->decode();
}

}  // namespace lockstep::data
