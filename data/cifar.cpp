// CIFAR: small photographs of 32 × 32 pixels (https://www.cs.toronto.edu/~kriz/cifar.html, "binary version"), in
// records of a label, or several, and 32 × 32 bytes each of red, green and blue. A file may have any whole number of
// records. Samples have dims {32, 32, 3}. Augmented ones are cropped at random out of an image with four black pixels
// added on each side, and every other time mirrored.
#include <array>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/splitmix.h"
#include "data/images.h"
#include "data/resample.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

constexpr int kSide = 32, kPadding = 4;
constexpr std::size_t kPlaneBytes = std::size_t{kSide} * kSide;

/// How the data sets differ.
struct CifarFiles {
  std::string name;                      // of the family: "cifar10"
  std::string title;                     // "CIFAR-10"
  std::vector<std::string> train, test;  // files, without ".bin"
  std::string folder;                    // within the archive: "cifar-10-batches-bin"
  std::string archive;                   // "cifar-10-binary.tar.gz"
  std::vector<int> labels;               // how many classes each byte before the pixels distinguishes; the last counts
  std::string usual_sizes;               // of whole files: "each has 30,730,000 bytes"
  Normalisation normalisation;           // mean and standard deviation of the training pixels in [0, 1]
  std::vector<std::string> class_names;
};

std::size_t record_bytes(const CifarFiles& files) { return files.labels.size() + 3 * kPlaneBytes; }

std::string remedy_of(const CifarFiles& files) {
  return fmt::format("{}:DIR is a directory with the {} files of {}'s binary version ({})", files.name,
                     files.train.size() + files.test.size(), files.title, files.archive);
}

/// Where a sample begins in its image, and whether it is mirrored.
struct Change {
  int left = 0, top = 0;
  bool mirrored = false;
};

void check_labels(const CifarFiles& files, const std::uint8_t* labels, const std::string& path, std::uint64_t record) {
  for (std::size_t i = 0; i < files.labels.size(); ++i)
    if (labels[i] >= files.labels[i])
      throw IoError(fmt::format("{}: label {} of record {} (byte {}) is not below {}", path, labels[i], record,
                                record * record_bytes(files) + i, files.labels[i]),
                    fmt::format("fetch the file again, or check that it is {}'s", files.title));
}

class Cifar final : public Dataset {
 public:
  Cifar(Info info, const CifarFiles& format, std::vector<RandomAccessFile> files, const Augmentation& augmentation)
      : Dataset(std::move(info)), format_(format), files_(std::move(files)), augmentation_(augmentation) {
    std::uint64_t end = 0;
    for (const auto& file : files_) ends_.push_back(end += file.size() / record_bytes(format));
  }

  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    normalise(pixels_of(index, {}, label), format_.normalisation, x);
  }

  void read_augmented(std::uint64_t index, std::uint64_t draw, std::span<float> x, std::int32_t& label) const override {
    if (!augmentation_.augment) return read(index, x, label);
    SplitMix64 random(draw);
    const auto shift = [&] { return static_cast<int>(random.below(2 * kPadding + 1)) - kPadding; };
    Change change;
    change.left = shift();
    change.top = shift();
    change.mirrored = (random.next() >> 63) != 0;
    Pixels pixels = pixels_of(index, change, label);
    thread_local PixelChanger changer;
    changer.apply(augmentation_.operations, draw, pixels, {kSide, kSide});
    normalise(pixels, format_.normalisation, x);
    erase_some(x, {kSide, kSide}, augmentation_.erasing, draw);
  }

 private:
  using Pixels = std::array<std::uint8_t, 3 * kPlaneBytes>;

  /// In their places of a sample.
  Pixels pixels_of(std::uint64_t index, const Change& change, std::int32_t& label) const {
    LOCKSTEP_ASSERT(index < size(), "sample {}", index);
    std::size_t file = 0;
    while (index >= ends_[file]) ++file;
    const std::uint64_t record = index - (file == 0 ? 0 : ends_[file - 1]);
    const std::size_t length = record_bytes(format_), labels = format_.labels.size();
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(files_[file].read(record * length, length).data());
    check_labels(format_, bytes, files_[file].path(), record);  // they were right when the file was opened
    label = bytes[labels - 1];
    const std::uint8_t* const pixels = bytes + labels;
    Pixels made;
    std::uint8_t* out = made.data();
    for (int row = 0; row < kSide; ++row)
      for (int column = 0; column < kSide; ++column, out += 3) {
        const int from_row = row + change.top;
        const int from_column = (change.mirrored ? kSide - 1 - column : column) + change.left;
        const bool inside = from_row >= 0 && from_row < kSide && from_column >= 0 && from_column < kSide;
        for (std::size_t c = 0; c < 3; ++c)
          out[c] = inside ? pixels[c * kPlaneBytes + static_cast<std::size_t>(from_row * kSide + from_column)] : 0;
      }
    return made;
  }

  CifarFiles format_;
  std::vector<RandomAccessFile> files_;
  std::vector<std::uint64_t> ends_;  // samples up to the end of each file
  Augmentation augmentation_;
};

