#include "data/images.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/resample.h"
#include "lockstep/data/families.h"

namespace lockstep::data {
namespace {

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
  if (file.size > kMostImageBytes) throw IoError(fmt::format("it has {} bytes", file.size));
  bytes.resize(file.size);
  std::size_t read = 0;
  if (const std::string problem = file.read(bytes, read); !problem.empty()) throw IoError(problem);
  bytes.resize(read);
}

struct ImageReader::Buffers {
  std::vector<std::byte> file;
  ImageDecoder decoder;
  Resampler resampler;
  std::vector<std::uint8_t> colours;  // of an image that is to be grey
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
    buffers_->resampler.run(image, what, buffers_->colours);
    const std::uint8_t* colour = buffers_->colours.data();
    for (float& value : out) {
      const float grey = grey_of(colour[0], colour[1], colour[2]);
      value = (grey / 255.0f - form.normalisation.mean[0]) / form.normalisation.std[0];
      colour += 3;
    }
  } catch (const IoError& error) {
    throw IoError(fmt::format("{}: {}", printable(path), error.what()), "give whole JPEG or PNG files");
  }
}

namespace fs = std::filesystem;

namespace {

// Buffers of one thread that reads an image.
struct ReadBuffers {
  std::vector<std::byte> file;
  ImageDecoder decoder;
  Resampler resampler;
  std::vector<std::uint8_t> pixels;  // that are changed before they are numbers
  PixelChanger changer;
};

/// Reuses buffers: at most as many as threads read at the same time.
class BufferPool {
 public:
  class Lease {
   public:
    explicit Lease(BufferPool& owner) : owner_(owner), buffers_(owner.take()) {}
    ~Lease() { owner_.give_back(std::move(buffers_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ReadBuffers* operator->() const { return buffers_.get(); }

   private:
    BufferPool& owner_;
    std::unique_ptr<ReadBuffers> buffers_;
  };

 private:
  std::unique_ptr<ReadBuffers> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        auto buffers = std::move(free_.back());
        free_.pop_back();
        return buffers;
      }
    }
    return std::make_unique<ReadBuffers>();
  }
  void give_back(std::unique_ptr<ReadBuffers> buffers) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(buffers));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<ReadBuffers>> free_;
};

/// The files of a data set that turned out to be corrupt. Thread-safe.
class Corruption {
 public:
  Corruption(std::string name, std::uint64_t most) : name_(std::move(name)), most_(most) {}

  std::uint64_t count() const { return count_.load(std::memory_order_relaxed); }

  bool knows(std::uint64_t index) const {
    if (count() == 0) return false;
    const std::lock_guard lock(mutex_);
    return indices_.contains(index);
  }

  void add(std::uint64_t index, const std::string& path, const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (!indices_.insert(index).second) return;
    const std::uint64_t now = indices_.size();
    count_.store(now, std::memory_order_relaxed);
    if (now > most_)
      throw IoError(fmt::format("{}: {} images are corrupt, the last one {}: {}", name_, now, printable(path), why),
                    fmt::format("repair or remove them; --max-corrupt {} is the number tolerated", most_));
    log_warn("corrupt image {}: {}; the next whole one takes its place", printable(path), why);
  }

 private:
  std::string name_;
  std::uint64_t most_;
  std::atomic<std::uint64_t> count_ = 0;
  mutable std::mutex mutex_;
  std::set<std::uint64_t> indices_;
};

class Images final : public Dataset {
 public:
  Images(Info info, std::shared_ptr<const ImageSource> source, std::vector<std::uint32_t> which,
         const ImagesOptions& options)
      : Dataset(std::move(info)),
        source_(std::move(source)),
        which_(std::move(which)),
        options_(options),
        corruption_(name(), options.max_corrupt) {}

