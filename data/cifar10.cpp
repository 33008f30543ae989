#include "data/cifar10.h"

#include <array>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/splitmix.h"
#include "data/image_form.h"
#include "data/open.h"

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

constexpr int kSide = 32, kPadding = 4;
constexpr std::size_t kPlaneBytes = std::size_t{kSide} * kSide, kRecordBytes = 1 + 3 * kPlaneBytes;
constexpr const char* kFiles =
    "cifar10:DIR is a directory with the six files of CIFAR-10's binary version (cifar-10-binary.tar.gz)";

/// Where a sample begins in its image, and whether it is mirrored.
struct Change {
  int left = 0, top = 0;
  bool mirrored = false;
};

void check_label(int label, const std::string& path, std::uint64_t record) {
  if (label >= kCifar10Classes)
    throw IoError(fmt::format("{}: label {} of record {} (byte {}) is not below {}", path, label, record,
                              record * kRecordBytes, kCifar10Classes),
                  "fetch the file again, or check that it is CIFAR-10's and not CIFAR-100's");
}

class Cifar10 final : public Dataset {
 public:
  Cifar10(Info info, std::vector<RandomAccessFile> files, bool augment)
      : Dataset(std::move(info)), files_(std::move(files)), augment_(augment) {
    for (std::size_t c = 0; c < 3; ++c)
      for (std::size_t v = 0; v < 256; ++v)
        numbers_[c][v] = (static_cast<float>(v) / 255 - kCifar10.mean[c]) / kCifar10.std[c];
    std::uint64_t end = 0;
    for (const auto& file : files_) ends_.push_back(end += file.size() / kRecordBytes);
  }

  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override { write(index, {}, x, label); }

  void read_augmented(std::uint64_t index, std::uint64_t draw, std::span<float> x, std::int32_t& label) const override {
    if (!augment_) return read(index, x, label);
    SplitMix64 random(draw);
    const auto shift = [&] { return static_cast<int>(random.below(2 * kPadding + 1)) - kPadding; };
    Change change;
    change.left = shift();
    change.top = shift();
    change.mirrored = (random.next() >> 63) != 0;
    write(index, change, x, label);
  }

 private:
  void write(std::uint64_t index, const Change& change, std::span<float> x, std::int32_t& label) const {
    LOCKSTEP_ASSERT(index < size() && x.size() == sample_elements(), "sample {} into {} numbers", index, x.size());
    std::size_t file = 0;
    while (index >= ends_[file]) ++file;
    const std::uint64_t record = index - (file == 0 ? 0 : ends_[file - 1]);
    const auto* const bytes =
        reinterpret_cast<const std::uint8_t*>(files_[file].read(record * kRecordBytes, kRecordBytes).data());
    check_label(bytes[0], files_[file].path(), record);  // it was right when the file was opened
    label = bytes[0];
    float* out = x.data();
    for (int row = 0; row < kSide; ++row)
      for (int column = 0; column < kSide; ++column, out += 3) {
        const int from_row = row + change.top;
        const int from_column = (change.mirrored ? kSide - 1 - column : column) + change.left;
        const bool inside = from_row >= 0 && from_row < kSide && from_column >= 0 && from_column < kSide;
        for (std::size_t c = 0; c < 3; ++c)
          out[c] =
              numbers_[c][inside ? bytes[1 + c * kPlaneBytes + static_cast<std::size_t>(from_row * kSide + from_column)]
                                 : 0];
      }
  }

  std::vector<RandomAccessFile> files_;
  std::vector<std::uint64_t> ends_;  // samples up to the end of each file
  bool augment_;
  std::array<std::array<float, 256>, 3> numbers_{};
};

// See Note [Read, not mapped].
RandomAccessFile checked(const std::string& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  if (bytes.empty()) throw IoError(fmt::format("{}: the file is empty (ends at byte 0)", path), kFiles);
  if (bytes.size() % kRecordBytes != 0)
    throw IoError(
        fmt::format("{}: cut off: it ends at byte {}, within record {}, which ends at byte {}", path, bytes.size(),
                    bytes.size() / kRecordBytes, (bytes.size() / kRecordBytes + 1) * kRecordBytes),
        "fetch the file again: of CIFAR-10's, each has 30,730,000 bytes");
  for (std::size_t at = 0; at < bytes.size(); at += kRecordBytes)
    check_label(std::to_integer<int>(bytes[at]), path, at / kRecordBytes);
  return RandomAccessFile(path);
}

std::shared_ptr<const Dataset> open_part(const fs::path& directory, const std::vector<std::string>& names,
                                         const char* part, int classes, bool augment) {
  std::vector<RandomAccessFile> files;
  std::uint64_t size = 0;
  for (const std::string& name : names) {
    files.push_back(checked((directory / (name + ".bin")).string()));
    size += files.back().size() / kRecordBytes;
  }
  Dataset::Info info{
      .name = fmt::format("cifar10 {}", part),
      .size = size,
      .dims = {kSide, kSide, 3},
      .classes = classes,
      // As batches.meta.txt has them.
      .class_names = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"},
      .image = std::make_shared<const ImageForm>(
          ImageForm{.height = kSide, .width = kSide, .normalisation = kCifar10, .cropped = false})};
  return std::make_shared<Cifar10>(std::move(info), std::move(files), augment);
}

}  // namespace

DataSplits open_cifar10(const std::string& given, int classes, bool augment) {
  fs::path directory = given;
  std::error_code error;
  if (!fs::is_directory(directory, error))
    throw IoError(
        fmt::format("{}: {}", given, error ? error.message() : "not a directory"),
        given.starts_with('~') ? "shells expand ~ only at the start of a word: write cifar10:$HOME/…" : kFiles);
  const auto has = [&](const fs::path& name) { return fs::exists(directory / name, error); };
  if (!has("data_batch_1.bin") && has("cifar-10-batches-bin")) directory /= "cifar-10-batches-bin";
  const std::vector<std::string> train = {"data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4",
                                          "data_batch_5"};
  for (const std::string& name : train)
    if (!has(name + ".bin") && has(name))
      throw IoError(fmt::format("{}: it holds CIFAR-10's version for Python, which is pickled", directory.string()),
                    kFiles);
  return {open_part(directory, train, "train", classes, augment),
          open_part(directory, {"test_batch"}, "test", classes, augment)};
}

const DatasetFamily& cifar10_family() {
  static const DatasetFamily family = {
      .name = "cifar10",
      .argument = "DIR",
      .about = "binary version",
      .remedy = "the directory with the files of its binary version",
      .settings = {augment_setting()},
      .classes = kCifar10Classes,
      .open = [](const std::string&, const std::string& directory, const OpenOptions& options) {
        return open_cifar10(directory, options.classes, options.settings.flag(kAugment));
      }};
  return family;
}

}  // namespace lockstep::data