// See Note [Read, not mapped].
RandomAccessFile checked(const CifarFiles& files, const std::string& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  const std::size_t length = record_bytes(files);
  if (bytes.empty()) throw IoError(fmt::format("{}: the file is empty (ends at byte 0)", path), remedy_of(files));
  if (bytes.size() % length != 0)
    throw IoError(fmt::format("{}: cut off: it ends at byte {}, within record {}, which ends at byte {}", path,
                              bytes.size(), bytes.size() / length, (bytes.size() / length + 1) * length),
                  fmt::format("fetch the file again: of {}'s, {}", files.title, files.usual_sizes));
  for (std::size_t at = 0; at < bytes.size(); at += length)
    check_labels(files, reinterpret_cast<const std::uint8_t*>(bytes.data() + at), path, at / length);
  return RandomAccessFile(path);
}

std::shared_ptr<const Dataset> open_part(const CifarFiles& files, const fs::path& directory,
                                         const std::vector<std::string>& names, const char* part, int classes,
                                         const Augmentation& augmentation) {
  std::vector<RandomAccessFile> opened;
  std::uint64_t size = 0;
  for (const std::string& name : names) {
    opened.push_back(checked(files, (directory / (name + ".bin")).string()));
    size += opened.back().size() / record_bytes(files);
  }
  Dataset::Info info{.name = fmt::format("{} {}", files.name, part),
                     .size = size,
                     .dims = {kSide, kSide, 3},
                     .classes = classes,
                     .class_names = files.class_names,
                     .image = std::make_shared<const ImageForm>(ImageForm{
                         .height = kSide, .width = kSide, .normalisation = files.normalisation, .cropped = false}),
                     .mixing = augmentation.mixing};
  return std::make_shared<Cifar>(std::move(info), files, std::move(opened), augmentation);
}

/// From `given`, or from the archive's folder within. `classes`, at least as many as there are, is what the data sets
/// report.
DataSplits open_cifar(const CifarFiles& files, const std::string& given, int classes,
                      const Augmentation& augmentation) {
  fs::path directory = given;
  std::error_code error;
  if (!fs::is_directory(directory, error))
    throw IoError(fmt::format("{}: {}", given, error ? error.message() : "not a directory"),
                  given.starts_with('~')
                      ? fmt::format("shells expand ~ only at the start of a word: write {}:$HOME/…", files.name)
                      : remedy_of(files));
  const auto has = [&](const fs::path& name) { return fs::exists(directory / name, error); };
  if (!has(files.train.front() + ".bin") && has(files.folder)) directory /= files.folder;
  for (const std::string& name : files.train)
    if (!has(name + ".bin") && has(name))
      throw IoError(
          fmt::format("{}: it holds {}'s version for Python, which is pickled", directory.string(), files.title),
          remedy_of(files));
  return {open_part(files, directory, files.train, "train", classes, augmentation),
          open_part(files, directory, files.test, "test", classes, augmentation)};
}

