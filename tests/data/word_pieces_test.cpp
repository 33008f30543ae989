// BERT's tokens against Hugging Face's tokenizers (tests/data/word_pieces/make_word_pieces.py), and vocabularies that
// are learned.
#include "data/word_pieces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST(WordPieces, EncodesAsHuggingFaceDoes) {
  const auto golden = testing::json_in(testing::read_file(LOCKSTEP_SOURCE_DIR "/tests/data/word_pieces/golden.json"));
  const WordPieces uncased(golden["uncased"].get<std::vector<std::string>>(), "uncased");
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
