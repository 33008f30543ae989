// Texts with a class each, from tables and from folders.
#include "data/labelled_texts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "base/error.h"
#include "data/table_file.h"
#include "lockstep/data/open.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

std::vector<std::vector<std::string>> rows_of(std::string_view text, char separator = ',') {
  CsvReader reader(text, separator, "t.csv");
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> fields;
  while (reader.next(fields)) rows.push_back(fields);
  return rows;
}

TEST(Csv, FieldsMayBeQuoted) {
  EXPECT_THAT(rows_of("a,b\r\n\"x, \"\"y\"\"\",\"two\nlines\"\n,\n\nlast,\"\""),
              ElementsAre(ElementsAre("a", "b"), ElementsAre("x, \"y\"", "two\nlines"), ElementsAre("", ""),
                          ElementsAre("last", "")));
  EXPECT_THAT(rows_of("a\tb, c\n1\t2\n", '\t'), ElementsAre(ElementsAre("a", "b, c"), ElementsAre("1", "2")));
  EXPECT_THAT(rows_of(""), IsEmpty());
  EXPECT_THAT(rows_of("\n\r\n"), IsEmpty());
}

TEST(Csv, MistakesAreNamedWithTheirLine) {
  EXPECT_THAT([] { rows_of("a,b\n1,\"2\n3"); },
              (ThrowsMessage<IoError>(HasSubstr("t.csv: the quote that opens in line 2"))));
  EXPECT_THAT([] { rows_of("\"a\nb\"c,2"); },
              (ThrowsMessage<IoError>(HasSubstr("text follows a quoted field in line 2"))));
  CsvReader reader("a\n\"1\n2\"\n\nb\n", ',', "t.csv");
  std::vector<std::string> fields;
  std::vector<std::int64_t> lines;
  while (reader.next(fields)) lines.push_back(reader.line());
  EXPECT_THAT(lines, ElementsAre(1, 2, 5));
  EXPECT_EQ(reader.long_rows(), 1);
  EXPECT_EQ(reader.longest_row().first, 2);
  EXPECT_EQ(reader.longest_row().second, 3);
}

TEST(Csv, WithoutQuotesAQuoteIsACharacter) {
  CsvReader reader("a\t\"b\n\"c\"\td\"", '\t', "t.tsv", /*quotes=*/false);
  std::vector<std::string> fields;
  ASSERT_TRUE(reader.next(fields));
  EXPECT_THAT(fields, ElementsAre("a", "\"b"));
  ASSERT_TRUE(reader.next(fields));
  EXPECT_THAT(fields, ElementsAre("\"c\"", "d\""));
  EXPECT_FALSE(reader.next(fields));
}

class LabelledTexts : public ::testing::Test {
 protected:
  DataSplits open(const std::string& spec,
                  const OpenOptions& options = {.context = 12, .word_pieces = WordPieceOptions{}}) const {
    return open_data(spec, options);
  }
  std::string table(const std::string& header, int rows, const std::string& name = "t.csv") const {
    std::string text = header + "\n";
    const auto columns = std::ranges::count(header, ',');
    for (int i = 0; i < rows; ++i) {
      text += i % 2 == 0 ? "good" : "bad";
      for (std::ptrdiff_t c = 0; c < columns; ++c) text += fmt::format(",text {} of row {}", c, i);
      text += "\n";
    }
    return directory_.write(name, text);
  }

  testing::TemporaryDirectory directory_;
};

struct TextSample {
  std::vector<std::int32_t> tokens, types;
  std::int32_t length = -1, label = -1;
};

TextSample read_text(const Dataset& dataset, std::uint64_t index) {
  const auto tokens = static_cast<std::size_t>(dataset.sample_dims()[0]);
  TextSample made{.tokens = std::vector<std::int32_t>(tokens), .types = std::vector<std::int32_t>(tokens)};
  const std::vector<Array> further = {{.numbers = {}, .integers = made.types},
                                      {.numbers = {}, .integers = {&made.length, 1}}};
  dataset.read_sample(index,
                      {.x = {}, .tokens = made.tokens, .labels = {&made.label, 1}, .targets = {}, .further = further});
  return made;
}

