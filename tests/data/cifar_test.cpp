// CIFAR's files, hand-made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "base/error.h"
#include "data/rand_augment.h"
#include "data/resample.h"
#include "lockstep/data/open.h"
#include "tests/data/idx_files.h"
#include "tests/support/refusal.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kRecord = 3073;
// As docs/data.md has it.
constexpr Normalisation kCifar10 = {{0.4914f, 0.4822f, 0.4465f}, {0.2470f, 0.2435f, 0.2616f}};

// Red counts columns, green rows, blue is `blue`.
std::string record(int label, int blue) {
  std::string bytes(1, static_cast<char>(label));
  for (int c = 0; c < 3; ++c)
    for (int y = 0; y < 32; ++y)
      for (int x = 0; x < 32; ++x) bytes += static_cast<char>(c == 0 ? x + 1 : c == 1 ? y + 1 : blue);
  return bytes;
}

class Cifar10Test : public ::testing::Test {
 protected:
  Cifar10Test() {
    for (int file = 1; file <= 5; ++file)
      write(fmt::format("data_batch_{}.bin", file), record(file, 10 * file) + record(file + 1, 10 * file + 1));
    write("test_batch.bin", record(9, 99));
  }
  void write(const std::string& name, const std::string& content) { write_file(directory_.path(name), content); }
  DataSplits open(const OpenOptions& options = {}) const {
    return open_data("cifar10:" + directory_.path().string(), options);
  }
  std::string error() const {
    return testing::refusal_of<IoError>([&] { open(); });
  }
  // The byte that a number was.
  static int byte_of(float number, std::size_t channel) {
    return static_cast<int>(std::lround((number * kCifar10.std[channel] + kCifar10.mean[channel]) * 255));
  }

  TemporaryDirectory directory_;
};

TEST_F(Cifar10Test, PlanesBecomePixels) {
  const DataSplits splits = open();
  EXPECT_EQ(splits.train->size(), 10u);
  EXPECT_EQ(splits.validation->size(), 1u);
  EXPECT_EQ(splits.train->classes(), 10);
  EXPECT_EQ(splits.train->sample_dims(), (std::vector<std::int64_t>{32, 32, 3}));
  std::vector<float> x(3072);
  std::int32_t label = 0;
  for (std::uint64_t i = 0; i < 10; ++i) {
    splits.train->read(i, x, label);
    EXPECT_EQ(label, static_cast<int>(i / 2 + 1 + i % 2));
    for (const auto& [row, column] : {std::pair(0, 0), {31, 31}, {3, 17}}) {
      const float* const pixel = &x[static_cast<std::size_t>(row * 32 + column) * 3];
      EXPECT_EQ(byte_of(pixel[0], 0), column + 1);
      EXPECT_EQ(byte_of(pixel[1], 1), row + 1);
      EXPECT_EQ(byte_of(pixel[2], 2), static_cast<int>(10 * (i / 2 + 1) + i % 2));
    }
  }
  splits.validation->read(0, x, label);
  EXPECT_EQ(label, 9);
}

TEST_F(Cifar10Test, AugmentedSamplesAreShiftedAndMirrored) {
  const DataSplits splits = open();
  std::vector<float> x(3072), again(3072);
  std::int32_t label = 0;
  std::set<std::pair<int, int>> shifts;
  int mirrored = 0;
  const int draws = 600;
  for (std::uint64_t draw = 0; draw < draws; ++draw) {
    splits.train->read_augmented(0, draw, x, label);
    ASSERT_EQ(label, 1);
    // The middle is inside of every crop: its bytes say where it comes from.
    const float* const pixel = &x[static_cast<std::size_t>(16 * 32 + 16) * 3];
    const int column = byte_of(pixel[0], 0) - 1, row = byte_of(pixel[1], 1) - 1;
    const bool flipped = byte_of(pixel[3], 0) < byte_of(pixel[0], 0);
    mirrored += flipped;
    shifts.emplace(flipped ? column - 15 : column - 16, row - 16);
    // And the corner is black where it lies outside.
    const bool outside = row - 16 < 0 || (flipped ? column - 15 > 0 : column - 16 < 0);
    ASSERT_EQ(byte_of(x[2], 2), outside ? 0 : 10);
  }
  EXPECT_NEAR(mirrored, draws / 2.0, 75);
  EXPECT_EQ(shifts.size(), 81u);  // -4 to 4 each way
  for (const auto& [right, down] : shifts) ASSERT_LE(std::max(std::abs(right), std::abs(down)), 4);
  splits.train->read_augmented(3, 5, x, label);
  splits.train->read_augmented(3, 5, again, label);
  EXPECT_EQ(x, again);
  open({.settings = {{"augment", false}}}).train->read_augmented(3, 5, x, label);
  splits.train->read(3, again, label);
  EXPECT_EQ(x, again);
}

