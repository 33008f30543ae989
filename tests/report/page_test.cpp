#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "report/report.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

RecordedRun recorded(const std::string& name, double factor, const std::string& lr) {
  RecordedRun one = {.run = {.path = name}, .name = name};
  for (int step = 1; step <= 1000; ++step)
    for (std::size_t field = 0; field < kFields; ++field)
      one.run.steps[field].push_back(field == 0 ? step : factor * static_cast<double>(field) / step);
  one.run.evaluations.push_back(
      {.step = 1000, .split = "val", .figures = {{"loss", factor}, {"accuracy", factor / 2}}});
  one.run.starts.push_back({.model = "<b>m</b>",
                            .data = "d",
                            .ranks = {{"a", "cpu"}, {"b", "cpu"}},
                            .settings = {{"lr", lr, "command line"}, {"seed", "1", "default"}}});
  one.run.final = Final{.figures = {{"loss", factor}}, .steps = 1000, .wall_s = 75, .peak_memory_bytes = {1e6, 2e6}};
  return one;
}

TEST(Page, HasTheNumbersAndLoadsNothing) {
  auto one = recorded("m.jsonl", 0.123456, "0.1");
  one.run.incidents.push_back({.kind = "warning", .step = 3, .text = "<script>alert(1)</script>"});
  one.run.checkpoints.push_back({.step = 5, .bytes = 4096, .write_ms = 3.25, .held_up_ms = 1});
  one.launcher.push_back({.kind = "restart", .text = "attempt 1, cause rank 1 died"});
  one.flights.emplace_back("rank 1 (host b): in the forward pass");
  const std::string page = page_of(std::vector<RecordedRun>{one});
  EXPECT_THAT(page, HasSubstr(">0.123456<")) << "the loss of the evaluation";
  EXPECT_THAT(page, HasSubstr(">0.061728<")) << "its accuracy";
  EXPECT_THAT(page, HasSubstr(">0.246912 at 1<")) << "the greatest loss of training";
  EXPECT_THAT(page, HasSubstr("1000 steps in 1 min 15 s"));
  EXPECT_THAT(page, HasSubstr("rank 1 died"));
  EXPECT_THAT(page, HasSubstr("in the forward pass"));
  EXPECT_THAT(page, HasSubstr("class=\"band")) << "of 1000 steps a curve has a band";
  for (const char* loads : {"<script", "http://", "https://", "<link", "src=", "@import", "url("})
    for (auto at = page.find(loads); at != std::string::npos; at = page.find(loads, at + 1))
      EXPECT_EQ(page.substr(at, 26), "http://www.w3.org/2000/svg") << loads;
  EXPECT_THAT(page, HasSubstr("&lt;b&gt;m&lt;/b&gt;"));
}

TEST(Page, OverlaysRunsAndShowsWhichSettingsDiffer) {
  const std::string page =
      page_of(std::vector<RecordedRun>{recorded("a.jsonl", 1, "0.1"), recorded("b.jsonl", 2, "0.2")});
  EXPECT_THAT(page, HasSubstr("a.jsonl: training"));
  EXPECT_THAT(page, HasSubstr("b.jsonl: validation"));
  const auto differ = page.find("Those that differ");
  ASSERT_NE(differ, std::string::npos);
  const std::string table = page.substr(differ, page.find("</table>", differ) - differ);
  EXPECT_THAT(table, HasSubstr("<td>0.1</td><td>0.2</td>"));
  EXPECT_THAT(table, Not(HasSubstr("seed")));
}

TEST(Report, OverwritesNoInputAndTakesEachRunOnce) {
  testing::TemporaryDirectory directory;
  const std::string run = directory.write("m.jsonl", R"({"event":"step","step":1,"loss":2})"
                                                     "\n");
  EXPECT_THROW(report({.runs = {run}, .output = run}), UsageError);
  EXPECT_THROW(report({.runs = {run, run}, .output = directory.path("r.html")}), UsageError);
  EXPECT_THAT(report({.runs = {directory.path()}, .output = directory.path("r.html")}), HasSubstr("r.html ("));
  directory.write("n.jsonl", testing::read_file(run));
  EXPECT_THROW(report({.runs = {directory.path()}, .output = directory.path("r.html")}), UsageError) << "which of two?";
}

}  // namespace
}  // namespace lockstep::report
