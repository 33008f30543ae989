// BERT's tokens against Hugging Face's tokenizers (tests/data/word_pieces/make_word_pieces.py), and vocabularies that
// are learned.
#include "data/word_pieces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "base/error.h"
#include "tests/support/json.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<std::string> kFew = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "ab", "##bb", "!"};

/// The five special pieces, and these.
std::vector<std::string> with_special(std::vector<std::string> pieces) {
  pieces.insert(pieces.begin(), kSpecialPieces.begin(), kSpecialPieces.end());
  return pieces;
}

/// The pieces of `text`, by name.
std::vector<std::string> named(const WordPieces& pieces, const std::string& text) {
  std::vector<std::string> names;
  for (const auto token : pieces.encode(text, "it")) names.push_back(pieces.pieces()[static_cast<std::size_t>(token)]);
  return names;
}

using Words = std::vector<std::string>;

// scripts/try-tokenizers compares all characters; these are decisive. What is expected is what the package tokenizers
// 0.23.3 says (BertNormalizer, then BertPreTokenizer).
TEST(BasicTokenizer, CutsAsHuggingFaceDoes) {
  struct Case {
    const char* text;
    Words uncased, cased;
  };
  const Case cases[] = {
      {"Caf\u00e9", {"cafe"}, {"Caf\u00e9"}},
      {"a\u226eb", {"a", "<", "b"}, {"a\u226eb"}},
      {"a\u1fefb", {"a", "`", "b"}, {"a\u1fefb"}},
      {"a\u037eb", {"a", ";", "b"}, {"a", "\u037e", "b"}},
      {"a\u2028b\u2029c\u2003d", {"a", "b", "c", "d"}, {"a", "b", "c", "d"}},
      {"a\u0378b\u200dc\u00add\ufffde", {"a\u0378bcde"}, {"a\u0378bcde"}},
      {"a\u0890b", {"a\u0890b"}, {"a\u0890b"}},
      {"x\U0002b81fy", {"x", "\U0002b81f", "y"}, {"x", "\U0002b81f", "y"}},
      {"x\U0002b820y", {"x\U0002b820y"}, {"x\U0002b820y"}},
      {"x\uf900y", {"x", "\u8c48", "y"}, {"x", "\uf900", "y"}},
      {"\u304c \u304b\u3099 \u3071", {"\u304b", "\u304b", "\u306f"}, {"\u304c", "\u304b\u3099", "\u3071"}},
      {"\ud55c", {"\u1112\u1161\u11ab"}, {"\ud55c"}},
      {"\u0939\u093f\u0928\u094d\u0926\u0940",
       {"\u0939\u093f\u0928\u0926\u0940"},
       {"\u0939\u093f\u0928\u094d\u0926\u0940"}},
      {"a\U0001d165\u302eb", {"a\U0001d165\u302eb"}, {"a\U0001d165\u302eb"}},
      {"a\u302e\U0001d165b", {"a\U0001d165\u302eb"}, {"a\u302e\U0001d165b"}},
      {"a\u302e\u0301\U0001d165b", {"a\U0001d165\u302eb"}, {"a\u302e\u0301\U0001d165b"}},
      {"\u0130I \u01c5 \u1e9e", {"ii", "\u01c6", "\u00df"}, {"\u0130I", "\u01c5", "\u1e9e"}},
      {"\u211d \u212a \u2167", {"\u211d", "k", "\u2177"}, {"\u211d", "\u212a", "\u2167"}},
      {"a\u2e43b\u2e56", {"a\u2e43b\u2e56"}, {"a\u2e43b\u2e56"}},
      {"a\U0001f600b", {"a\U0001f600b"}, {"a\U0001f600b"}},
      {"\u1c89 \ua7dc", {"\u1c8a", "\u019b"}, {"\u1c89", "\ua7dc"}},
  };
  const auto words_of = [](const BasicTokenizer& tokenizer, const char* text) {
    Words words;
    tokenizer.for_each_word(text, "it", [&](std::string_view word) { words.emplace_back(word); });
    return words;
  };
  using Marks = TextRules::Marks;
  for (const Case& c : cases) {
    EXPECT_EQ(words_of(BasicTokenizer({.lower_case = true, .marks = Marks::kLeftOut}), c.text), c.uncased) << c.text;
    EXPECT_EQ(words_of(BasicTokenizer({.lower_case = false, .marks = Marks::kKept}), c.text), c.cased) << c.text;
  }
  EXPECT_THAT(words_of(BasicTokenizer({.lower_case = true, .marks = Marks::kKept}), "\u0130 \u00c9\u304c"),
              ElementsAre("i\u0307", "\u00e9\u304c"));
  EXPECT_THAT(words_of(BasicTokenizer({.split_ideographs = false}), "a\u4e2db"), ElementsAre("a\u4e2db"));
}

