#include "data/image_form.h"

#include <cmath>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "data/image_views.h"

namespace lockstep::data {
namespace {

constexpr std::uint64_t kMostFileBytes = 256 << 20;
// Bytes to [0, 1].
constexpr Normalisation kPlain = {{0, 0, 0}, {1, 1, 1}};

Resampling view_of(ImageSize image, const ImageForm& form) {
  if (form.cropped) return evaluation_view(image, form.height);
  Resampling what;
  what.box = {0, 0, static_cast<double>(image.width), static_cast<double>(image.height)};
  what.size = what.window = {form.width, form.height};
  return what;
}

}  // namespace

void read_image_file(const std::string& path, std::vector<std::byte>& bytes) {
  RegularFile file = open_regular(path);
  if (!file.problem.empty()) throw IoError(file.problem, file.remedy);
  if (file.size > kMostFileBytes) throw IoError(fmt::format("it has {} bytes", file.size));
  bytes.resize(file.size);
  std::size_t read = 0;
  if (const std::string problem = file.read(bytes, read); !problem.empty()) throw IoError(problem);
  bytes.resize(read);
}

struct ImageReader::Buffers {
  std::vector<std::byte> file;
  ImageDecoder decoder;
  Resampler resampler;
  std::vector<float> colours;  // of an image that is to be grey
};

ImageReader::ImageReader() : buffers_(std::make_unique<Buffers>()) {}
ImageReader::~ImageReader() = default;

void ImageReader::read(const std::string& path, const ImageForm& form, std::span<float> out) {
  const std::size_t pixels = static_cast<std::size_t>(form.height) * static_cast<std::size_t>(form.width);
  LOCKSTEP_ASSERT((form.channels == 3 || form.channels == 1) && (!form.cropped || form.height == form.width) &&
                      out.size() == pixels * static_cast<std::size_t>(form.channels),
                  "{} numbers for {}x{}x{}", out.size(), form.channels, form.height, form.width);
  try {
    read_image_file(path, buffers_->file);
    const Resampling what = view_of(buffers_->decoder.open(buffers_->file), form);
    const ImageView image = buffers_->decoder.decode();
    if (form.channels == 3) return buffers_->resampler.run(image, what, form.normalisation, out);
    buffers_->colours.resize(3 * pixels);
    buffers_->resampler.run(image, what, kPlain, buffers_->colours);
    const float* colour = buffers_->colours.data();
    for (float& value : out) {
      // Pillow's, of bytes: ITU-R 601 in parts of 2^16.
      const auto byte = [&](std::size_t c) { return static_cast<int>(std::lround(colour[c] * 255.0f)); };
      const int grey = (byte(0) * 19595 + byte(1) * 38470 + byte(2) * 7471 + 0x8000) >> 16;
      value = (static_cast<float>(grey) / 255.0f - form.normalisation.mean[0]) / form.normalisation.std[0];
      colour += 3;
    }
  } catch (const IoError& error) {
    throw IoError(fmt::format("{}: {}", printable(path), error.what()), "give whole JPEG or PNG files");
  }
}

}  // namespace lockstep::data
