// Texts and token files as rows of tokens.
#include "data/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "data/tokens.h"
#include "lockstep/data/open.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Text : public ::testing::Test {
 protected:
  template <class Call>
  static std::string message_of(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(Text, CharactersAreNumberedInOrderAndComeBack) {
  const std::string text = "héé €𝄞\n";
  const Characters characters(text, "it");
  EXPECT_EQ(characters.size(), 6);
  const auto tokens = characters.encode(text, "it");
  EXPECT_THAT(tokens, ElementsAre(2, 3, 3, 1, 4, 5, 0));
  EXPECT_EQ(characters.decode(tokens), text);
}

TEST_F(Text, WhatIsNoUtf8IsNamedWithItsByte) {
  for (const std::string& bad : {std::string("ab\xff"), std::string("ab\xc3"), std::string("ab\xc0\x80"),
                                 std::string("ab\xe0\x80\x80"), std::string("ab\xed\xa0\x80"),
                                 std::string("ab\xf4\x90\x80\x80"), std::string("ab\x80"), std::string("ab\xc3\x28")})
    EXPECT_THAT(message_of([&] { Characters(bad, "some.txt"); }), HasSubstr("some.txt: byte 2 is not UTF-8"));
  const Characters known("abc", "it");
  EXPECT_THAT(message_of([&] { static_cast<void>(known.encode("abé", "prompt")); }),
              AllOf(HasSubstr("prompt"), HasSubstr("U+00E9"), HasSubstr("byte 2"), HasSubstr("3")));
}

TEST_F(Text, RowsFollowOneAnother) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += static_cast<char>('a' + i % 26);
  const auto splits = open_data("text:" + directory_.write("a.txt", text), {.context = 4});
  EXPECT_TRUE(splits.train->has_tokens());
  EXPECT_EQ(splits.train->classes(), 26);
  EXPECT_EQ(splits.train->targets_per_sample(), 4u);
  ASSERT_EQ(splits.train->size(), 22u);  // of 90 tokens, the last of which is only a label
  ASSERT_EQ(splits.test->size(), 2u);    // of 10
  std::vector<std::int32_t> tokens(4), labels(4);
  splits.train->read_tokens(21, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(84 % 26, 85 % 26, 86 % 26, 87 % 26));
  EXPECT_THAT(labels, ElementsAre(85 % 26, 86 % 26, 87 % 26, 88 % 26));
  splits.test->read_tokens(0, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(90 % 26, 91 % 26, 92 % 26, 93 % 26));
  float x = 0;
  std::int32_t label = 0;
  EXPECT_THROW(splits.train->read(0, std::span(&x, 1), label), UsageError);
}

TEST_F(Text, WhatIsTooShortOrMissingIsSaid) {
  EXPECT_THAT(message_of([&] { open_text(directory_.write("short.txt", "abcdefghij"), 4); }),
              AllOf(HasSubstr("short.txt"), HasSubstr("10 tokens")));
  EXPECT_THAT(message_of([&] { open_text(directory_.write("empty.txt", ""), 4); }), HasSubstr("empty.txt: 0 tokens"));
  EXPECT_THAT(message_of([&] { open_text(directory_.path("none.txt"), 4); }), HasSubstr("none.txt"));
  EXPECT_THAT(message_of([&] { open_text(directory_.path(), 4); }), HasSubstr("is a directory"));
  EXPECT_THAT(message_of([&] { open_data("text:"); }), HasSubstr("needs a file"));
  EXPECT_THAT(message_of([&] { open_text(directory_.write("a.txt", "abc"), 0); }), HasSubstr("context"));
  EXPECT_THAT(message_of([&] { open_data("text:a.txt", {.classes = 5}); }), HasSubstr("--classes"));
}

std::string little_endian(const std::vector<int>& tokens) {
  std::string bytes;
  for (const int token : tokens) {
    bytes += static_cast<char>(token & 0xff);
    bytes += static_cast<char>(token >> 8);
  }
  return bytes;
}

TEST_F(Text, TokensAreReadWhereTheyAre) {
  std::vector<int> numbers(40);
  for (int i = 0; i < 40; ++i) numbers[static_cast<std::size_t>(i)] = 1000 + i;
  const auto splits = open_data("tokens:" + directory_.write("some.bin", little_endian(numbers)), {.context = 3});
  EXPECT_EQ(splits.train->classes(), kGpt2Tokens);
  ASSERT_EQ(splits.train->size(), 11u);  // of 36
  ASSERT_EQ(splits.test->size(), 1u);    // of 4
  std::vector<std::int32_t> tokens(3), labels(3);
  splits.test->read_tokens(0, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(1036, 1037, 1038));
  EXPECT_THAT(labels, ElementsAre(1037, 1038, 1039));
}

TEST_F(Text, TrainAndValBesideEachOther) {
  const std::string train = directory_.write("train.bin", little_endian({1, 2, 3, 4, 5, 6, 7}));
  directory_.write("val.bin", little_endian({9, 8, 7}));
  const auto splits = open_tokens(train, 2, 10);
  EXPECT_EQ(splits.train->size(), 3u);
  ASSERT_EQ(splits.test->size(), 1u);
  std::vector<std::int32_t> tokens(2), labels(2);
  splits.test->read_tokens(0, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(9, 8));
  EXPECT_THAT(labels, ElementsAre(8, 7));
}

// With a mapping this is the end of the process, by SIGBUS.
TEST_F(Text, AFileThatIsCutWhileItIsInUseIsNamed) {
  const std::string path = directory_.write("cut.bin", little_endian(std::vector<int>(40'000, 3)));
  const auto splits = open_tokens(path, 16, 10);
  std::vector<std::int32_t> tokens(16), labels(16);
  splits.train->read_tokens(2000, tokens, labels);
  std::filesystem::resize_file(path, 101);
  EXPECT_THAT(message_of([&] { splits.train->read_tokens(2000, tokens, labels); }),
              AllOf(HasSubstr("cut.bin: it had 80000 bytes when it was opened, and now ends at byte 64000 or before")));
  EXPECT_THAT(message_of([&] { splits.train->read_tokens(3, tokens, labels); }), HasSubstr("now ends at byte 101"));
  splits.train->read_tokens(1, tokens, labels);
  EXPECT_THAT(labels, Each(3));
  EXPECT_THAT(message_of([&] { splits.test->read_tokens(0, tokens, labels); }), HasSubstr("cut.bin"));
}

TEST_F(Text, TokensThatCannotBe) {
  const auto splits =
      open_tokens(directory_.write("big.bin", little_endian(std::vector<int>(40, 60000))), 3, kGpt2Tokens);
  std::vector<std::int32_t> tokens(3), labels(3);
  EXPECT_THAT(message_of([&] { splits.train->read_tokens(1, tokens, labels); }),
              AllOf(HasSubstr("big.bin"), HasSubstr("token 60000 at byte 6"), HasSubstr("50257")));
  EXPECT_THAT(message_of([&] { open_tokens(directory_.write("odd.bin", "abc"), 3, 10); }),
              HasSubstr("odd.bin: 3 bytes"));
  EXPECT_THAT(message_of([&] { open_tokens(directory_.write("short.bin", "abcd"), 3, 10); }), HasSubstr("2 tokens"));
}

}  // namespace
}  // namespace lockstep::data