// The published bert-base-uncased has U+211D, a capital without a small letter, and no other.
TEST(WordPieces, CapitalsWithoutSmallLettersDoNotMakeAVocabularyCased) {
  const WordPieces uncased(
      with_special({"hello", "cafe", "\u211d", "##\u211d", "[Unused0]", "\u304b", "A\u00ad", "-A-"}), "it");
  EXPECT_FALSE(uncased.cased());
  EXPECT_EQ(uncased.reads(), "in lower case, without accents");
  EXPECT_THAT(named(uncased, "Hello Caf\u00e9 HELLO\u211d \u304c"),
              ElementsAre("hello", "cafe", "hello", "##\u211d", "\u304b"));
  EXPECT_TRUE(WordPieces(with_special({"hello", "##A"}), "it").cased());
  EXPECT_TRUE(WordPieces(with_special({"\u212a"}), "it").cased());  // the sign of a kelvin is a "k" in lower case
  EXPECT_FALSE(WordPieces(with_special({}), "it").cased());
}

TEST(WordPieces, MarksThatPiecesHaveStay) {
  const WordPieces japanese(with_special({"\u304b", "\u304c", "\u306f", "cafe", "hello"}), "it");
  EXPECT_FALSE(japanese.cased());
  EXPECT_EQ(japanese.reads(), "in lower case, without accents that no piece has");
  EXPECT_THAT(named(japanese, "Hello \u304b \u304c \u304b\u3099 \u3071 Caf\u00e9"),
              ElementsAre("hello", "\u304b", "\u304c", "\u304c", "\u306f", "cafe"));
  const WordPieces hindi(with_special({"\u0939\u093f\u0928\u094d\u0926\u0940"}), "it");
  EXPECT_THAT(named(hindi, "\u0939\u093f\u0928\u094d\u0926\u0940"), ElementsAre(hindi.pieces().back()));
  const WordPieces french(with_special({"caf\u00e9", "nino"}), "it");
  EXPECT_THAT(named(french, "Caf\u00e9 CAFE\u0301 Ni\u00f1o"), ElementsAre("caf\u00e9", "caf\u00e9", "nino"));
  // Where a file says so, all of them go, as with Hugging Face.
  EXPECT_THAT(named({japanese.pieces(), "it", {.lower_case = true, .strip_marks = true}}, "\u304c"),
              ElementsAre("\u304b"));
}

TEST(WordPieces, RulesAreReadBackAndHashed) {
  for (const WordPieceRules& rules : {WordPieceRules{},
                                      {.lower_case = false},
                                      {.lower_case = true, .strip_marks = false, .split_ideographs = false}}) {
    const WordPieces one(with_special({"\u304c", "Aa", "a"}), "it", rules), same(one.pieces(), "it", one.rules());
    EXPECT_EQ(one, same);
    EXPECT_EQ(one.sha256(), same.sha256());
  }
  const WordPieces one(with_special({"a"}), "it"), other(with_special({"a"}), "it", {.lower_case = false});
  EXPECT_NE(one, other);
  EXPECT_NE(one.sha256(), other.sha256());
}