TEST_F(LabelledTexts, ATableNamesItsColumns) {
  const auto data = open("csv:" + table("label,review", 20));
  EXPECT_THAT(data.train->class_names(), ElementsAre("bad", "good"));
  EXPECT_EQ(data.train->size(), 18u);  // one of ten is for validation
  EXPECT_EQ(data.validation->size(), 2u);
  EXPECT_EQ(data.train->classes(), 2);
  EXPECT_EQ(data.train->vocabulary(), data.train->word_pieces()->size());
  const TextSample first = read_text(*data.train, 0);
  const WordPieces& pieces = *data.train->word_pieces();
  EXPECT_EQ(pieces.decode(std::span(first.tokens).first(static_cast<std::size_t>(first.length))),
            "[CLS] text 0 of row 0 [SEP]");
  EXPECT_EQ(first.tokens.back(), pieces.padding());
}

// Of 400 rows of two alternating classes, one of each ten is held out: of both classes, and always the same ones.
TEST_F(LabelledTexts, ValidationHasAllClasses) {
  TextRows rows, again;
  for (int i = 0; i < 400; ++i)
    rows.train.push_back({.first = fmt::to_string(i), .second = {}, .label = i % 2, .source = {}});
  again = rows;
  hold_out(rows);
  hold_out(again);
  ASSERT_EQ(rows.validation.size(), 40u);
  EXPECT_EQ(rows.train.size(), 360u);
  const auto ones = std::ranges::count(rows.validation, 1, &TextRow::label);
  EXPECT_GE(ones, 10);
  EXPECT_LE(ones, 30);
  for (std::size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(rows.validation[i].first, again.validation[i].first);
    EXPECT_EQ(static_cast<std::size_t>(std::stoi(rows.validation[i].first)) / 10, i);
  }
}

TEST_F(LabelledTexts, NumbersAreClassesInTheirOrder) {
  std::string text = "text,label\n";
  for (int i = 0; i < 24; ++i) text += fmt::format("word,{}\n", i % 12);
  EXPECT_THAT(open("csv:" + directory_.write("n.csv", text)).train->class_names(),
              ElementsAre("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"));
}

TEST_F(LabelledTexts, TokenTypesSeparateTwoTexts) {
  const auto data = open("csv:" + table("label,first,second", 20), {.context = 64, .word_pieces = WordPieceOptions{}});
  const TextSample sample = read_text(*data.train, 2);
  const WordPieces& pieces = *data.train->word_pieces();
  const auto length = static_cast<std::size_t>(sample.length);
  EXPECT_EQ(pieces.decode(std::span(sample.tokens).first(length)), "[CLS] text 0 of row 2 [SEP] text 1 of row 2 [SEP]");
  const auto second = std::ranges::find(sample.tokens, pieces.separator()) - sample.tokens.begin() + 1;
  for (std::size_t i = 0; i < sample.types.size(); ++i)
    EXPECT_EQ(sample.types[i], i >= static_cast<std::size_t>(second) && i < length ? 1 : 0) << i;
}