template <const CifarFiles& (*kFiles)()>
DatasetFamily cifar_family() {
  return {.name = kFiles().name,
          .argument = "DIR",
          .about = "binary version",
          .remedy = "the directory with the files of its binary version",
          .settings = augment_settings(),
          .classes = kFiles().labels.back(),
          .test_validates = true,
          .open = [](const std::string&, const std::string& directory, const OpenOptions& options) {
            return open_cifar(kFiles(), directory, options.classes, augmentation_of(options.settings));
          }};
}

// The normalisation is over the pixels of all images: fastai's cifar_stats and Composer's CIFAR10_CHANNEL_MEAN and _STD
// have it too. (0.2023, 0.1994, 0.2010, also seen, are means of each image's own.)
const CifarFiles& cifar10_files() {
  static const CifarFiles files = {
      .name = "cifar10",
      .title = "CIFAR-10",
      .train = {"data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"},
      .test = {"test_batch"},
      .folder = "cifar-10-batches-bin",
      .archive = "cifar-10-binary.tar.gz",
      .labels = {10},
      .usual_sizes = "each has 30,730,000 bytes",
      .normalisation = {{0.4914f, 0.4822f, 0.4465f}, {0.2470f, 0.2435f, 0.2616f}},
      // As batches.meta.txt has them.
      .class_names = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"}};
  return files;
}

// Of its two labels the second one counts, that of the 100 fine classes. The normalisation is that of all training
// pixels.
const CifarFiles& cifar100_files() {
  static const CifarFiles files = {
      .name = "cifar100",
      .title = "CIFAR-100",
      .train = {"train"},
      .test = {"test"},
      .folder = "cifar-100-binary",
      .archive = "cifar-100-binary.tar.gz",
      .labels = {20, 100},
      .usual_sizes = "train.bin has 153,700,000 bytes and test.bin 30,740,000",
      .normalisation = {{0.5071f, 0.4865f, 0.4409f}, {0.2673f, 0.2564f, 0.2762f}},
      // As torchvision has them; fine_label_names.txt has the same but for its computer_keyboard.
      .class_names = {
          "apple",      "aquarium_fish", "baby",         "bear",       "beaver",      "bed",         "bee",
          "beetle",     "bicycle",       "bottle",       "bowl",       "boy",         "bridge",      "bus",
          "butterfly",  "camel",         "can",          "castle",     "caterpillar", "cattle",      "chair",
          "chimpanzee", "clock",         "cloud",        "cockroach",  "couch",       "crab",        "crocodile",
          "cup",        "dinosaur",      "dolphin",      "elephant",   "flatfish",    "forest",      "fox",
          "girl",       "hamster",       "house",        "kangaroo",   "keyboard",    "lamp",        "lawn_mower",
          "leopard",    "lion",          "lizard",       "lobster",    "man",         "maple_tree",  "motorcycle",
          "mountain",   "mouse",         "mushroom",     "oak_tree",   "orange",      "orchid",      "otter",
          "palm_tree",  "pear",          "pickup_truck", "pine_tree",  "plain",       "plate",       "poppy",
          "porcupine",  "possum",        "rabbit",       "raccoon",    "ray",         "road",        "rocket",
          "rose",       "sea",           "seal",         "shark",      "shrew",       "skunk",       "skyscraper",
          "snail",      "snake",         "spider",       "squirrel",   "streetcar",   "sunflower",   "sweet_pepper",
          "table",      "tank",          "telephone",    "television", "tiger",       "tractor",     "train",
          "trout",      "tulip",         "turtle",       "wardrobe",   "whale",       "willow_tree", "wolf",
          "woman",      "worm"}};
  return files;
}

}  // namespace

const DatasetFamily& cifar10_family() {
  static const DatasetFamily family = cifar_family<cifar10_files>();
  return family;
}

const DatasetFamily& cifar100_family() {
  static const DatasetFamily family = cifar_family<cifar100_files>();
  return family;
}

}  // namespace lockstep::data