TEST(WordPieces, NamesOfSpecialTokensAreTheseTokens) {
  const WordPieces pieces(with_special({"a", "##b", "[", "]", "mask", "<x>", "<x>y"}), "it",
                          {.added = {"<x>", "<x>y"}});
  EXPECT_THAT(named(pieces, "ab[MASK]a [SEP][mask] [MASK"),
              ElementsAre("a", "##b", "[MASK]", "a", "[SEP]", "[", "mask", "]", "[", "mask"));
  EXPECT_THAT(named(pieces, "a<x>a<x>yab"), ElementsAre("a", "<x>", "a", "<x>y", "a", "##b"));
  EXPECT_THAT([&] { static_cast<void>(pieces.encode("[MASK]ab\xff", "some.txt")); },
              ThrowsMessage<IoError>(HasSubstr("some.txt: byte 8 is not UTF-8")));
}

TEST(WordPieces, ManyUnknownPiecesAreWarnedOf) {
  const WordPieces pieces(with_special({"Hello", "world"}), "it");
  UnknownTokens unknown(pieces);
  unknown.add(pieces.encode("Hello Hello world world Other", "it"));
  EXPECT_EQ(unknown.warning("it"), std::nullopt);
  unknown.add(pieces.encode("hello", "it"));
  EXPECT_EQ(
      unknown.warning("t.csv"),
      "t.csv: 2 of 6 word pieces are [UNK]: the vocabulary may be that of other texts, or of texts that are not read "
      "with capital letters, with accents (--cased yes|no)");
}

TEST(WordPieces, FilesBesideTheVocabularySayHowTextsAreRead) {
  const testing::TemporaryDirectory directory;
  std::string lines;
  for (const auto& piece : with_special({"Hello", "hello", "cafe", "caf\u00e9", "\u304b", "\u304c"}))
    lines += piece + "\n";
  const auto path = directory.write("vocab.txt", lines);
  const std::string text = "Hello Caf\u00e9 \u304c";
  const auto read = [&](const std::string& config, std::optional<bool> cased = std::nullopt) {
    directory.write("tokenizer_config.json", config);
    return named(*WordPieces::read(path, cased), text);
  };
  const auto kept = ElementsAre("Hello", "[UNK]", "\u304c"), all_lower = ElementsAre("hello", "cafe", "\u304b"),
             lower = ElementsAre("hello", "caf\u00e9", "\u304c");
  EXPECT_THAT(named(*WordPieces::read(path), text), kept);
  EXPECT_THAT(named(*WordPieces::read(path, false), text), lower);
  EXPECT_THAT(read("{}"), kept);
  EXPECT_THAT(read(R"({"do_lower_case": true})"), all_lower);
  EXPECT_THAT(read(R"({"do_lower_case": true, "strip_accents": false})"), lower);
  EXPECT_THAT(read(R"({"do_lower_case": true, "strip_accents": null})"), all_lower);
  EXPECT_THAT(read(R"({"do_lower_case": true})", true), kept);  // --cased counts
  EXPECT_THAT(read(R"({"do_lower_case": false})", false), lower);
  EXPECT_THAT(read(R"({"do_lower_case": true})", false), all_lower);
  const std::string tokenizer =
      R"({"model": {"type": "WordPiece"}, "pre_tokenizer": {"type": "BertPreTokenizer"}, "normalizer": {"type":
      "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
      "added_tokens": [{"id": 3, "content": "[SEP]", "normalized": false}, {"id": 11, "content": "<new>"}]})";
  directory.write("tokenizer.json", tokenizer);
  EXPECT_THAT(read(R"({"do_lower_case": false})"), kept);  // Hugging Face's order
  EXPECT_THAT(read("{}"), all_lower);
  const auto pieces = WordPieces::read(path);
  EXPECT_EQ(pieces->size(), 12);
  EXPECT_THAT(named(*pieces, "hello<new>cafe"), ElementsAre("hello", "<new>", "cafe"));
}

