// table:FILE: what columns turn out to be, how fields become numbers, and what is refused.
#include "data/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/table_schema.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::uint64_t kRows = 40;

/// Every row has all that a table may have: 40 of them, of which 4 are held out.
std::string usual(const char* separator = ",", const char* end = "\n") {
  std::string text = "x,colour,y";
  for (std::uint64_t i = 0; i < kRows; ++i)
    text += fmt::format("\n{},{},{}", i % 7 == 3 ? std::string("NA") : fmt::to_string(i),
                        i % 3 == 0   ? "red"
                        : i % 3 == 1 ? "\"blue\""
                                     : "",
                        0.5 * static_cast<double>(i));
  text += "\n";
  std::string made;
  for (const char c : text)
    made += c == ',' ? std::string(separator) : c == '\n' ? std::string(end) : std::string(1, c);
  return made;
}

struct Row {
  std::vector<float> numbers;
  std::vector<std::int32_t> codes;
  float target = 0;
  std::int32_t label = -1;
};

Row row_of(const Dataset& dataset, std::uint64_t i) {
  Row row;
  row.numbers.resize(dataset.sample_elements());
  row.codes.resize(dataset.further_inputs().empty() ? 0 : dataset.further_elements(0));
  const Array further[] = {{.numbers = {}, .integers = row.codes}};
  Sample sample{.x = row.numbers, .tokens = {}, .labels = {}, .targets = {}};
  if (!row.codes.empty()) sample.further = further;
  if (dataset.has_numeric_targets())
    sample.targets = {&row.target, 1};
  else
    sample.labels = {&row.label, 1};
  dataset.read_sample(i, sample);
  return row;
}