TEST_F(Cifar10Test, ErasedSamplesAreTheOthersWithARectangleOfZeros) {
  const auto read = [&](double erasing, std::uint64_t draw) {
    const auto train = open({.settings = {{"erasing", erasing}}}).train;
    std::vector<float> x(train->sample_elements());
    std::int32_t label = -1;
    train->read_augmented(0, draw, x, label);
    return x;
  };
  int changed = 0;
  for (std::uint64_t draw = 0; draw < 20; ++draw) {
    const auto plain = read(0, draw), erased = read(1, draw);
    if (plain != erased) ++changed;
    for (std::size_t i = 0; i < plain.size(); ++i) ASSERT_TRUE(erased[i] == plain[i] || erased[i] == 0);
  }
  EXPECT_GE(changed, 19);
}

TEST_F(Cifar10Test, RandAugmentChangesTheBytesOfTheOthers) {
  const auto plain = open().train;
  const auto changed = open({.settings = {{"randaugment", {2, 9}}}}).train;
  std::vector<float> x(3072), y(3072), wanted(3072);
  std::int32_t label = -1;
  PixelChanger changer;
  for (std::uint64_t draw = 0; draw < 20; ++draw) {
    plain->read_augmented(3, draw, x, label);
    changed->read_augmented(3, draw, y, label);
    std::vector<std::uint8_t> bytes;
    for (std::size_t i = 0; i < x.size(); ++i) bytes.push_back(static_cast<std::uint8_t>(byte_of(x[i], i % 3)));
    changer.apply({.count = 2, .bin = 9}, draw, bytes, {32, 32});
    normalise(bytes, kCifar10, wanted);
    ASSERT_EQ(y, wanted) << draw;
  }
  plain->read(3, x, label);
  changed->read(3, y, label);
  EXPECT_EQ(x, y);
}

TEST_F(Cifar10Test, CutAndWrongFilesAreNamedWithTheByte) {
  write("data_batch_3.bin", (record(0, 0) + record(1, 0)).substr(0, kRecord + 5));
  EXPECT_THAT(error(), AllOf(HasSubstr("data_batch_3.bin"), HasSubstr("ends at byte 3078, within record 1")));
  write("data_batch_3.bin", record(0, 0) + record(10, 0));
  EXPECT_THAT(error(), AllOf(HasSubstr("label 10 of record 1 (byte 3073)")));
  write("data_batch_3.bin", "");
  EXPECT_THAT(error(), HasSubstr("byte 0"));
  std::filesystem::remove(directory_.path("data_batch_3.bin"));
  EXPECT_THAT(error(), AllOf(HasSubstr("data_batch_3.bin"), HasSubstr("No such file")));
  write("data_batch_3", "pickled");
  EXPECT_THAT(error(), HasSubstr("version for Python"));
  std::filesystem::create_directory(directory_.path("data_batch_3.bin"));
  EXPECT_THAT(error(), HasSubstr("directory"));
  EXPECT_THROW(open_data("cifar10:" + directory_.path("test_batch.bin")), IoError);
}

// With a mapping this is the end of the process, by SIGBUS.
TEST_F(Cifar10Test, FilesThatChangeWhileTheyAreInUseAreNamed) {
  const DataSplits splits = open();
  std::vector<float> x(splits.train->sample_elements());
  std::int32_t label = 0;
  const auto error_of = [&](std::uint64_t sample) {
    return testing::refusal_of<IoError>([&] { splits.train->read(sample, x, label); });
  };
  std::filesystem::resize_file(directory_.path("data_batch_2.bin"), kRecord + 7);
  EXPECT_EQ(error_of(2), "");
  EXPECT_THAT(error_of(3), AllOf(HasSubstr("data_batch_2.bin: it had 6146 bytes"), HasSubstr("at byte 3080")));
  write("data_batch_3.bin", record(200, 3) + record(1, 1));
  EXPECT_THAT(error_of(4), AllOf(HasSubstr("data_batch_3.bin"), HasSubstr("label 200 of record 0")));
}