TEST(WordPieces, FilesThatCannotBeFollowedAreRefused) {
  const testing::TemporaryDirectory directory;
  const auto path = directory.write("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nab\n");
  const auto refused = [&](const std::string& text, const char* why, const char* name = "tokenizer_config.json") {
    const std::string file = directory.write(name, text);
    EXPECT_THAT([&] { WordPieces::read(path); }, ThrowsMessage<IoError>(AllOf(HasSubstr(name), HasSubstr(why))))
        << text;
    std::filesystem::remove(file);
  };
  refused("{", "it is not JSON at byte");
  refused("[]", "it is no object");
  refused(R"({"do_lower_case": 1})", "do_lower_case is neither true nor false");
  refused(R"({"do_basic_tokenize": false})", "do_basic_tokenize is false");
  refused(R"({"never_split": ["ab"]})", "never_split");
  refused(R"({"cls_token": "<s>"})", "cls_token is '<s>', and lockstep's [CLS]");
  refused(R"({"tokenizer_class": "BertJapaneseTokenizer"})", "BertJapaneseTokenizer");
  refused(R"({"added_tokens_decoder": {"6": {"content": "x", "lstrip": true}}})", "lstrip is true of 'x'");
  refused(R"({"added_tokens_decoder": {"7": {"content": "x"}}})", "gives 'x' the number 7");
  refused(R"({"added_tokens_decoder": {"5": {"content": "x"}}})", "gives 'x' the number 5");
  refused(R"({"x": 5})", "'x' the number 5", "added_tokens.json");
  refused(R"({"model": {"type": "Unigram"}})", "model is Unigram", "tokenizer.json");
  refused(R"({"model": {"type": "WordPiece"}, "normalizer": null, "pre_tokenizer": {"type": "BertPreTokenizer"}})",
          "normalizer is null", "tokenizer.json");
}

TEST(WordPieces, EncodesAsHuggingFaceDoes) {
  const auto golden = testing::json_in(testing::read_file(LOCKSTEP_SOURCE_DIR "/tests/data/word_pieces/golden.json"));
  // It has marks too, which the package was asked to leave out.
  const WordPieces uncased(golden["uncased"].get<std::vector<std::string>>(), "uncased",
                           {.lower_case = true, .strip_marks = true});
  const WordPieces cased(golden["cased"].get<std::vector<std::string>>(), "cased");
  EXPECT_FALSE(uncased.cased());
  EXPECT_TRUE(cased.cased());
  ASSERT_GE(golden["cases"].size(), 40u);
  for (const auto& item : golden["cases"]) {
    const WordPieces& pieces = item["cased"].get<bool>() ? cased : uncased;
    const auto text = item["text"].get<std::string>();
    EXPECT_EQ(pieces.encode(text, "it"), item["tokens"].get<std::vector<std::int32_t>>()) << text;
  }
}

TEST(WordPieces, TheLongestPieceIsTakenFirst) {
  const WordPieces pieces(kFew, "it");
  EXPECT_THAT(pieces.encode("abbb ab a! b", "it"), ElementsAre(7, 8, 7, 5, 9, 1));
  EXPECT_THAT(pieces.encode("AB \xc3\xa2", "it"), ElementsAre(7, 5));  // in lower case, without accents
  EXPECT_EQ(pieces.decode(std::vector{7, 8, 5, 4}), "abbb a [MASK]");
  EXPECT_EQ(pieces.mask(), 4);
  EXPECT_THAT([&] { static_cast<void>(pieces.encode("ab\xff", "some.txt")); },
              ThrowsMessage<IoError>(HasSubstr("some.txt: byte 2 is not UTF-8")));
}

