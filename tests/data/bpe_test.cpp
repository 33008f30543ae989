// GPT-2's tokens against Hugging Face's tokenizers, with the vocabulary of tests/data/bpe/make_bpe.py.
#include "data/vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/error.h"
#include "data/documents.h"
#include "tests/support/json.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const fs::path kGolden = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/data/bpe";

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Bpe : public ::testing::Test {
 protected:
  std::string complaint(const std::string& vocabulary, const std::string& merges) {
    return testing::what_of<IoError>(
        [&] {
          const BytePairs pairs(directory_.write("vocab.json", vocabulary), directory_.write("merges.txt", merges));
        },
        "nothing was thrown");
  }
  // The golden vocabulary with one entry changed; null takes it out.
  static std::string vocabulary_with(const std::string& token, const nlohmann::json& number) {
    auto json = testing::json_in(read(kGolden / "vocab.json"));
    json.erase(token);
    if (!number.is_null()) json[token] = number;
    return json.dump();
  }

  testing::TemporaryDirectory directory_;
  BytePairs golden_{kGolden / "vocab.json", kGolden / "merges.txt"};
};

TEST_F(Bpe, EncodesAsHuggingFaceDoes) {
  const auto golden = testing::json_in(read(kGolden / "golden.json"));
  ASSERT_GE(golden["cases"].size(), 20u);
  for (const auto& item : golden["cases"]) {
    const auto text = item["text"].get<std::string>();
    EXPECT_EQ(golden_.encode(text, "it"), item["tokens"].get<std::vector<std::int32_t>>()) << text;
  }
}

TEST_F(Bpe, EncodingRoundTrips) {
  const auto golden = testing::json_in(read(kGolden / "golden.json"));
  for (const auto& item : golden["cases"]) {
    const auto text = item["text"].get<std::string>();
    EXPECT_EQ(golden_.decode(golden_.encode(text, "it")), text);
  }
}

// A token may hold a part of a character: alone it is no UTF-8, and together they are.
TEST_F(Bpe, TokensEndWithinCharacters) {
  const std::string text = "🌉";
  const auto tokens = golden_.encode(text, "it");
  ASSERT_GT(tokens.size(), 1u);
  EXPECT_LT(golden_.decode(std::span(tokens).first(1)).size(), text.size());
  Utf8Joiner joiner;
  std::string joined;
  for (const std::int32_t token : tokens) joined += joiner.add(golden_.decode(std::span(&token, 1)));
  EXPECT_EQ(joined, text);
  EXPECT_EQ(joiner.finish(), "");
}

// What the package tokenizers 0.23.3 says: Unicode 16 has letters and digits that PCRE2 may be too old for, and U+180E
// has not been a blank since Unicode 6.3. A merge shows that two characters are in one word.
TEST_F(Bpe, WordsEndWhereHuggingFaceHasThem) {
  const auto all = testing::json_in(read(kGolden / "vocab.json"));
  auto vocabulary = nlohmann::json::object();
  for (const auto& [name, number] : all.items())
    if (name.size() == 1 || (name.size() == 2 && static_cast<unsigned char>(name[0]) >= 0x80))
      vocabulary[name] = vocabulary.size();
  ASSERT_EQ(vocabulary.size(), 256u);
  std::string merges;
  for (const std::string pair : {"a á", "a ð", "! á", "! â", "1 ð", "1 á", "Ġ á"}) {
    merges += pair + "\n";
    std::string made = pair;
    made.erase(made.find(' '), 1);
    vocabulary[made] = vocabulary.size();
  }
  const BytePairs pairs(directory_.write("vocab.json", vocabulary.dump()), directory_.write("merges.txt", merges));
  for (const std::string text : {"a\u1c89", "a\U00010d4a", "!\u180e", "1\U00010d40", " \u180e"})
    EXPECT_EQ(pairs.encode(text, "it").size(), text.size() - 1) << text;
  for (const std::string text : {"!\u2028", "1\u1c89", "a\u180e", "a\U00016eba", "!\u1680"})
    EXPECT_EQ(pairs.encode(text, "it").size(), text.size()) << text;
}

