// Texts and token files as rows of tokens.
#include "data/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "data/documents.h"
#include "data/tokens.h"
#include "lockstep/data/open.h"
#include "tests/support/refusal.h"
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

TEST_F(Text, AByteOrderMarkIsNoCharacter) {
  const std::string plain = directory_.write("plain.txt", "ab"), marked = directory_.write("marked.txt",
                                                                                           "\xEF\xBB\xBF"
                                                                                           "ab");
  EXPECT_EQ(read_characters(marked).text(), "ab");
  EXPECT_EQ(read_characters(marked).text(), read_characters(plain).text());
}

TEST_F(Text, SeveralFilesAndLinesOfJsonAreOneAfterTheOther) {
  const std::string plain = directory_.write("a.txt", "ab"), ended = directory_.write("b.txt", "cd\n");
  const std::string lines = directory_.write(
      "c.jsonl", "{\"text\": \"e\\nf\", \"id\": 1}\r\n\n{\"id\": [2], \"text\": \"\"}\n{\"text\": \"\\u00e9\"}");
  EXPECT_EQ(Documents(plain).joined(), "ab");
  EXPECT_EQ(Documents(ended + "," + plain).joined(), "cd\nab\n");
  const Documents all(plain + "," + ended + "," + lines);
  EXPECT_EQ(all.joined(), "ab\ncd\ne\nf\n\u00e9\n");
  EXPECT_EQ(all.bytes(), 2U + 3 + 3 + 2);
  const Characters characters(all.joined(), "it");
  EXPECT_EQ(characters.decode(all.encode(characters)), all.joined());
  EXPECT_THAT(document_files(plain + "," + lines), ElementsAre(plain, lines));
  // A file may have a comma in its name.
  const std::string odd = directory_.write("x,y.txt", "odd");
  EXPECT_EQ(Documents(odd).joined(), "odd");
}

TEST_F(Text, LinesThatAreNoTextsAreNamed) {
  for (const auto& [line, why] : {std::pair("{\"body\": \"a\"}", "'text' is missing"),
                                  std::pair("{\"text\": 1}", "'text'"), std::pair("plain", "line 2"),
                                  std::pair("[\"a\"]", "is no object"), std::pair("{\"text\": \"a\"} {}", "line 2")}) {
    const std::string path = directory_.write("bad.jsonl", std::string("{\"text\": \"a\"}\n") + line + "\n");
    EXPECT_THAT(testing::line_of<IoError>([&] { const Documents documents(path); }),
                AllOf(HasSubstr("bad.jsonl, line 2"), HasSubstr(why)));
  }
  const std::string none = directory_.write("none.ndjson", "\n\n");
  EXPECT_THAT(testing::line_of<IoError>([&] { const Documents documents(none); }), HasSubstr("it has no text"));
  EXPECT_THAT(testing::line_of<IoError>([&] { const Documents documents(none + ",missing.txt"); }),
              HasSubstr("missing.txt"));
  EXPECT_THAT(testing::line_of<UsageError>([&] { const Documents documents(none + ","); }),
              HasSubstr("a comma without a file"));
}

TEST_F(Text, InvalidUtf8NamesTheByte) {
  for (const std::string& bad : {std::string("ab\xff"), std::string("ab\xc3"), std::string("ab\xc0\x80"),
                                 std::string("ab\xe0\x80\x80"), std::string("ab\xed\xa0\x80"),
                                 std::string("ab\xf4\x90\x80\x80"), std::string("ab\x80"), std::string("ab\xc3\x28")})
    EXPECT_THAT(testing::line_of<Error>([&] { Characters(bad, "some.txt"); }),
                HasSubstr("some.txt: byte 2 is not UTF-8"));
  const Characters known("abc", "it");
  EXPECT_THAT(testing::line_of<Error>([&] { static_cast<void>(known.encode("abé", "prompt")); }),
              AllOf(HasSubstr("prompt"), HasSubstr("U+00E9"), HasSubstr("byte 2"), HasSubstr("3")));
}