TEST_F(LabelledTexts, TruncationShortensTheLongerText) {
  const WordPieces pieces({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"}, "it");
  std::vector<std::int32_t> tokens(8), types(8);
  const auto write = [&](std::size_t first, std::size_t second) {
    write_sample(
        pieces,
        {.first = std::vector<std::int32_t>(first, 5), .second = std::vector<std::int32_t>(second, 6), .pair = true},
        tokens, types);
    return tokens;
  };
  EXPECT_THAT(write(9, 1), ElementsAre(2, 5, 5, 5, 5, 3, 6, 3));
  EXPECT_THAT(write(1, 9), ElementsAre(2, 5, 3, 6, 6, 6, 6, 3));
  EXPECT_THAT(write(9, 9), ElementsAre(2, 5, 5, 5, 3, 6, 6, 3));
  EXPECT_THAT(types, ElementsAre(0, 0, 0, 0, 0, 1, 1, 1));
  EXPECT_THAT(write(0, 0), ElementsAre(2, 3, 3, 0, 0, 0, 0, 0));
}

TEST_F(LabelledTexts, AFileForValidationLiesBeside) {
  const auto train = table("label,review", 20, "train.csv");
  table("label,review", 6, "dev.csv");
  const auto data = open("csv:" + train);
  EXPECT_EQ(data.train->size(), 20u);
  EXPECT_EQ(data.validation->size(), 6u);
  directory_.write("dev.csv", "label,review\nawful,x\n");
  EXPECT_THAT([&] { open("csv:" + train); }, (ThrowsMessage<IoError>(HasSubstr("dev.csv, line 2: no text of"))));
  directory_.write("dev.csv", "label,text\ngood,x\n");
  EXPECT_THAT([&] { open("csv:" + train); }, (ThrowsMessage<IoError>(HasSubstr("other columns"))));
}

TEST_F(LabelledTexts, FoldersAreClasses) {
  namespace fs = std::filesystem;
  for (const char* name : {"d/pos", "d/neg/deep", "s/train/pos", "s/train/neg", "s/test/neg"})
    fs::create_directories(directory_.path() / name);
  for (int i = 0; i < 6; ++i) {
    directory_.write(fmt::format("d/pos/{}.txt", i), "well done");
    directory_.write(fmt::format("d/neg/deep/{}.txt", i), "badly done");
    directory_.write(fmt::format("s/train/pos/{}.txt", i), "well done");
    directory_.write(fmt::format("s/train/neg/{}.txt", i), "badly done");
    directory_.write(fmt::format("s/test/neg/{}.TXT", i), "badly done");
  }
  const auto whole = open("texts:" + (directory_.path() / "d").string() + "/");
  EXPECT_THAT(whole.train->class_names(), ElementsAre("neg", "pos"));
  EXPECT_EQ(whole.train->size(), 11u);
  EXPECT_EQ(whole.validation->size(), 1u);
  const auto split = open("texts:" + (directory_.path() / "s").string());
  EXPECT_EQ(split.train->size(), 12u);
  EXPECT_EQ(split.validation->size(), 6u);
  EXPECT_EQ(read_text(*split.validation, 0).label, 0);
  EXPECT_EQ(split.test, nullptr);
  directory_.write("d/pos/7.txt", "no \xff UTF-8");
  EXPECT_THAT([&] { open("texts:" + (directory_.path() / "d").string()); },
              (ThrowsMessage<IoError>(HasSubstr("7.txt: byte 3 is not UTF-8"))));
}

TEST_F(LabelledTexts, MistakesAreNamed) {
  const auto refused = [&](const std::string& text, const char* why) {
    EXPECT_THAT([&] { open("csv:" + directory_.write("bad.csv", text)); }, (ThrowsMessage<IoError>(HasSubstr(why))));
  };
  refused("", "it is empty");
  refused("text,class\na,b\n", "names no column 'label'");
  refused("label\na\n", "no column for texts beside 'label'");
  refused("label,a,b,c\n", "3 columns beside 'label'");
  refused("label,text\ngood,a\nbad,b,c\n", "line 3 has 3 fields, and the first line 2");
  refused("label,text\n,a\n", "line 2 has no class");
  refused("label,text\na,b\n", "1 texts are too few: a tenth");
  const auto path = table("label,review", 20);
  EXPECT_THAT([&] { open("csv:" + path, {.context = 12}); },
              (ThrowsMessage<UsageError>(HasSubstr("has a class for each text"))));
  EXPECT_THAT([&] { open("csv:" + path, {.classes = 1, .context = 12, .word_pieces = WordPieceOptions{}}); },
              (ThrowsMessage<UsageError>(HasSubstr("--classes 1"))));
  EXPECT_THAT([&] { open("csv:" + path, {.context = 2, .word_pieces = WordPieceOptions{}}); },
              (ThrowsMessage<UsageError>(HasSubstr("samples of 2 tokens"))));
}

}  // namespace
}  // namespace lockstep::data