TEST_F(Bpe, FilesBesideTheVocabularyAddTokens) {
  const std::string vocabulary = read(kGolden / "vocab.json"), merges = read(kGolden / "merges.txt");
  directory_.write(
      "tokenizer_config.json",
      R"({"add_prefix_space": true, "added_tokens_decoder": {"481": {"content": "<x y>", "special": true}}})");
  const BytePairs pairs(directory_.write("vocab.json", vocabulary), directory_.write("merges.txt", merges));
  EXPECT_EQ(pairs.size(), golden_.size() + 1);
  EXPECT_NE(pairs.sha256(), golden_.sha256());
  EXPECT_EQ(BytePairs(kGolden / "vocab.json").sha256(), golden_.sha256());
  const auto the = golden_.encode(" the", "it");
  ASSERT_EQ(the.size(), 1u);
  EXPECT_THAT(pairs.encode("the<x y> the", "it"), ElementsAre(the[0], 481, the[0]));
  EXPECT_EQ(pairs.decode(std::vector<std::int32_t>{481}), "<x y>");
  for (const auto& [config, why] :
       {std::pair(R"({"add_bos_token": true})", "add_bos_token is true"),
        std::pair(R"({"added_tokens_decoder": {"7": {"content": "<x>"}}})", "the number 7")}) {
    directory_.write("tokenizer_config.json", config);
    EXPECT_THAT(complaint(vocabulary, merges), HasSubstr(why));
  }
  std::filesystem::remove(directory_.path("tokenizer_config.json"));
  directory_.write("tokenizer.json", R"({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence"}})");
  EXPECT_THAT(complaint(vocabulary, merges),
              AllOf(HasSubstr("tokenizer.json"), HasSubstr("pre_tokenizer is Sequence")));
}

// A tokenizer.json has both, its merges as texts or, in newer files, as pairs.
TEST_F(Bpe, OneFileOfBoth) {
  nlohmann::json merges = nlohmann::json::array(), pairs = nlohmann::json::array();
  std::istringstream lines(read(kGolden / "merges.txt"));
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.starts_with("#version")) continue;
    merges.push_back(line);
    pairs.push_back({line.substr(0, line.find(' ')), line.substr(line.find(' ') + 1)});
  }
  nlohmann::json file = {{"model", {{"type", "BPE"}, {"vocab", testing::json_in(read(kGolden / "vocab.json"))}}},
                         {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                         {"added_tokens", {{{"id", 481}, {"content", "<x y>"}}}}};
  const std::string text = "One of the 42 texts, it's said: Übung\n\n  ends";
  for (const auto& listed : {merges, pairs})
    for (const char* name : {"tokenizer.json", "mine.json"}) {
      file["model"]["merges"] = listed;
      const BytePairs both(directory_.write(name, file.dump()));
      EXPECT_EQ(both.encode(text, "it"), golden_.encode(text, "it"));
      EXPECT_THAT(both.encode("<x y>", "it"), ElementsAre(481));
      std::filesystem::remove(directory_.path(name));
    }
  // merges.txt is looked for beside a vocab.json.
  EXPECT_EQ(BytePairs(kGolden / "vocab.json").encode(text, "it"), golden_.encode(text, "it"));
  const auto refusal = [&](const nlohmann::json& changed) {
    return testing::what_of<IoError>([&] { const BytePairs both(directory_.write("t.json", changed.dump())); });
  };
  auto changed = file;
  changed["model"]["merges"] = {"h e", "h e"};
  EXPECT_THAT(refusal(changed), HasSubstr("t.json: merge 2 is no pair"));
  changed["model"]["merges"] = 7;
  EXPECT_THAT(refusal(changed), HasSubstr("t.json: its merges are no list"));
  for (const nlohmann::json& bad : {nlohmann::json({{"a", "b", "c"}}), nlohmann::json({"he"})}) {
    changed["model"]["merges"] = bad;
    EXPECT_THAT(refusal(changed), HasSubstr("t.json: merge 1 is no pair"));
  }
  changed = file;
  changed["pre_tokenizer"]["type"] = "Metaspace";
  EXPECT_THAT(refusal(changed), HasSubstr("pre_tokenizer is Metaspace"));
  EXPECT_THROW(BytePairs(directory_.write("t.json", file.dump()), kGolden / "merges.txt"), UsageError);
}