TEST_F(Text, RowsFollowOneAnother) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += static_cast<char>('a' + i % 26);
  const auto splits = open_data("text:" + directory_.write("a.txt", text), {.context = 4});
  EXPECT_TRUE(splits.train->has_tokens());
  EXPECT_EQ(splits.train->classes(), 26);
  EXPECT_EQ(splits.train->targets_per_sample(), 4u);
  ASSERT_EQ(splits.train->size(), 22u);      // of 90 tokens, the last of which is only a label
  ASSERT_EQ(splits.validation->size(), 2u);  // of 10
  std::vector<std::int32_t> tokens(4), labels(4);
  splits.train->read_tokens(21, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(84 % 26, 85 % 26, 86 % 26, 87 % 26));
  EXPECT_THAT(labels, ElementsAre(85 % 26, 86 % 26, 87 % 26, 88 % 26));
  splits.validation->read_tokens(0, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(90 % 26, 91 % 26, 92 % 26, 93 % 26));
  float x = 0;
  std::int32_t label = 0;
  EXPECT_THROW(splits.train->read(0, std::span(&x, 1), label), UsageError);
}

TEST_F(Text, TooShortOrMissingIsReported) {
  EXPECT_THAT(testing::line_of<Error>([&] { open_text(directory_.write("short.txt", "abcdefghij"), 4); }),
              AllOf(HasSubstr("short.txt"), HasSubstr("10 tokens")));
  EXPECT_THAT(testing::line_of<Error>([&] { open_text(directory_.write("empty.txt", ""), 4); }),
              HasSubstr("empty.txt: 0 tokens"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_text(directory_.path("none.txt"), 4); }), HasSubstr("none.txt"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_text(directory_.path(), 4); }), HasSubstr("is a directory"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_data("text:"); }), HasSubstr("needs a file"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_text(directory_.write("a.txt", "abc"), 0); }), HasSubstr("context"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_data("text:a.txt", {.classes = 5}); }), HasSubstr("--classes"));
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
  ASSERT_EQ(splits.train->size(), 11u);      // of 36
  ASSERT_EQ(splits.validation->size(), 1u);  // of 4
  std::vector<std::int32_t> tokens(3), labels(3);
  splits.validation->read_tokens(0, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(1036, 1037, 1038));
  EXPECT_THAT(labels, ElementsAre(1037, 1038, 1039));
}

TEST_F(Text, TrainAndValBesideEachOther) {
  const std::string train = directory_.write("train.bin", little_endian({1, 2, 3, 4, 5, 6, 7}));
  directory_.write("val.bin", little_endian({9, 8, 7}));
  const auto splits = open_tokens(train, 2, 10);
  EXPECT_EQ(splits.train->size(), 3u);
  ASSERT_EQ(splits.validation->size(), 1u);
  std::vector<std::int32_t> tokens(2), labels(2);
  splits.validation->read_tokens(0, tokens, labels);
  EXPECT_THAT(tokens, ElementsAre(9, 8));
  EXPECT_THAT(labels, ElementsAre(8, 7));
  directory_.write("test.bin", little_endian({9, 8, 7, 6, 5}));
  EXPECT_EQ(open_data("tokens:" + train, {.classes = 10, .context = 2}).test, nullptr);
  EXPECT_EQ(open_data("tokens:" + train, {.classes = 10, .context = 2, .parts = {.test = true}}).test->size(), 2u);
}

TEST_F(Text, UnsplitSourcesHaveRowsAcrossTheSplitPoint) {
  const Parts whole = {.whole = true};
  std::vector<int> numbers(40, 7);
  const std::string tokens = "tokens:" + directory_.write("some.bin", little_endian(numbers));
  EXPECT_EQ(open_data(tokens, {.context = 3, .parts = whole}).whole->size(), 13u);  // 11 + 1 where it is divided
  const std::string text = "text:" + directory_.write("some.txt", std::string(40, 'a') + "b");
  EXPECT_EQ(open_data(text, {.context = 3, .parts = whole}).whole->size(), 13u);
  EXPECT_EQ(open_data(text, {.context = 3, .parts = whole}).train, nullptr);
}