  std::string sample_name(std::uint64_t index) const override { return source_->name(which_[index]); }

  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    read_or_replace(index, std::nullopt, x, label);
  }
  void read_augmented(std::uint64_t index, std::uint64_t draw, std::span<float> x, std::int32_t& label) const override {
    read_or_replace(index, options_.augmentation.augment ? std::optional(draw) : std::nullopt, x, label);
  }
  /// The file, or nothing where it cannot be read, and its class.
  void append_source(std::uint64_t index, std::vector<std::byte>& bytes) const override {
    std::vector<std::byte> file;
    try {
      source_->read(which_[index], file);
    } catch (const IoError&) {  // as those that cannot be decoded: training says so, and reads another
      file.clear();
    }
    bytes.insert(bytes.end(), file.begin(), file.end());
    const std::int32_t label = source_->label(which_[index]);
    const auto label_bytes = std::as_bytes(std::span(&label, 1));
    bytes.insert(bytes.end(), label_bytes.begin(), label_bytes.end());
  }
  std::uint64_t corrupt() const override { return corruption_.count(); }

 private:
  void read_or_replace(std::uint64_t index, std::optional<std::uint64_t> draw, std::span<float> x,
                       std::int32_t& label) const {
    LOCKSTEP_ASSERT(index < size() && x.size() == sample_elements(), "sample {} into {} numbers", index, x.size());
    std::string last;
    for (std::uint64_t tried = 0; tried < size(); ++tried) {
      const std::uint64_t at = (index + tried) % size();
      if (corruption_.knows(at)) continue;
      try {
        read_image(which_[at], draw, x);
        label = source_->label(which_[at]);
        return;
      } catch (const IoError& error) {
        const std::string path = source_->name(which_[at]);
        corruption_.add(at, path, error.what());
        last = fmt::format(", {} for one: {}", printable(path), error.what());
      }
    }
    throw IoError(fmt::format("{}: none of its {} images can be read{}", name(), size(), last), "mend or replace them");
  }

  void read_image(std::uint64_t number, std::optional<std::uint64_t> draw, std::span<float> x) const {
    const BufferPool::Lease buffers(buffers_);
    source_->read(number, buffers->file);
    const ImageSize whole = buffers->decoder.open(buffers->file);
    const Resampling what = draw ? training_view(whole, options_.size, *draw) : evaluation_view(whole, options_.size);
    // Evaluation is to be the same as elsewhere, to the last bit of a pixel.
    const ImageView image = buffers->decoder.decode(draw ? eighths_for(what) : 8);
    const Resampling of_decoded = for_decoded(what, whole, image.size);
    const ImageSize size = {options_.size, options_.size};
    const RandAugment& operations = options_.augmentation.operations;
    if (!draw || operations.count == 0) {
      buffers->resampler.run(image, of_decoded, kImageNet, x);
    } else {
      buffers->pixels.resize(x.size());
      buffers->resampler.run(image, of_decoded, buffers->pixels);
      buffers->changer.apply(operations, *draw, buffers->pixels, size);
      normalise(buffers->pixels, kImageNet, x);
    }
    if (draw) erase_some(x, size, options_.augmentation.erasing, *draw);
  }

  std::shared_ptr<const ImageSource> source_;
  std::vector<std::uint32_t> which_;  // of the source
  ImagesOptions options_;
  mutable Corruption corruption_;
  mutable BufferPool buffers_;
};

void check_classes(int wanted, const std::vector<std::string>& classes, const std::string& directory) {
  if (wanted > 0 && static_cast<std::size_t>(wanted) < classes.size())
    throw UsageError(
        fmt::format("--classes {} for {}, which has {} folders", wanted, printable(directory), classes.size()),
        fmt::format("leave --classes out, or give {} or more", classes.size()));
}

class Folders final : public ImageSource {
 public:
  explicit Folders(FileList list) : list_(std::move(list)) {}

  std::uint64_t size() const override { return list_.size(); }
  std::string name(std::uint64_t i) const override { return list_.path(i); }
  std::int32_t label(std::uint64_t i) const override { return list_.label(i); }
  void read(std::uint64_t i, std::vector<std::byte>& bytes) const override { read_image_file(list_.path(i), bytes); }

 private:
  FileList list_;
};

}  // namespace

std::shared_ptr<const Dataset> images_of(const std::string& name, std::shared_ptr<const ImageSource> source,
                                         std::vector<std::uint32_t> which, std::vector<std::string> class_names,
                                         const ImagesOptions& options) {
  Dataset::Info info{
      .name = name,
      .size = which.size(),
      .dims = {options.size, options.size, 3},
      .classes = options.classes,
      .class_names = std::move(class_names),
      .class_counts = std::vector<std::uint64_t>(static_cast<std::size_t>(options.classes)),
      .image = std::make_shared<const ImageForm>(ImageForm{.height = options.size, .width = options.size}),
      .mixing = options.augmentation.mixing};
  for (const std::uint32_t image : which) ++info.class_counts[static_cast<std::size_t>(source->label(image))];
  return std::make_shared<Images>(std::move(info), std::move(source), std::move(which), options);
}