TEST_F(Bpe, TextsEndWithTheirToken) {
  const std::string first = directory_.write("a.txt", "low lower\n"),
                    lines = directory_.write("b.jsonl", "{\"text\": \"low\"}\n{\"text\": \"er\"}");
  std::vector<std::int32_t> expected;
  for (const char* text : {"low lower\n", "low", "er"}) {
    const auto tokens = golden_.encode(text, "it");
    expected.insert(expected.end(), tokens.begin(), tokens.end());
    expected.push_back(*golden_.end_of_text());
  }
  EXPECT_EQ(Documents(first + "," + lines).encode(golden_), expected);
  EXPECT_EQ(Documents(first).encode(golden_), golden_.encode("low lower\n", "it"));
}

TEST_F(Bpe, KnowsTheTokenBetweenTexts) {
  ASSERT_TRUE(golden_.end_of_text());
  const auto end = *golden_.end_of_text();
  EXPECT_THAT(golden_.encode("a<|endoftext|>a", "it"),
              ElementsAre(golden_.encode("a", "it")[0], end, golden_.encode("a", "it")[0]));
  EXPECT_THAT(golden_.encode("<|endoftext|><|endoftext|>", "it"), ElementsAre(end, end));
  EXPECT_EQ(golden_.encode("<|ENDOFTEXT|>", "it").size(), 13u);
  EXPECT_EQ(*golden_.end_of_text(), golden_.size() - 1);
  EXPECT_EQ(golden_.decode(std::vector{*golden_.end_of_text()}), "<|endoftext|>");
}

// A word as long as the text takes time in proportion to it, not to its square.
TEST_F(Bpe, LongWords) {
  const std::string text(1 << 20, 'e');
  const auto tokens = golden_.encode(text, "it");
  EXPECT_EQ(golden_.decode(tokens), text);
}

TEST_F(Bpe, InvalidUtf8NamesTheByte) {
  for (const std::string& bad : {std::string("ab\xff"), std::string("ab\xc3"), std::string("ab\xc0\x80"),
                                 std::string("ab\xed\xa0\x80"), std::string("ab\xf4\x90\x80\x80")}) {
    EXPECT_THROWN(IoError, "prompt.txt: byte 2 is not UTF-8", static_cast<void>(golden_.encode(bad, "prompt.txt")));
  }
}

TEST_F(Bpe, VocabulariesThatCannotBeUsed) {
  const std::string merges = read(kGolden / "merges.txt"), vocabulary = read(kGolden / "vocab.json");
  EXPECT_EQ(complaint(vocabulary, merges), "nothing was thrown");
  EXPECT_THAT(complaint("", merges), AllOf(HasSubstr("vocab.json"), HasSubstr("not JSON at byte")));
  EXPECT_THAT(complaint(vocabulary.substr(0, 100), merges), HasSubstr("not JSON at byte"));
  EXPECT_THAT(complaint(R"({"a": 1e999})", merges), HasSubstr("a number that is too large"));
  EXPECT_THAT(complaint("[1, 2]", merges), HasSubstr("no object"));
  EXPECT_THAT(complaint("{}", merges), HasSubstr("no object"));
  EXPECT_THAT(complaint(R"({"a": {"b": {"c": 1}}})", merges), HasSubstr("the number of 'a'"));
  EXPECT_THAT(complaint(std::string(50, '[') + std::string(50, ']'), merges), HasSubstr("nests"));
  EXPECT_THAT(complaint(vocabulary_with("a", 100000), merges), HasSubstr("the number of 'a'"));
  EXPECT_THAT(complaint(vocabulary_with("a", -1), merges), HasSubstr("the number of 'a'"));
  EXPECT_THAT(complaint(vocabulary_with("a", "x"), merges), HasSubstr("the number of 'a'"));
  EXPECT_THAT(complaint(vocabulary_with("a", 1), merges), HasSubstr("each once"));
  EXPECT_THAT(complaint(R"({"a": 0})", ""), HasSubstr("no token for the byte 0"));
}