// With a mapping this is the end of the process, by SIGBUS.
TEST_F(Text, AFileThatIsCutWhileItIsInUseIsNamed) {
  const std::string path = directory_.write("cut.bin", little_endian(std::vector<int>(40'000, 3)));
  const auto splits = open_tokens(path, 16, 10);
  std::vector<std::int32_t> tokens(16), labels(16);
  splits.train->read_tokens(2000, tokens, labels);
  std::filesystem::resize_file(path, 101);
  EXPECT_THAT(testing::line_of<Error>([&] { splits.train->read_tokens(2000, tokens, labels); }),
              AllOf(HasSubstr("cut.bin: it had 80000 bytes when it was opened, and now ends at byte 64000 or before")));
  EXPECT_THAT(testing::line_of<Error>([&] { splits.train->read_tokens(3, tokens, labels); }),
              HasSubstr("now ends at byte 101"));
  splits.train->read_tokens(1, tokens, labels);
  EXPECT_THAT(labels, Each(3));
  EXPECT_THAT(testing::line_of<Error>([&] { splits.validation->read_tokens(0, tokens, labels); }),
              HasSubstr("cut.bin"));
}

TEST_F(Text, InvalidTokens) {
  const std::string path = directory_.write("big.bin", little_endian(std::vector<int>(40, 60000)));
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(path, 3, kGpt2Tokens); }),
              AllOf(HasSubstr("big.bin"), HasSubstr("token 60000 at byte 0"), HasSubstr("50257"),
                    HasSubstr("--classes 60001")));
  // Wherever it is, and later, when the file has changed.
  std::vector<int> late(700'000, 3);
  late[600'000] = 10;
  EXPECT_THAT(
      testing::line_of<Error>([&] { open_tokens(directory_.write("late.bin", little_endian(late)), 3, 10); }),
      AllOf(HasSubstr("late.bin: token 10 at byte 1200000 is out of range for 10 tokens"), HasSubstr("--classes 11")));
  EXPECT_EQ(open_tokens(directory_.path() / "late.bin", 3, 11).train->classes(), 11);
  const auto splits = open_tokens(path, 3, 60001);
  directory_.write("big.bin", little_endian(std::vector<int>(40, 60002)));
  std::vector<std::int32_t> tokens(3), labels(3);
  EXPECT_THAT(testing::line_of<Error>([&] { splits.train->read_tokens(1, tokens, labels); }),
              HasSubstr("token 60002 at byte 6 is out of range"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(directory_.write("odd.bin", "abc"), 3, 10); }),
              HasSubstr("odd.bin: 3 bytes"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(directory_.write("short.bin", "abcd"), 3, 30000); }),
              HasSubstr("2 tokens"));
}

std::string numbers(const std::vector<std::uint64_t>& tokens, std::size_t bytes) {
  std::string all;
  for (const std::uint64_t token : tokens)
    for (std::size_t i = 0; i < bytes; ++i) all += static_cast<char>(token >> 8 * i & 0xff);
  return all;
}

std::vector<std::uint64_t> some_tokens(std::uint64_t most) {
  std::vector<std::uint64_t> tokens;
  for (std::uint64_t i = 0; i < 200; ++i) tokens.push_back(i * 7919 % most);
  return tokens;
}

TEST_F(Text, NumbersOf32BitsAreRecognised) {
  std::vector<std::int32_t> tokens(3), labels(3);
  for (const std::uint64_t most : {65u, 50257u, 128256u}) {
    SCOPED_TRACE(most);
    const auto made = some_tokens(most);
    const std::string path = directory_.write("n.bin", numbers(made, 4));
    const auto open = [&](const char* type) {
      return open_data("tokens:" + path,
                       {.classes = static_cast<int>(most), .context = 3, .settings = {{"token-type", type}}});
    };
    EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(path, 3, kGpt2Tokens); }),
                AllOf(HasSubstr("n.bin: its numbers seem to have 32 bits"), HasSubstr("give --token-type u32")));
    const auto splits = open("u32");
    EXPECT_EQ(splits.train->size(), 59u);  // of 180
    splits.train->read_tokens(1, tokens, labels);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(tokens[i], static_cast<std::int32_t>(made[3 + i]));
      EXPECT_EQ(labels[i], static_cast<std::int32_t>(made[4 + i]));
    }
    if (most <= 50257) {
      EXPECT_EQ(open("u16").train->size(), 119u);  // of 360: what was asked for
    }
    EXPECT_THAT(
        testing::line_of<Error>([&] { open_tokens(directory_.write("n.bin", numbers(made, 8)), 3, kGpt2Tokens); }),
        AllOf(HasSubstr("its numbers seem to have 64 bits"), HasSubstr("give --token-type u32")));
    EXPECT_THAT(testing::line_of<Error>([&] { open("u32"); }), HasSubstr("its numbers seem to have 64 bits"));
    if (most > 65536) continue;
    directory_.write("n.bin", numbers(made, 2));
    EXPECT_EQ(open_tokens(path, 3, static_cast<int>(most)).train->size(), 59u);
    if (most > 1000) {
      EXPECT_THAT(
          testing::line_of<Error>([&] { open("u32"); }),
          AllOf(HasSubstr("at byte 0 is out of range for"), HasSubstr("numbers of 16 bits, leave --token-type out")));
    }
  }
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(directory_.write("n.bin", "abcdef"), 3, 9, TokenType::kU32); }),
              HasSubstr("6 bytes are no whole number of 32-bit tokens"));
}