std::vector<std::uint32_t> all_of(const ImageSource& source, const std::string& place) {
  if (source.size() > std::numeric_limits<std::uint32_t>::max())
    throw IoError(fmt::format("{}: {} images are too many", printable(place), source.size()), "give a part of them");
  std::vector<std::uint32_t> numbers(source.size());
  std::iota(numbers.begin(), numbers.end(), 0U);
  return numbers;
}

DataSplits open_images(const std::string& given, const ImagesOptions& options) {
  FileParts parts = list_parts(given, image_files(), options.parts);
  check_classes(options.classes, parts.classes, parts.train.directory());
  ImagesOptions known = options;
  if (known.classes == 0) known.classes = static_cast<int>(parts.classes.size());
  const std::string name = fmt::format("images {}", printable(parts.directory));
  const auto all = [&](const char* part, FileList& files) -> std::shared_ptr<const Dataset> {
    const std::string directory = files.directory();
    const auto source = std::make_shared<const Folders>(std::move(files));
    return images_of(name + part, source, all_of(*source, directory), parts.classes, known);
  };
  if (parts.divided)
    return {.train = all(" train", parts.train),
            .validation = all(" validation", parts.validation),
            .test = parts.test.size() > 0 ? all(" test", parts.test) : nullptr};
  if (options.parts.whole) return {.whole = all("", parts.train)};
  const auto source = std::make_shared<const Folders>(std::move(parts.train));
  std::vector<std::uint32_t> mine, others;
  for (const std::uint32_t i : all_of(*source, parts.directory)) (is_for_validation(i) ? others : mine).push_back(i);
  return {.train = images_of(name + " train", source, std::move(mine), parts.classes, known),
          .validation = images_of(name + " validation", source, std::move(others), parts.classes, known)};
}

std::vector<SettingSpec> image_settings() {
  std::vector<SettingSpec> settings = augment_settings();
  settings.insert(settings.end(), {{.name = kImageSize,
                                    .fallback = 0,
                                    .help = "height and width of a sample, in pixels",
                                    .low = 1,
                                    .high = kMostImageSize,
                                    .default_text = "the weights', or the model's usual size"},
                                   {.name = "max-corrupt",
                                    .fallback = kDefaultMaxCorrupt,
                                    .help = "unreadable files to replace by others before a rank gives up",
                                    .role = SettingSpec::Role::kTolerance,
                                    .synonyms = {"most-damaged"}}});
  return settings;
}

Augmentation augmentation_of(const Settings& settings) {
  const auto& operations = settings.integers(kRandAugment);
  if (operations[0] == 0 && operations[1] != 0)
    throw UsageError(fmt::format("--randaugment 0,{}, which is no operation", operations[1]),
                     "give 1 or more, or leave it out");
  return {.augment = settings.flag(kAugment),
          .operations = {.count = static_cast<int>(operations[0]), .bin = static_cast<int>(operations[1])},
          .erasing = settings.number(kErasing),
          .mixing = mixing_of(settings)};
}

ImagesOptions images_options(const OpenOptions& options) {
  const auto size = static_cast<int>(options.settings.integer(kImageSize));
  return {.classes = options.classes,
          .size = size > 0 ? size : options.usual_image_size,
          .augmentation = augmentation_of(options.settings),
          .max_corrupt = static_cast<std::uint64_t>(options.settings.integer("max-corrupt")),
          .parts = options.parts};
}

const DatasetFamily& images_family() {
  static const DatasetFamily family = {
      .name = "images",
      .argument = "DIR",
      .about = "JPEG and PNG, one folder per class",
      .remedy = "a directory with a folder for each class",
      .settings = image_settings(),
      .any_image_size = true,
      .open = [](const std::string&, const std::string& directory, const OpenOptions& options) {
        return open_images(directory, images_options(options));
      }};
  return family;
}

}  // namespace lockstep::data