TEST_F(Bpe, MergesThatCannotBeUsed) {
  const std::string vocabulary = read(kGolden / "vocab.json"), merges = read(kGolden / "merges.txt");
  std::string with_returns;
  for (const char c : merges) with_returns += c == '\n' ? "\r\n" : std::string(1, c);
  EXPECT_EQ(complaint(vocabulary, with_returns + "\r\n"), "nothing was thrown");
  EXPECT_EQ(complaint(vocabulary, merges.substr(0, merges.size() - 1)), "nothing was thrown");
  for (const char* empty : {"", "\n", "#version: 0.2\n"})
    EXPECT_THAT(complaint(vocabulary, empty), HasSubstr("merges.txt has no merges: it is empty, or cut"));
  // Wherever it is cut.
  for (std::size_t length = 20; length + 1 < merges.size(); length += 7)
    EXPECT_THAT(complaint(vocabulary, merges.substr(0, length)), HasSubstr("merges.txt")) << length;
  EXPECT_THAT(complaint(vocabulary, merges.substr(0, merges.rfind('\n', merges.size() - 2))),
              AllOf(HasSubstr("merges.txt is cut"), HasSubstr("does not make 1 of the 481 tokens")));
  EXPECT_THAT(complaint(vocabulary, "h e\nhe\n"), AllOf(HasSubstr("merges.txt: line 2"), HasSubstr("no pair")));
  EXPECT_THAT(complaint(vocabulary, "h e\nh e\n"), AllOf(HasSubstr("line 2"), HasSubstr("twice")));
  EXPECT_THAT(complaint(vocabulary, "q q\n"), HasSubstr("line 1"));
  EXPECT_THAT(complaint(vocabulary, "h e x\n"), HasSubstr("line 1"));
  EXPECT_THROW(BytePairs(directory_.path("none"), directory_.path("none")), IoError);
}

TEST(Utf8Joiner, GivesOutWholeCharacters) {
  const std::string text = "aé€😀z";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    Utf8Joiner joiner;
    const std::string first = joiner.add(text.substr(0, cut)), second = joiner.add(text.substr(cut));
    EXPECT_EQ(first + second, text);
    EXPECT_TRUE(first.size() <= cut && cut - first.size() < 4);
    EXPECT_EQ(joiner.finish(), "");
  }
}

TEST(Utf8Joiner, ReplacesInvalidBytes) {
  const auto joined = [](const std::string& bytes) {
    Utf8Joiner joiner;
    std::string all;
    for (const char byte : bytes) all += joiner.add({&byte, 1});
    return all + joiner.finish();
  };
  const std::string mark = "\xEF\xBF\xBD";
  // What Python's bytes.decode("utf-8", "replace") says.
  EXPECT_EQ(joined("a\xff"
                   "b"),
            "a" + mark + "b");
  EXPECT_EQ(joined("\xe2\x82"), mark);
  EXPECT_EQ(joined("\xe2\x82z"), mark + "z");
  EXPECT_EQ(joined("\xed\xa0\x80"), mark + mark + mark);
  EXPECT_EQ(joined("\xf0\x9f\x98\xf0\x9f\x98\x80"), mark + "😀");
  EXPECT_EQ(joined("\xc0\x80\xf5"), mark + mark + mark);
  EXPECT_EQ(joined("\xe0\x80"), mark + mark);
}

TEST(TokenNumbers, AreReadAndWritten) {
  const TokenNumbers numbers(10);
  EXPECT_THAT(numbers.encode(" 1, 2\n9 ", "it"), ElementsAre(1, 2, 9));
  EXPECT_THAT(numbers.encode("", "it"), IsEmpty());
  EXPECT_EQ(numbers.decode(std::vector<std::int32_t>{3, 4}), " 3 4");
  for (const char* bad : {"10", "-1", "x", "1.5", "99999999999999999999"}) {
    const auto error =
        testing::thrown<IoError>([&] { static_cast<void>(numbers.encode(std::string("1 ") + bad, "it")); });
    EXPECT_THAT(error.what(), AllOf(HasSubstr(bad), HasSubstr("byte 2")));
    EXPECT_THAT(error.remedy(), HasSubstr("--vocab"));
  }
}

}  // namespace
}  // namespace lockstep::data