TEST_F(Text, HeadersOfLlmcAreRecognised) {
  const auto file = [&](std::uint64_t magic, std::uint64_t version, std::uint64_t count, std::size_t bytes,
                        std::uint64_t most) {
    std::vector<std::uint64_t> header(256);
    header[0] = magic, header[1] = version, header[2] = count;
    return directory_.write("llmc.bin", numbers(header, 4) + numbers(some_tokens(most), bytes));
  };
  std::vector<std::int32_t> tokens(3), labels(3);
  for (const auto& [magic, version, bytes, classes] :
       {std::tuple{20240520u, 1u, std::size_t{2}, 50257}, {20240801u, 7u, std::size_t{4}, 128256}}) {
    const auto made = some_tokens(static_cast<std::uint64_t>(classes));
    const auto splits = open_tokens(file(magic, version, 200, bytes, static_cast<std::uint64_t>(classes)), 3, classes);
    EXPECT_EQ(splits.train->size(), 59u);
    EXPECT_EQ(splits.validation->size(), 6u);
    splits.validation->read_tokens(0, tokens, labels);
    EXPECT_EQ(tokens[0], static_cast<std::int32_t>(made[180]));
    EXPECT_EQ(labels[2], static_cast<std::int32_t>(made[183]));
  }
  const std::string path = file(20240520, 1, 200, 2, 50257);
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(path, 3, kGpt2Tokens, TokenType::kU32); }),
              HasSubstr("--token-type for " + path + ", whose header (llm.c's) says u16"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(path, 3, 1000); }), HasSubstr("at byte 1026 is out of range"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(file(20240520, 1, 201, 2, 50257), 3, kGpt2Tokens); }),
              HasSubstr("says 201 tokens of 16 bits, and 400 bytes follow"));
  EXPECT_THAT(testing::line_of<Error>([&] { open_tokens(file(20240520, 2, 200, 2, 50257), 3, kGpt2Tokens); }),
              HasSubstr("of version 2, and 1 is known"));
}

TEST_F(Text, OtherFilesAreNoTokens) {
  const auto error_of = [&](const std::string& bytes) {
    return testing::line_of<Error>([&] { open_tokens(directory_.write("n.bin", bytes), 3, kGpt2Tokens); });
  };
  std::string text;
  for (int i = 0; i < 20; ++i) text += "to be, caf\xC3\xA9s\n";
  EXPECT_EQ(error_of(little_endian(std::vector<int>(200, 'a'))), "");
  EXPECT_THAT(error_of(text), AllOf(HasSubstr("it is a text, not a file of tokens"), HasSubstr("text:")));
  EXPECT_THAT(error_of("\x93NUMPY" + text),
              AllOf(HasSubstr("it is a NumPy array"), HasSubstr("numpy.load(sys.argv[1])")));
  EXPECT_THAT(error_of(std::string("MMIDIDX\0\0", 9)), HasSubstr("Megatron"));
  EXPECT_THAT(error_of("\x1f\x8b" + text), HasSubstr("compressed by gzip"));
}

}  // namespace
}  // namespace lockstep::data
