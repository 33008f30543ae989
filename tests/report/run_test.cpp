#include "report/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "report/report.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kStart =
    R"({"event":"run","schema":1,"command":"lockstep train cnn","lockstep":"1","model":"cnn","parameters":7,)"
    R"("trained_parameters":6,"data":"digits","data_sha256":"ab","planned_steps":4,"instruction_set":"avx2",)"
    R"("ranks":[{"host":"a","device":"cpu"},{"host":"b","device":"cpu"}],)"
    R"("settings":{"lr":{"value":"0.1","from":"command line"},"seed":{"value":"1","from":"default"}},)"
    R"("git":{"commit":"cd","branch":"main"},"unix_s":1.5})"
    "\n";

std::string step_line(int step, const std::string& loss) {
  return R"({"event":"step","step":)" + std::to_string(step) + R"(,"epoch":1,"loss":)" + loss +
         R"(,"lr":0.1,"grad_norm":null,"step_ms":2.5,"new_number":3,"unix_s":7.25})" + "\n";
}

Run run_of(const std::string& text, const std::string& path = "m.jsonl") {
  RunReader reader(path);
  reader.add(text);
  return reader.take();
}

TEST(RunReader, KeepsWhatTheLinesSay) {
  const report::Run run = run_of(
      kStart + step_line(1, "0.1") + R"({"event":"warning","text":"slow","unix_s":8})" + "\n" + step_line(2, "null") +
      R"({"event":"eval","step":2,"epoch":1,"split":"val","loss":0.5,"accuracy":0.25,"own":7,"samples":9,"best":true})"
      "\n"
      R"({"event":"eval","step":2,"epoch":1,"split":"val","loss":0.4,"accuracy":null,"samples":9,"ema":true})"
      "\n"
      R"({"event":"checkpoint","step":2,"bytes":100,"write_ms":1.5,"held_up_ms":0.5})"
      "\n"
      R"({"event":"restart","attempt":1,"cause":"rank 1 died"})"
      "\n"
      R"({"event":"final","steps":2,"wall_s":3,"loss":0.5,"accuracy":0.25,"params_sha256":"ef","peak_memory_bytes":[5,6]})"
      "\n");
  EXPECT_THAT(run.of(Field::kStep), ElementsAre(1, 2));
  EXPECT_EQ(run.of(Field::kLoss)[0], 0.1);
  EXPECT_TRUE(std::isnan(run.of(Field::kLoss)[1]));
  EXPECT_THAT(run.of(Field::kUnixS), ElementsAre(7.25, 7.25));
  EXPECT_TRUE(std::isnan(run.of(Field::kMemoryBytes)[0])) << "a file of an older version";
  ASSERT_EQ(run.starts.size(), 1u);
  EXPECT_EQ(run.starts[0].ranks[1].host, "b");
  EXPECT_EQ(run.starts[0].git, "cd (main)");
  EXPECT_EQ(setting_of(run, "lr")->from, "command line");
  ASSERT_EQ(run.evaluations.size(), 2u);
  EXPECT_TRUE(run.evaluations[0].best);
  EXPECT_THAT(curve_of(run, "own", "val", false).y, ElementsAre(7));
  EXPECT_THAT(curve_of(run, "loss", "val", true).y, ElementsAre(0.4));
  EXPECT_TRUE(curve_of(run, "accuracy", "val", true).y.empty());
  ASSERT_EQ(run.incidents.size(), 2u);
  EXPECT_EQ(run.incidents[0].step, 1) << "after which it came";
  EXPECT_EQ(run.incidents[1].text, "attempt 1: rank 1 died");
  ASSERT_TRUE(run.final);
  EXPECT_THAT(run.final->peak_memory_bytes, ElementsAre(5, 6));
  EXPECT_EQ(run.checkpoints[0].held_up_ms, 0.5);
}

TEST(RunReader, TakesPiecesOfLinesAndWaitsForTheLastOnesEnd) {
  const std::string text = kStart + step_line(1, "0.5") + step_line(2, "0.25");
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{100}}) {
    RunReader reader("m.jsonl");
    for (std::size_t at = 0; at + 1 < text.size(); at += piece)
      reader.add(std::string_view(text).substr(at, std::min(piece, text.size() - 1 - at)));
    EXPECT_EQ(reader.run().size(), 1u);
    reader.add("\n");
    EXPECT_THAT(reader.run().of(Field::kLoss), ElementsAre(0.5, 0.25));
  }
}

TEST(RunReader, OtherOrdersAndNestedValuesAreReadToo) {
  const report::Run run = run_of(R"({"event":"step","loss":2,"step":1,"more":{"a":[1,2]}})"
                                 "\n"
                                 R"({"event":"step","step":2,"text":"a,b","loss":3})"
                                 "\n");
  EXPECT_THAT(run.of(Field::kStep), ElementsAre(1, 2));
  EXPECT_THAT(run.of(Field::kLoss), ElementsAre(2, 3));
}

