// Images in files: what a model takes of them, and folders of photographs and drawings, one for each class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/image_decoder.h"
#include "data/rand_augment.h"
#include "data/resample.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/open.h"

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

inline constexpr std::uint64_t kMostImageBytes = 256 << 20;  // encoded
/// The bytes of a regular file of at most kMostImageBytes, into `bytes`, whose memory is used again. Throws IoError
/// that says what is wrong, without the file's name.
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

inline constexpr std::uint64_t kDefaultMaxCorrupt = 100;

/// How training samples are read changed at random.
struct Augmentation {
  bool augment = true;
  RandAugment operations = {};  // on the pixels of those
  double erasing = 0;           // erase_some()'s, of those
  Mixing mixing = {};           // of all training samples
};
/// Of settings with augment_settings().
Augmentation augmentation_of(const Settings& settings);

struct ImagesOptions {
  int classes = 0;  // 0: as many as there are folders
  int size = kDefaultImageSize;
  Augmentation augmentation = {};
  std::uint64_t max_corrupt = kDefaultMaxCorrupt;
  Parts parts = {};
};

/// Images by their numbers, and their classes. Any thread.
class ImageSource {
 public:
  virtual ~ImageSource() = default;
  virtual std::uint64_t size() const = 0;
  virtual std::string name(std::uint64_t i) const = 0;  // for people
  virtual std::int32_t label(std::uint64_t i) const = 0;
  /// The encoded image, into `bytes`, whose memory is used again. Throws IoError that says what is wrong, without its
  /// name.
  virtual void read(std::uint64_t i, std::vector<std::byte>& bytes) const = 0;
};

/// A data set of the images `which` of a source, whose labels are below `options.classes`; read as open_images() says.
std::shared_ptr<const Dataset> images_of(const std::string& name, std::shared_ptr<const ImageSource> source,
                                         std::vector<std::uint32_t> which, std::vector<std::string> class_names,
                                         const ImagesOptions& options);
/// 0, 1, 2, … Throws IoError, naming `place`, for more than 2³².
std::vector<std::uint32_t> all_of(const ImageSource& source, const std::string& place);

/// The settings of data sets of such images, and their values.
std::vector<SettingSpec> image_settings();
ImagesOptions images_options(const OpenOptions& options);

/// images:DIR. The folders of DIR, or of DIR/train where that and DIR/val are there, are the classes, numbered in their
/// names' order. Validation is on DIR/val, whose folders must be among them; without it on every tenth image of the
/// sorted list (the 10th, the 20th, …), which then is not trained on. DIR/test is a test part.
///
/// Samples have dims {size, size, 3}, normalised with ImageNet's constants: training_view() of the file where they are
/// read changed, evaluation_view() elsewhere. Files are opened, decoded and resampled by whoever reads them.
///
/// A file that cannot be read or decoded is named in a warning, once, and the sample is that of the next whole one.
/// When more than `max_corrupt` files of a part have turned out so, reading throws IoError. Throws UsageError for
/// fewer classes than folders, IoError for what list_parts() does and for too few images to have some to validate on.
DataSplits open_images(const std::string& directory, const ImagesOptions& options);
/// tar:SHARDS, the same of archives (Note [Indexed archives]): files, ranges ({000..012}), directories, after commas.
/// IoError also for archives that are compressed, cut or without samples, and for samples without an image or a class.
DataSplits open_tar(const std::string& shards, ImagesOptions options);

}  // namespace lockstep::data
