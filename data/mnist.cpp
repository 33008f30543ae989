// MNIST and data sets that come in the same four files (Fashion-MNIST, KMNIST, EMNIST).
#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "data/content_reader.h"
#include "data/images.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

constexpr int kMnistClasses = 10;
// Mean and standard deviation of MNIST's training pixels in [0, 1]; pixels are normalised with them.
constexpr float kMnistMean = 0.1307f;
constexpr float kMnistStd = 0.3081f;

constexpr const char* kFourFiles = "a data set mnist:DIR is a directory with MNIST's four IDX files";

// `stem` is "train-images", `suffix` is "idx3-ubyte".
std::string find_file(const std::string& directory, const std::string& stem, const std::string& suffix) {
  for (const char* separator : {"-", "."}) {
    for (const char* compression : {"", ".gz"}) {
      const fs::path path = fs::path(directory) / (stem + separator + suffix + compression);
      std::error_code error;
      // Anything but "it is not there" is for the reader to report.
      if (fs::status(path, error).type() != fs::file_type::not_found) return path.string();
    }
  }
  throw IoError(fmt::format("{}: missing, also as {}.{} and with .gz",
                            (fs::path(directory) / (stem + "-" + suffix)).string(), stem, suffix),
                kFourFiles);
}

class Mnist : public Dataset {
 public:
  Mnist(Info info, IdxArray images, IdxArray labels)
      : Dataset(std::move(info)), images_(std::move(images)), labels_(std::move(labels)) {
    for (std::size_t pixel = 0; pixel < normalized_.size(); ++pixel) {
      normalized_[pixel] = (static_cast<float>(pixel) / 255 - kMnistMean) / kMnistStd;
    }
  }

  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    LOCKSTEP_ASSERT(index < size() && x.size() == sample_elements(), "sample {} into {} numbers", index, x.size());
    const auto pixels = images_.data().subspan(index * x.size(), x.size());
    std::transform(pixels.begin(), pixels.end(), x.begin(), [this](std::uint8_t v) { return normalized_[v]; });
    label = labels_.data()[index];
  }

 private:
  IdxArray images_;  // (N, H, W)
  IdxArray labels_;  // (N)
  std::array<float, 256> normalized_{};
};

std::shared_ptr<const Dataset> open_part(const std::string& directory, const std::string& prefix, const char* name,
                                         int classes, const Mixing& mixing) {
  const std::string images_path = find_file(directory, prefix + "-images", "idx3-ubyte");
  const std::string labels_path = find_file(directory, prefix + "-labels", "idx1-ubyte");
  IdxArray images = read_idx(images_path, 3);
  IdxArray labels = read_idx(labels_path, 1);
  if (images.dims[0] != labels.dims[0]) {
    throw IoError(fmt::format("{} holds {} images but {} holds {} labels (bytes 4 to 7 of each)", images_path,
                              images.dims[0], labels_path, labels.dims[0]),
                  "take both files from the same source");
  }
  const auto bytes = labels.data();
  const auto wrong = std::find_if(bytes.begin(), bytes.end(), [&](std::uint8_t label) { return label >= classes; });
  if (wrong != bytes.end()) {
    const auto sample = static_cast<std::size_t>(wrong - bytes.begin());
    throw IoError(fmt::format("{}: label {} of sample {} (byte {}) is out of range for {} classes", labels_path, *wrong,
                              sample, labels.header_bytes + sample, classes),
                  "repair the file, or give the number of classes (--classes)");
  }
  const ImageForm form{.height = static_cast<int>(images.dims[1]),
                       .width = static_cast<int>(images.dims[2]),
                       .channels = 1,
                       .normalisation = {{kMnistMean, 0, 0}, {kMnistStd, 1, 1}},
                       .cropped = false};
  Dataset::Info info{.name = fmt::format("mnist {}", name),
                     .size = images.dims[0],
                     .dims = {static_cast<std::int64_t>(images.dims[1]), static_cast<std::int64_t>(images.dims[2]), 1},
                     .classes = classes,
                     .image = std::make_shared<const ImageForm>(form),
                     .mixing = mixing};
  return std::make_shared<Mnist>(std::move(info), std::move(images), std::move(labels));
}

// Reads train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte from
// `directory`, each also with a dot for the last hyphen's place ("train-images.idx3-ubyte") and with ".gz" appended.
// Samples have dims {H, W, 1}; memory holds the files' bytes, pixels become numbers when they are read. Throws IoError
// for what is missing, cut or malformed, for counts that differ and for labels not below `classes`.
DataSplits open_mnist(const std::string& directory, int classes, const Mixing& mixing) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    throw IoError(
        fmt::format("{}: {}", directory, error ? error.message() : "not a directory"),
        directory.starts_with('~') ? "shells expand ~ only at the start of a word: write mnist:$HOME/…" : kFourFiles);
  }
  DataSplits splits{open_part(directory, "train", "train", classes, mixing),
                    open_part(directory, "t10k", "test", classes, {})};
  const auto& train = splits.train->sample_dims();
  const auto& test = splits.validation->sample_dims();
  if (train != test) {
    throw IoError(fmt::format("{}: training images are {}×{} but test images are {}×{}", directory, train[0], train[1],
                              test[0], test[1]),
                  "take all four files from the same source");
  }
  return splits;
}

}  // namespace

const DatasetFamily& mnist_family() {
  static const DatasetFamily family = {
      .name = "mnist",
      .argument = "DIR",
      .about = "IDX files, plain or .gz",
      .remedy = "the directory with MNIST's IDX files",
      .settings = mixing_settings(),
      .test_validates = true,
      .open = [](const std::string&, const std::string& directory, const OpenOptions& options) {
        return open_mnist(directory, options.classes > 0 ? options.classes : kMnistClasses,
                          mixing_of(options.settings));
      }};
  return family;
}

}  // namespace lockstep::data
