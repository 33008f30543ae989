// What a model takes of an image, and how files become that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/image_decoder.h"
#include "data/resample.h"

namespace lockstep::data {

/// An image as a sample of dims {height, width, channels}.
struct ImageForm {
  int height = 0, width = 0;
  int channels = 3;                         // 3, or 1: grey
  Normalisation normalisation = kImageNet;  // of grey ones, the first of each
  /// evaluation_view(): height and width are one. Otherwise all of an image is brought to this size, whatever its own.
  bool cropped = true;

  std::vector<std::int64_t> dims() const { return {height, width, channels}; }
};

/// The bytes of a regular file of at most 256 MiB, into `bytes`, whose memory is used again. Throws IoError that says
/// what is wrong, without the file's name.
void read_image_file(const std::string& path, std::vector<std::byte>& bytes);

/// Reads image files, with memory that it keeps. One thread at a time.
class ImageReader {
 public:
  ImageReader();
  ~ImageReader();

  /// Writes form.dims() numbers to `out`: those of evaluation. Grey is made of colours as Pillow makes it (ITU-R 601).
  /// Throws IoError for files that cannot be read or decoded, naming the file.
  void read(const std::string& path, const ImageForm& form, std::span<float> out);

 private:
  struct Buffers;
  std::unique_ptr<Buffers> buffers_;
};

}  // namespace lockstep::data