TEST(WordPieces, AFileIsReadLineByLine) {
  const testing::TemporaryDirectory directory;
  const std::string lines = "[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n[MASK]\r\nab\r\n";
  EXPECT_EQ(WordPieces::read(directory.write("vocab.txt", lines))->pieces().back(), "ab");
  const auto refused = [&](const std::string& text, const char* why) {
    EXPECT_THAT([&] { WordPieces::read(directory.write("bad.txt", text)); },
                ThrowsMessage<IoError>(AllOf(HasSubstr("bad.txt"), HasSubstr(why))));
  };
  refused("", "it is empty");
  refused("[PAD]\n[UNK]\n[CLS]\n[SEP]\n", "it has no [MASK]");
  refused("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n", "line 7, 'a', is there twice");
  refused("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\xff\n", "line 6, 'a?', is not UTF-8");
}

TEST(WordPieces, FrequentWordsAreLearnedWhole) {
  WordPieceLearner learner;
  learner.add("the cat and the dog and the Cat, the end of the cat", "it");
  const auto pieces = learner.learn(100);
  const auto has = [&](const char* piece) { return std::ranges::count(pieces->pieces(), piece) == 1; };
  EXPECT_TRUE(has("the"));
  EXPECT_TRUE(has("cat"));
  EXPECT_TRUE(has("and"));
  EXPECT_TRUE(has(","));
  EXPECT_FALSE(has("dog"));  // it is there once: its pieces are not joined
  // Nothing of what was learned from is unknown, and single characters are there for what comes.
  EXPECT_THAT(pieces->encode("the dog", "it"), ::testing::Not(::testing::Contains(pieces->unknown())));
  EXPECT_EQ(pieces->encode("the", "it").size(), 1u);
  EXPECT_THAT(pieces->encode("xyz", "it"), ElementsAre(pieces->unknown()));
}

TEST(WordPieces, ScriptsWithoutCapitalsAreLearnedWithTheirMarks) {
  const std::string text = "\u304b\u304c \u304b\u3099 Caf\u00e9 caf\u00e9 \u0928\u094d\u0926";
  WordPieceLearner learner(/*cased=*/false), cased(/*cased=*/true);
  learner.add(text + " [MASK]", "it");
  cased.add(text, "it");
  const auto pieces = learner.learn(100);
  EXPECT_THAT(named(*pieces, "\u304b\u304c \u304b\u3099"), ElementsAre("\u304b", "##\u304c", "\u304c"));
  EXPECT_THAT(named(*pieces, "Caf\u00e9"), ElementsAre("cafe"));
  EXPECT_THAT(named(*pieces, "\u0928\u094d\u0926"), ElementsAre("\u0928", "##\u094d", "##\u0926"));
  EXPECT_EQ(pieces->pieces().size(), WordPieces(pieces->pieces(), "it", pieces->rules()).pieces().size());
  EXPECT_THAT(pieces->pieces(), ::testing::Not(::testing::Contains("[")));
  EXPECT_TRUE(cased.learn(100)->cased());
  EXPECT_THAT(named(*cased.learn(100), "Caf\u00e9"), ElementsAre("C", "##af\u00e9"));
}

TEST(WordPieces, ALearnedVocabularyIsAsLargeAsItMayBeAndAlwaysTheSame) {
  std::string text;
  for (int i = 0; i < 500; ++i) text += fmt::format("w{} x{} aaaa{} ", i % 7, i % 31, i);
  WordPieceLearner one, other;
  one.add(text, "it");
  const std::size_t blank = text.find(' ', 100);
  other.add(text.substr(0, blank), "it");
  other.add(text.substr(blank), "it");
  EXPECT_EQ(one.learn(40)->size(), 40);
  EXPECT_EQ(one.learn(60)->pieces(), other.learn(60)->pieces());
  EXPECT_EQ(one.learn(60)->sha256(), other.learn(60)->sha256());
  EXPECT_NE(one.learn(60)->sha256(), one.learn(61)->sha256());
  EXPECT_EQ(WordPieceLearner().learn(100)->size(), 5);  // of no text: the special ones
}

}  // namespace
}  // namespace lockstep::data