TEST(RunReader, ATableHasTheSame) {
  const report::Run run = run_of(
      "event,step,epoch,unix_s,split,loss,accuracy,lr,wall_s,params_sha256,own\n"
      "step,1,1,7.25,,0.5,,0.1,,,\n"
      "eval,1,1,,val,0.75,0.5,,,,3\n"
      "final,1,,,,0.75,0.5,,2,ab,\n",
      "m.csv");
  EXPECT_THAT(run.of(Field::kLoss), ElementsAre(0.5));
  EXPECT_THAT(run.of(Field::kLr), ElementsAre(0.1));
  EXPECT_THAT(curve_of(run, "own", "val", false).y, ElementsAre(3));
  ASSERT_TRUE(run.final);
  EXPECT_EQ(run.final->steps, 1);
  EXPECT_EQ(run.final->params_sha256, "ab");
}

TEST(RunReader, RefusalsNameTheLine) {
  const auto refusal = [](const std::string& text, const std::string& path = "m.jsonl") {
    try {
      run_of(text, path);
    } catch (const IoError& error) {
      return error.line();
    }
    return std::string("none");
  };
  EXPECT_THAT(refusal(kStart + "{\n"), HasSubstr("m.jsonl, line 2: is not JSON"));
  EXPECT_THAT(refusal("1\n"), HasSubstr("line 1: is no event"));
  EXPECT_THAT(refusal(R"({"a":1})"
                      "\n"),
              HasSubstr("has no 'event'"));
  EXPECT_THAT(refusal(R"({"event":"step","loss":1})"
                      "\n"),
              HasSubstr("has no step"));
  EXPECT_THAT(refusal("a,b\n", "m.csv"), HasSubstr("columns"));
  EXPECT_THAT(refusal("event,step\nstep,1,2\n", "m.csv"), HasSubstr("line 2: 3 cells under 2 columns"));
  EXPECT_THAT(refusal("event,step\nrun,1\n", "m.csv"), HasSubstr("step, eval or final"));
  testing::TemporaryDirectory directory;
  EXPECT_THROW(read_run(directory.write("empty.jsonl", "")), IoError);
  EXPECT_THROW(read_run(directory.path()), IoError);
  EXPECT_THROW(read_recorded(directory.path()), IoError) << "no metrics in it";
}

// Whatever is left out of a curve, the greatest and the least value are not.
TEST(Bins, KeepExtremes) {
  std::vector<double> x, y;
  for (int i = 0; i < 100'000; ++i) {
    x.push_back(i);
    y.push_back(i == 12'345 ? 9.75 : i == 70'001 ? -3.5 : std::sin(i));
  }
  y[5] = NAN;
  const auto bins = binned(x, y);
  ASSERT_EQ(bins.size(), kMostBins);
  EXPECT_EQ(std::ranges::max(bins, {}, &Bin::most).most, 9.75);
  EXPECT_EQ(std::ranges::min(bins, {}, &Bin::least).least, -3.5);
  EXPECT_EQ(bins.back().x, 99'999);
  const Extent extent = extent_of(x, y);
  EXPECT_EQ(extent.points, 99'999u);
  EXPECT_EQ(extent.most_at, 12'345);
  EXPECT_EQ(extent.least_at, 70'001);
  const auto few = binned({1, 2, 3}, {4, NAN, 6});
  ASSERT_EQ(few.size(), 2u);
  EXPECT_EQ(few[1].mean, 6);
  EXPECT_TRUE(binned({}, {}).empty());
}

TEST(Compare, SaysWhatDiffers) {
  testing::TemporaryDirectory directory;
  std::string other = kStart;
  other.replace(other.find("0.1"), 3, "0.2");
  const auto a = directory.write("a.jsonl", kStart + step_line(1, "0.5"));
  const auto b = directory.write("b.jsonl", other + step_line(1, "0.25"));
  const std::string text = compare({.first = a, .second = b});
  EXPECT_THAT(text, HasSubstr("lr  0.1 "));
  EXPECT_THAT(text, HasSubstr("-50.0 %"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("seed")));
  EXPECT_THAT(compare({.first = a, .second = b, .all = true}), HasSubstr("seed"));
  EXPECT_EQ(compare({.first = a, .second = a}), "nothing differs\n");
}

TEST(Drawing, FitsTheTerminal) {
  std::string text = kStart;
  for (int i = 1; i <= 50; ++i) text += step_line(i, std::to_string(1.0 / i));
  const report::Run run = run_of(text);
  for (const int columns : {10, 40, 80, 200})
    for (const int lines : {2, 5, 12, 50}) {
      const auto drawn = drawing_of(run, columns, lines);
      EXPECT_LE(drawn.size(), static_cast<std::size_t>(lines));
      for (const auto& line : drawn) EXPECT_LE(columns_of(line), columns) << line;
    }
  EXPECT_FALSE(drawing_of(report::Run{}, 80, 24).empty());
}

}  // namespace
}  // namespace lockstep::report
