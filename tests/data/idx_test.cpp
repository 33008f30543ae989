#include "data/content_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <optional>

#include "base/error.h"
#include "tests/data/idx_files.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The text of the IoError that reading `content` throws; nothing if it can be read.
std::optional<std::string> error_of(const std::string& path, int dimensions) {
  try {
    read_idx(path, dimensions);
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), StartsWith(path + ": "));
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return std::nullopt;
}

std::string pixels(std::size_t count) {
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) bytes += static_cast<char>((i * 37 + i / 11) & 0xff);
  return bytes;
}

class IdxTest : public ::testing::Test {
 protected:
  std::optional<std::string> error_in(const std::string& content, int dimensions = 3) {
    return error_of(write_file(directory_.path("file"), content), dimensions);
  }

  TemporaryDirectory directory_;
  const std::string images_ = idx_content({5, 3, 4}, pixels(60));
};

TEST_F(IdxTest, ReadsPlainAndCompressed) {
  for (const auto& content : {images_, gzip(images_), gzip(images_.substr(0, 21)) + gzip(images_.substr(21))}) {
    const IdxArray array = read_idx(write_file(directory_.path("file"), content), 3);
    EXPECT_EQ(array.dims, (std::vector<std::uint64_t>{5, 3, 4}));
    EXPECT_EQ(array.header_bytes, 16u);
    EXPECT_EQ(std::string(array.data().begin(), array.data().end()), pixels(60));
  }
  const IdxArray labels = read_idx(write_file(directory_.path("file"), idx_content({3}, "abc")), 1);
  EXPECT_EQ(labels.header_bytes, 8u);
  EXPECT_EQ(std::string(labels.data().begin(), labels.data().end()), "abc");
}

TEST_F(IdxTest, FileThatIsNotThereOrNotAFile) {
  EXPECT_THAT(error_of(directory_.path("none"), 3).value(), HasSubstr("No such file or directory"));
  EXPECT_THAT(error_of(directory_.path(), 3).value(), HasSubstr("is a directory"));
  ASSERT_EQ(::mkfifo(directory_.path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of(directory_.path("pipe"), 3).value(), HasSubstr("not a regular file"));
  EXPECT_THAT(error_in("").value(), HasSubstr("the file is empty"));
}

TEST_F(IdxTest, CutAtEveryByte) {
  for (std::size_t size = 1; size < images_.size(); ++size) {
    const auto plain = error_in(images_.substr(0, size));
    ASSERT_TRUE(plain) << size;
    EXPECT_THAT(*plain, AllOf(HasSubstr("cut off"), HasSubstr("ends at byte " + std::to_string(size)))) << size;
    const auto inside = error_in(gzip(images_.substr(0, size)));
    ASSERT_TRUE(inside) << size;
    EXPECT_THAT(*inside, AllOf(HasSubstr("cut off"), HasSubstr("ends at byte " + std::to_string(size)))) << size;
  }
  const std::string packed = gzip(images_);
  for (std::size_t size = 1; size < packed.size(); ++size) {
    const auto error = error_in(packed.substr(0, size));
    ASSERT_TRUE(error) << size << " of " << packed.size();
    EXPECT_THAT(*error, HasSubstr("cut off")) << size;
  }
}

TEST_F(IdxTest, EveryBitOfTheHeaderMatters) {
  for (std::size_t bit = 0; bit < 16 * 8; ++bit) {
    std::string flipped = images_;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_TRUE(error_in(flipped)) << "byte " << bit / 8 << " bit " << bit % 8;
    EXPECT_TRUE(error_in(gzip(flipped))) << "compressed: byte " << bit / 8 << " bit " << bit % 8;
  }
}

TEST_F(IdxTest, CompressedBitFlipsAreErrorsOrHarmless) {
  const std::string packed = gzip(images_);
  int errors = 0;
  for (std::size_t bit = 0; bit < packed.size() * 8; ++bit) {
    std::string flipped = packed;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    const std::string path = write_file(directory_.path("file"), flipped);
    if (error_of(path, 3)) {
      ++errors;
      continue;
    }
    // Bits without meaning (time and system in gzip's header, the padding after the last code) change nothing.
    const IdxArray array = read_idx(path, 3);
    ASSERT_EQ(std::string(array.data().begin(), array.data().end()), pixels(60)) << "bit " << bit;
  }
  const int harmless_at_most = 10 * 8 + 7;
  EXPECT_GE(errors, 8 * static_cast<int>(packed.size()) - harmless_at_most);
}

TEST_F(IdxTest, NamesTheByteThatIsWrong) {
  std::string content = images_;
  content[1] = 7;
  EXPECT_THAT(error_in(content).value(), AllOf(HasSubstr("not an IDX file"), HasSubstr("(byte 1)")));
  content = images_;
  content[2] = 0x0d;
  EXPECT_THAT(error_in(content).value(), AllOf(HasSubstr("data type 0x0d"), HasSubstr("(byte 2)")));
  EXPECT_THAT(error_in(images_, 1).value(), HasSubstr("the number of dimensions (byte 3) is 3, not 1"));
  EXPECT_THAT(error_in(idx_content({0, 3, 4}, "")).value(), HasSubstr("it holds 0 samples (bytes 4 to 7)"));
  EXPECT_THAT(error_in(idx_content({5, 3, 0}, "")).value(), HasSubstr("samples of size 0 (bytes 12 to 15)"));
  EXPECT_THAT(error_in(images_ + "x").value(), AllOf(HasSubstr("trailing bytes"), HasSubstr("ends at byte 76")));
  EXPECT_THAT(error_in(gzip(images_ + "x")).value(), AllOf(HasSubstr("trailing bytes"), HasSubstr("ends at byte 76")));
  EXPECT_THAT(error_in(gzip(images_) + gzip("x")).value(), HasSubstr("trailing bytes"));
}

TEST_F(IdxTest, SizesThatTheFileCannotHoldTakeNoMemory) {
  for (const auto& dims : std::vector<std::vector<std::uint32_t>>{
           {0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff, 1}, {60000, 65536, 65536}, {60000, 28, 28}}) {
    const std::string content = idx_content(dims, pixels(60));
    EXPECT_THAT(error_in(content).value(), AllOf(HasSubstr("ends at byte 76"), HasSubstr("bytes 4 to 15")));
    EXPECT_THAT(error_in(gzip(content)).value(), HasSubstr("compressed bytes can hold"));
  }
}

TEST_F(IdxTest, CompressionBombEndsAtTheSizesInTheHeader) {
  // 64 MB of zeros after a header that says 48 bytes: one byte more than that is read.
  const std::string bomb = gzip(idx_content({3, 4, 4}, std::string(std::size_t{64} << 20, '\0')));
  ASSERT_LT(bomb.size(), 100000u);
  EXPECT_THAT(error_in(bomb).value(), AllOf(HasSubstr("trailing bytes"), HasSubstr("ends at byte 64")));
}

TEST_F(IdxTest, HighestCompressionIsAccepted) {
  constexpr std::uint32_t kRows = 8192;
  const std::string content = idx_content({kRows, 28, 28}, std::string(std::size_t{kRows} * 28 * 28, '\0'));
  EXPECT_EQ(error_in(gzip(content)), std::nullopt);
}

}  // namespace
}  // namespace lockstep::data