// CIFAR-100's records begin with two labels, and the second one counts.
class Cifar100Test : public ::testing::Test {
 protected:
  Cifar100Test() {
    write("train.bin", fine(3, 0, 10) + fine(19, 99, 20) + fine(0, 42, 30));
    write("test.bin", fine(7, 55, 40));
  }
  static std::string fine(int coarse, int label, int blue) {
    return std::string(1, static_cast<char>(coarse)) + record(label, blue);
  }
  void write(const std::string& name, const std::string& content) { write_file(directory_.path(name), content); }
  DataSplits open(const OpenOptions& options = {}) const {
    return open_data("cifar100:" + directory_.path().string(), options);
  }
  std::string error() const {
    return testing::refusal_of<IoError>([&] { open(); });
  }

  TemporaryDirectory directory_;
};

TEST_F(Cifar100Test, TheFineLabelIsTheClass) {
  const DataSplits splits = open();
  EXPECT_EQ(splits.train->size(), 3u);
  EXPECT_EQ(splits.validation->size(), 1u);
  EXPECT_EQ(splits.train->classes(), 100);
  EXPECT_EQ(splits.train->class_names().size(), 100u);
  EXPECT_EQ(splits.train->sample_dims(), (std::vector<std::int64_t>{32, 32, 3}));
  std::vector<float> x(3072);
  std::int32_t label = 0;
  const int labels[] = {0, 99, 42};
  for (std::uint64_t i = 0; i < 3; ++i) {
    splits.train->read(i, x, label);
    EXPECT_EQ(label, labels[i]);
    const float* const pixel = &x[static_cast<std::size_t>(3 * 32 + 17) * 3];
    const auto byte = [&](int c, float mean, float std) {
      return static_cast<int>(std::lround((pixel[c] * std + mean) * 255));
    };
    EXPECT_EQ(byte(0, 0.5071f, 0.2673f), 18);
    EXPECT_EQ(byte(1, 0.4865f, 0.2564f), 4);
    EXPECT_EQ(byte(2, 0.4409f, 0.2762f), static_cast<int>(10 * (i + 1)));
  }
  splits.validation->read(0, x, label);
  EXPECT_EQ(label, 55);
  EXPECT_EQ(open({.classes = 120}).train->classes(), 120);
  EXPECT_THROW(open({.classes = 99}), UsageError);
}

TEST_F(Cifar100Test, CutAndWrongFilesAreNamedWithTheByte) {
  write("train.bin", fine(3, 0, 10) + fine(19, 100, 20));
  EXPECT_THAT(error(), HasSubstr("train.bin: label 100 of record 1 (byte 3075) is not below 100"));
  write("train.bin", fine(20, 9, 10));
  EXPECT_THAT(error(), HasSubstr("train.bin: label 20 of record 0 (byte 0) is not below 20"));
  write("train.bin", record(3, 0));
  EXPECT_THAT(error(), HasSubstr("ends at byte 3073, within record 0, which ends at byte 3074"));
  std::filesystem::remove(directory_.path("train.bin"));
  EXPECT_THAT(error(), AllOf(HasSubstr("train.bin"), HasSubstr("No such file")));
  write("train", "pickled");
  EXPECT_THAT(error(), HasSubstr("CIFAR-100's version for Python"));
}

TEST_F(Cifar100Test, TheArchivesOwnFolderIsFound) {
  std::filesystem::create_directory(directory_.path("cifar-100-binary"));
  for (const char* name : {"train.bin", "test.bin"})
    std::filesystem::rename(directory_.path(name), directory_.path(std::string("cifar-100-binary/") + name));
  EXPECT_EQ(open().train->size(), 3u);
}

TEST_F(Cifar10Test, TheArchivesOwnFolderIsFound) {
  std::filesystem::create_directory(directory_.path("cifar-10-batches-bin"));
  for (const char* name :
       {"data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"})
    std::filesystem::rename(directory_.path(name + std::string(".bin")),
                            directory_.path("cifar-10-batches-bin/" + std::string(name) + ".bin"));
  EXPECT_EQ(open().train->size(), 10u);
}

}  // namespace
}  // namespace lockstep::data