class Table : public ::testing::Test {
 protected:
  DataSplits open(const std::string& text, const Settings& given = {{"target", "y"}}, OpenOptions options = {},
                  const std::string& name = "t.csv") const {
    return open_path(directory_.write(name, text), given, std::move(options));
  }
  static DataSplits open_path(const std::string& path, const Settings& given = {{"target", "y"}},
                              OpenOptions options = {}) {
    options.settings = given;
    return open_data("table:" + path, options);
  }
  std::string error(const std::string& text, const Settings& given = {{"target", "y"}},
                    OpenOptions options = {}) const {
    return testing::refusal_of<Error>([&] { open(text, given, std::move(options)); });
  }
  static const TableSchema& schema_of(const DataSplits& splits) {
    return *(splits.whole != nullptr ? splits.whole : splits.train)->info().table;
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(Table, ColumnsAreWhatTheirFieldsAre) {
  const DataSplits splits = open(usual());
  const TableSchema& schema = schema_of(splits);
  ASSERT_THAT(schema.columns, SizeIs(2));
  EXPECT_FALSE(schema.columns[0].categorical);
  EXPECT_TRUE(schema.columns[1].categorical);
  EXPECT_THAT(schema.columns[1].categories, ElementsAre("", "blue", "red"));
  EXPECT_EQ(schema.target.name, "y");
  EXPECT_FALSE(schema.predicts_classes());
  EXPECT_THAT(splits.train->sample_dims(), ElementsAre(1));
  EXPECT_TRUE(splits.train->has_numeric_targets());
  EXPECT_THAT(splits.train->target_dims(), ElementsAre(1));
  ASSERT_THAT(splits.train->further_inputs(), SizeIs(1));
  EXPECT_THAT(splits.train->further_inputs()[0].dims, ElementsAre(1));
  EXPECT_THAT(splits.train->info().categories, ElementsAre(4));
  EXPECT_EQ(splits.train->size() + splits.validation->size(), kRows);
}

TEST_F(Table, StatisticsAreThoseOfTheTrainingPart) {
  const DataSplits splits = open(usual());
  double sum = 0, squares = 0, count = 0, targets = 0, rows = 0;
  for (std::uint64_t i = 0; i < kRows; ++i) {
    if (is_held_out(i)) continue;
    ++rows;
    targets += 0.5 * static_cast<double>(i);
    if (i % 7 == 3) continue;
    ++count;
    sum += static_cast<double>(i);
    squares += static_cast<double>(i * i);
  }
  const TableColumn& x = schema_of(splits).columns[0];
  EXPECT_NEAR(x.mean, sum / count, 1e-12);
  EXPECT_NEAR(x.deviation, std::sqrt(squares / count - sum / count * (sum / count)), 1e-12);
  EXPECT_NEAR(schema_of(splits).target.mean, targets / rows, 1e-12);
  std::uint64_t train = 0, validation = 0;
  for (std::uint64_t i = 0; i < kRows; ++i) {
    const Row row = is_held_out(i) ? row_of(*splits.validation, validation++) : row_of(*splits.train, train++);
    const double value = i % 7 == 3 ? 0 : (static_cast<double>(i) - x.mean) / x.deviation;
    EXPECT_THAT(row.numbers, ElementsAre(FloatNear(static_cast<float>(value), 1e-6f))) << i;
    EXPECT_THAT(row.codes, ElementsAre(i % 3 == 0 ? 3 : i % 3 == 1 ? 2 : 1)) << i;
  }
}

TEST_F(Table, ReadsAllThatPeopleCallTables) {
  const TableSchema plain = schema_of(open(usual()));
  EXPECT_EQ(schema_of(open(usual(",", "\r\n"))), plain);
  EXPECT_EQ(schema_of(open("\xEF\xBB\xBF" + usual(";"))), plain);
  EXPECT_EQ(schema_of(open(usual("\t"), {{"target", "y"}, {"quotes", "yes"}}, {}, "t.tsv")), plain);
  EXPECT_EQ(schema_of(open(usual("\t"))).columns[1].categories, plain.columns[1].categories);
  EXPECT_EQ(schema_of(open(" x , colour , y" + usual().substr(10))), plain);
}

TEST_F(Table, FoldersAreTheirFilesInOrder) {
  const std::string text = usual();
  const std::size_t half = text.find("\n18,") + 1, header = text.find('\n') + 1;
  directory_.write("d/a.csv", text.substr(0, half));
  directory_.write("d/b.csv", text.substr(0, header) + text.substr(half));
  directory_.write("d/readme.txt", "no table");
  const DataSplits parts = open_path(directory_.path("d"));
  EXPECT_EQ(schema_of(parts), schema_of(open(text)));
  EXPECT_EQ(parts.train->size() + parts.validation->size(), kRows);
  directory_.write("e/a.csv", "x,y\n1,2\n");
  directory_.write("e/b.csv", "y,x\n1,2\n");
  EXPECT_THAT(testing::refusal_of<Error>([&] { open_path(directory_.path("e")); }),
              HasSubstr("has other columns than"));
  directory_.write("f/readme.txt", "no table");
  EXPECT_THAT(testing::refusal_of<Error>([&] { open_path(directory_.path("f")); }), HasSubstr("it has no table"));
}

TEST_F(Table, FilesBesideTrainAreParts) {
  directory_.write("train.csv", usual());
  directory_.write("val.csv", "y,colour,x\n1.5,green,3\n");
  directory_.write("test.csv", "y,colour,x,more\n1.5,red,\n2,,4,\n");
  const std::string path = directory_.path("train.csv");
  DataSplits splits = open_path(path);
  EXPECT_EQ(splits.train->size(), kRows);
  ASSERT_EQ(splits.validation->size(), 1u);
  EXPECT_THAT(row_of(*splits.validation, 0).codes, ElementsAre(0)) << "training has not seen green";
  directory_.write("test.csv", "more,y,colour,x\n7,1.5,red,\n8,2,,4\n");
  splits = open_path(directory_.path().string(), {{"target", "y"}}, {.parts = {.test = true}});
  ASSERT_EQ(splits.test->size(), 2u);
  EXPECT_THAT(row_of(*splits.test, 0).numbers, ElementsAre(0.0f));
  EXPECT_THAT(row_of(*splits.test, 1).codes, ElementsAre(1));
}

TEST_F(Table, TargetsOfTwoValuesAreClasses) {
  const auto classes_of = [&](const std::string& values, const Settings& given = {{"target", "y"}}) {
    std::string text = "x,y\n";
    const auto all = words_of(values);
    for (std::size_t i = 0; i < 30; ++i) text += fmt::format("{},{}\n", i * i, all[i % all.size()]);
    return open(text, given).train->class_names();
  };
  EXPECT_THAT(classes_of("0 1"), ElementsAre("0", "1"));
  EXPECT_THAT(classes_of("yes no"), ElementsAre("no", "yes"));
  EXPECT_THAT(classes_of("10 9 8"), IsEmpty()) << "a number";
  EXPECT_THAT(classes_of("10 9 8", {{"target", "y"}, {"categorical", "y"}}), ElementsAre("8", "9", "10"));
  EXPECT_THAT(classes_of("0 1", {{"target", "y"}, {"numeric", "y"}}), IsEmpty());
}

TEST_F(Table, SettingsSayWhatColumnsAre) {
  const std::string text = "id,zip,\"a,b\",target\n" + [] {
    std::string rows;
    for (int i = 0; i < 20; ++i) rows += fmt::format("{},{},{},{}\n", i, 100 + i % 2, i * 7 % 5, i % 2);
    return rows;
  }();
  const TableSchema schema = schema_of(open(text, {{"ignore", "id"}, {"categorical", "zip"}}));
  ASSERT_THAT(schema.columns, SizeIs(2));
  EXPECT_THAT(schema.columns[0].categories, ElementsAre("100", "101"));
  EXPECT_FALSE(schema.columns[1].categorical);
  EXPECT_EQ(schema.columns[1].name, "a,b");
  EXPECT_TRUE(schema_of(open(text, {{"categorical", "a,b"}})).columns[2].categorical);
}

TEST_F(Table, WhatWeightsKnowIsKept) {
  const auto schema = std::make_shared<const TableSchema>(schema_of(open(usual())));
  const OpenOptions known{.table = schema, .parts = {.whole = true}};
  const DataSplits splits = open("y,other,colour,x\n4,a,red,1e1\n5,b,violet,\n", {}, known, "n.csv");
  ASSERT_NE(splits.whole, nullptr);
  EXPECT_EQ(*splits.whole->info().table, *schema);
  EXPECT_THAT(row_of(*splits.whole, 1).codes, ElementsAre(0));
  EXPECT_FLOAT_EQ(row_of(*splits.whole, 0).target,
                  static_cast<float>((4 - schema->target.mean) / schema->target.deviation));
  EXPECT_THAT(error("y,x\n1,2\n", {}, known),
              HasSubstr("it lacks the column 'colour', which the model was trained with"));
  EXPECT_THAT(error("y,x,colour\n1,two,red\n", {}, known),
              HasSubstr("line 2: 'two' is no number, as all of 'x' were in training"));
  EXPECT_THAT(error("y,x,colour\n,2,red\n", {}, known), HasSubstr("is no number for the target 'y'"));
  EXPECT_THAT(error(usual(), {{"numeric", "x"}}, known), HasSubstr("--numeric x with weights that say"));
  EXPECT_EQ(error(usual(), {{"target", "y"}}, known), "");
}

TEST_F(Table, AnotherTargetIsNoColumnThatIsPredictedFrom) {
  TableSchema schema = schema_of(open(usual()));
  schema.target = {};
  const OpenOptions known{.table = std::make_shared<const TableSchema>(schema)};
  std::string text = usual();
  text.replace(0, text.find('\n'), "x,colour,z");
  EXPECT_EQ(schema_of(open(text, {{"target", "z"}}, known)).columns, schema.columns);
  EXPECT_THAT(error(usual(), {{"target", "x"}, {"ignore", "y"}}, known), HasSubstr("'x', the target"));
}

TEST_F(Table, CodesOfAColumnFollowThoseBefore) {
  const DataSplits splits = open("a,b,target\n" +
                                     [] {
                                       std::string rows;
                                       for (int i = 0; i < 20; ++i)
                                         rows +=
                                             fmt::format("{},{},{}\n", i % 2 ? "p" : "q", i % 4 < 2 ? "r" : "s", i % 2);
                                       return rows;
                                     }(),
                                 {});
  EXPECT_THAT(splits.train->sample_dims(), ElementsAre(0));
  EXPECT_THAT(splits.train->info().categories, ElementsAre(3, 3));
  for (std::uint64_t i = 0; i < splits.train->size(); ++i) {
    const Row row = row_of(*splits.train, i);
    EXPECT_TRUE(row.codes[0] == 1 || row.codes[0] == 2);
    EXPECT_TRUE(row.codes[1] == 4 || row.codes[1] == 5);
    EXPECT_EQ(row.label, row.codes[0] == 1 ? 1 : 0);
  }
}

TEST_F(Table, RefusalsNameTheLineAndARemedy) {
  EXPECT_THAT(error(usual(), {}),
              AllOf(HasSubstr("nobody says which column is to be predicted"), HasSubstr("--target")));
  EXPECT_THAT(error(usual(), {{"target", "z"}}), HasSubstr("--target z: the table has no column 'z'"));
  EXPECT_THAT(error(usual(), {{"target", "colours"}}), HasSubstr("did you mean 'colour'?"));
  EXPECT_THAT(error(usual(), {{"target", "colour"}}), HasSubstr("line 4: it has no 'colour', the target"));
  EXPECT_THAT(error(usual(), {{"target", "x,y"}}), HasSubstr("names 2 columns"));
  EXPECT_THAT(error(usual(), {{"target", "y"}, {"ignore", "y"}}), HasSubstr("--ignore and --target both name"));
  EXPECT_THAT(error(usual(), {{"target", "y"}, {"numeric", "x"}, {"categorical", "x"}}), HasSubstr("both name"));
  EXPECT_THAT(error(usual(), {{"target", "y"}, {"numeric", "colour"}}), HasSubstr("line 2: 'red' is no number"));
  EXPECT_THAT(error(usual(), {{"target", "y"}, {"ignore", "x,colour"}}), HasSubstr("no column beside 'y'"));
  EXPECT_THAT(error("1,2\n3,4\n", {}), HasSubstr("seems to be a row"));
  EXPECT_THAT(error("x,x,y\n1,2,3\n"), HasSubstr("more than one column 'x'"));
  EXPECT_THAT(error("x,y\n"), HasSubstr("it has no row"));
  EXPECT_THAT(error("x,y\n1,2,3\n"), HasSubstr("line 2 has 3 fields, and the first line 2"));
  EXPECT_THAT(error("x,y\n1,2\n"), HasSubstr("too few rows, 1"));
  EXPECT_THAT(error("x,y\n,2\n,3\n,4\n"), HasSubstr("all columns beside 'y' are empty"));
  EXPECT_THAT(error(usual(), {{"target", "y"}}, {.classes = 3}), HasSubstr("--classes 3 for 'y', a number"));
}

TEST_F(Table, OneWordAmongNumbersIsNoTarget) {
  std::string text = "x,y\n";
  for (int i = 0; i < 30; ++i) text += fmt::format("{},{}\n", i, i == 17 ? std::string("inf") : fmt::to_string(i));
  EXPECT_THAT(error(text), AllOf(HasSubstr("line 19: 'inf' is no number, as most of the target 'y' are"),
                                 HasSubstr("--categorical y")));
  EXPECT_EQ(open(text, {{"target", "y"}, {"categorical", "y"}}).train->classes(), 30);
}

TEST_F(Table, NumbersAreInTheRangeOfF32) {
  std::string text = "x,y\n";
  for (int i = 0; i < 30; ++i) text += fmt::format("{}e300,{}\n", i, i);
  EXPECT_THAT(error(text), HasSubstr("the numbers of 'x' are too large for a standard deviation"));
  const auto schema = std::make_shared<const TableSchema>(schema_of(open(usual())));
  EXPECT_THAT(error("x,colour,y\n1e30,red,1\n", {}, {.table = schema, .parts = {.whole = true}}),
              HasSubstr("line 2: '1e30' is 9e+28 standard deviations from the mean of 'x'"));
}

TEST_F(Table, OneWordAmongNumbersMakesCategories) {
  std::string text = "x,y\n";
  for (int i = 0; i < 30; ++i) text += fmt::format("{},{}\n", i == 17 ? std::string("oops") : fmt::to_string(i), i);
  ::testing::internal::CaptureStderr();
  const DataSplits splits = open(text);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(schema_of(splits).columns[0].categorical);
  EXPECT_GT(schema_of(splits).columns[0].categories.size(), 20u) << "those before it are among them";
  EXPECT_THAT(said, HasSubstr("line 19 has 'oops', which is no number"));
}

TEST(TableSchema, DigestsTellThemApart) {
  const TableSchema schema{.columns = {{.name = "a"}, {.name = "b", .categorical = true, .categories = {"x", "y"}}},
                           .target = {.name = "t"}};
  EXPECT_EQ(schema.sha256(), TableSchema(schema).sha256());
  TableSchema other = schema;
  other.columns[0].mean = 1;
  EXPECT_NE(schema.sha256(), other.sha256());
  other = schema;
  other.columns[1].categories = {"xy", ""};
  EXPECT_NE(schema.sha256(), other.sha256());
}

TEST(TableMissing, IsWhatTablesWrite) {
  for (const char* field : {"", " ", "NA", "n/a", "NaN", "null", "None", "<NA>", "NaT", "?"})
    EXPECT_TRUE(is_missing(field));
  for (const char* field : {"0", "nano", "no", "-", "nones"}) EXPECT_FALSE(is_missing(field));
}

}  // namespace
}  // namespace lockstep::data
