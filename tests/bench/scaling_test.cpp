// The plan, the file of results, and what is made of it; jobs run in scaling_test.py.
#include "bench/scaling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/support/json.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Outcome = ScalingChange::Outcome;

const Facts kMachine = {
    {"date", "2026-11-28"}, {"host", "a"}, {"CPU", "one"}, {"places", "2 cores"}, {"lockstep", "1"}};

ScalingOptions scaling_options() {
  ScalingOptions given;
  given.models = {"cnn"};
  given.ranks = {1, 2, 4};
  given.rounds = 5;
  given.program = "/bin/lockstep";
  return given;
}

JobResult job_result(double step_ms, double rate) {
  return {.step_ms = step_ms,
          .samples_per_s = rate,
          .compute_ms = step_ms - 1,
          .exposed_comm_ms = 1,
          .batch = 64,
          .peak_memory_bytes = 1 << 20,
          .backend = "shm",
          .device = "cpu",
          .precision = "f32"};
}

/// Rounds of one rank at 100 samples/s and of more with 90 % of that each, all a little different.
ScalingFile measured_file(double factor = 1, std::int64_t rounds = 5) {
  ScalingFile file;
  file.settings = settings_of(scaling_options());
  file.machine = kMachine;
  for (const auto mode : {ScalingMode::kWeak, ScalingMode::kStrong})
    for (const int n : {1, 2, 4})
      for (std::int64_t round = 1; round <= rounds; ++round) {
        const double noise = 1 + 0.001 * static_cast<double>(round);
        file.results[{mode, "cnn", n}][round] =
            job_result(10 * noise * factor, (n == 1 ? 100 : 90.0 * n) * noise / factor);
      }
  return file;
}

std::string failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.line();
  }
  return "none";
}

class ScalingFileTest : public ::testing::Test {
 protected:
  void write(const std::string& text) { testing::write_file(path_, text); }
  ScalingFile read() { return parse_scaling(testing::read_file(path_), path_); }

  testing::TemporaryDirectory directory_;
  std::string path_ = directory_.path("scaling.jsonl");
};

TEST(ScalingPlan, RoundsAlternateTheirOrder) {
  ScalingOptions two = scaling_options();
  two.modes = {ScalingMode::kWeak};
  two.rounds = 3;
  std::vector<std::string> order;
  for (const auto& job : plan_of(two)) order.push_back(fmt::format("{}:{}", job.round, job.one.ranks));
  EXPECT_THAT(order, ElementsAre("1:1", "1:2", "1:4", "2:4", "2:2", "2:1", "3:1", "3:2", "3:4"));
}

TEST(ScalingPlan, JobsAreTheLaunchers) {
  ScalingOptions own = scaling_options();
  own.hosts = "a:2,b:2";
  own.step_flags = {"--zero", "1"};
  const auto words = command_of(own, {ScalingMode::kStrong, "cnn", 4});
  EXPECT_EQ(words.front(), "/bin/lockstep");
  const std::string line = [&] {
    std::string text;
    for (const auto& word : words) text += " " + word;
    return text;
  }();
  EXPECT_THAT(line, HasSubstr("launch -n 4 --no-prefix --hosts a:2,b:2 -- lockstep bench step cnn --global-batch 256"));
  EXPECT_THAT(line, HasSubstr("--json --zero 1"));
}

TEST_F(ScalingFileTest, ContinuesWhatIsThere) {
  const Facts settings = settings_of(scaling_options());
  {
    ScalingJournal journal(path_, settings, kMachine);
    journal.add({ScalingMode::kWeak, "cnn", 2}, 1, job_result(10, 100));
    EXPECT_THAT(failure_of([&] { ScalingJournal(path_, settings, kMachine); }), HasSubstr("in use"));
  }
  Facts later = kMachine;
  later[0].second = "2026-11-29";
  ScalingJournal journal(path_, settings, later);
  journal.check_machine(later);
  journal.add({ScalingMode::kWeak, "cnn", 2}, 2, job_result(11, 101));
  const ScalingFile file = read();
  EXPECT_EQ(file.settings, settings);
  EXPECT_EQ(file.machine, kMachine) << "as it was at the beginning";
  const auto& rounds = file.results.at({ScalingMode::kWeak, "cnn", 2});
  EXPECT_EQ(rounds.size(), 2u);
  EXPECT_EQ(rounds.at(2).step_ms, 11);
  EXPECT_EQ(rounds.at(1).device, "cpu");
}

TEST_F(ScalingFileTest, CutsOffALineThatIsNotWhole) {
  const Facts settings = settings_of(scaling_options());
  { ScalingJournal(path_, settings, kMachine).add({ScalingMode::kWeak, "cnn", 2}, 1, job_result(10, 100)); }
  const std::string whole = testing::read_file(path_);
  for (std::size_t cut = 0; cut < whole.size(); cut += 7) {
    write(whole.substr(0, cut));
    const ScalingJournal journal(path_, settings, kMachine);
    EXPECT_TRUE(journal.file().results.empty()) << cut;
    EXPECT_EQ(testing::read_file(path_), whole.substr(0, whole.find('\n') + 1)) << cut;
  }
}

TEST_F(ScalingFileTest, RefusesOtherSettingsAndMachines) {
  const Facts settings = settings_of(scaling_options());
  { ScalingJournal(path_, settings, kMachine); }
  const std::string before = testing::read_file(path_);
  ScalingOptions other = scaling_options();
  other.batch = 32;
  EXPECT_THAT(failure_of([&] { ScalingJournal(path_, settings_of(other), kMachine); }),
              HasSubstr("--batch 64, and this is 32 → give the same flags"));
  other = scaling_options();
  other.step_flags = {"--zero", "1"};
  EXPECT_THAT(failure_of([&] { ScalingJournal(path_, settings_of(other), kMachine); }),
              HasSubstr("flags of bench step none, and this is --zero 1"));
  other = scaling_options();
  other.rounds = 100;
  EXPECT_EQ(failure_of([&] { ScalingJournal(path_, settings_of(other), kMachine); }), "none") << "more rounds continue";
  Facts machine = kMachine;
  machine[2].second = "two";
  EXPECT_THAT(failure_of([&] { ScalingJournal(path_, settings, machine).check_machine(machine); }),
              HasSubstr("'CPU' was 'one', and here it is 'two'"));
  EXPECT_EQ(testing::read_file(path_), before);
}

TEST_F(ScalingFileTest, NamesTheLineThatIsWrong) {
  const Facts settings = settings_of(scaling_options());
  { ScalingJournal(path_, settings, kMachine).add({ScalingMode::kWeak, "cnn", 2}, 1, job_result(10, 100)); }
  const std::string whole = testing::read_file(path_), job = whole.substr(whole.find('\n') + 1);
  const auto wrong = [&](const std::string& text) {
    write(text);
    return failure_of([&] { read(); });
  };
  EXPECT_THAT(wrong(whole + job), HasSubstr("line 3: round 1 of cnn, weak, 2 ranks is there twice"));
  EXPECT_THAT(wrong(whole + "{}\n"), HasSubstr("line 3: 'event' is missing"));
  EXPECT_THAT(wrong(whole + "oops\n" + job), HasSubstr("line 3: is not JSON"));
  EXPECT_THAT(wrong(job), HasSubstr("line 1: 'job' is no event"));
  EXPECT_THAT(wrong("# Notes\n"), HasSubstr("line 1: is not JSON"));
  EXPECT_THAT(wrong("# Notes"), HasSubstr("is no file of lockstep bench scaling"));
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"\"round\":1", "\"round\":0"},
                                                        {"\"ranks\":2", "\"ranks\":-2"},
                                                        {"\"ranks\":2", "\"ranks\":2.5"},
                                                        {"\"mode\":\"weak\"", "\"mode\":\"week\""},
                                                        {"\"step_ms\":10", "\"step_ms\":0"},
                                                        {"\"step_ms\":10", "\"step_ms\":\"10\""},
                                                        {"\"model\":\"cnn\"", "\"model\":7"},
                                                        {"\"format\":1", "\"format\":2"},
                                                        {"\"machine\":{", "\"machine\":{\"x\":1,"}}) {
    std::string text = whole;
    text.replace(text.find(from), from.size(), to);
    EXPECT_THAT(wrong(text), HasSubstr("line ")) << to;
  }
  write("# Notes\n");
  EXPECT_THAT(failure_of([&] { ScalingJournal(path_, settings, kMachine); }), HasSubstr("is not JSON"));
  EXPECT_EQ(testing::read_file(path_), "# Notes\n");
}

TEST(ReportOfScaling, HasHorovodsDeviationAndRatiosWithinRounds) {
  const ScalingReport report = report_of(scaling_options(), measured_file(), {});
  ASSERT_EQ(report.series.size(), 2u);
  const auto& weak = report.series[0].points;
  EXPECT_NEAR(weak[1].total, 180 * 1.003, 1e-9);
  EXPECT_NEAR(weak[1].per_rank, 90 * 1.003, 1e-9);
  EXPECT_NEAR(weak[1].total_deviation, 1.96 * 0.18 * std::sqrt(2.0), 1e-9) << "of 1 to 5 the deviation is √2";
  EXPECT_NEAR(weak[1].efficiency->middle, 0.9, 1e-12) << "the noise is that of a round";
  EXPECT_NEAR(weak[1].efficiency->high, 0.9, 1e-9);
  EXPECT_NEAR(report.series[1].points[2].speedup->middle, 3.6, 1e-9);
  EXPECT_FALSE(weak[1].crowded);
  EXPECT_TRUE(weak[2].crowded);
  EXPECT_EQ(weak[1].peak_memory_bytes, 1 << 20);
}

TEST(ReportOfScaling, RoundsThatOneCaseLacksCountForTheOthers) {
  ScalingFile file = measured_file();
  file.results[{ScalingMode::kWeak, "cnn", 1}].erase(3);
  file.results.erase({ScalingMode::kWeak, "cnn", 4});
  const ScalingReport report =
      report_of(scaling_options(), file, {{{ScalingMode::kWeak, "cnn", 4}, "exit code 4, no memory"}});
  EXPECT_EQ(report.series[0].points[0].rounds, 4);
  EXPECT_NEAR(report.series[0].points[1].efficiency->middle, 0.9, 1e-12);
  EXPECT_FALSE(report.series[0].points[2].efficiency);
  EXPECT_THAT(text_of(report, Format::kTable), HasSubstr("failed: exit code 4, no memory"));
  EXPECT_THAT(page_of(report), HasSubstr("failed: exit code 4, no memory"));
}

TEST(ReportOfScaling, SaysThatTheHostWasBusy) {
  ScalingFile file = measured_file();
  for (const auto& [load, said] : {std::pair("0.30", false), std::pair("1.29", true)}) {
    file.machine.back() = {"load average", load};
    const ScalingReport report = report_of(scaling_options(), file, {});
    EXPECT_EQ(text_of(report, Format::kTable).find("do not rely on these") != std::string::npos, said);
    EXPECT_EQ(page_of(report).find("do not rely on these") != std::string::npos, said);
  }
}

TEST(ReportOfScaling, TableAndJsonSayTheSame) {
  const ScalingReport report = report_of(scaling_options(), measured_file(), {});
  const std::string table = text_of(report, Format::kTable);
  EXPECT_THAT(table, HasSubstr("90.27 ± 0.25"));
  EXPECT_THAT(table, HasSubstr("as Horovod's synthetic benchmark prints"));
  EXPECT_THAT(table, HasSubstr("Student's t"));
  EXPECT_THAT(table, HasSubstr("* more threads than cores"));
  const auto json = testing::json_in(text_of(report, Format::kJson));
  EXPECT_EQ(json["machine"]["CPU"], "one");
  EXPECT_NEAR(json["series"][0]["points"][1]["efficiency"]["middle"].get<double>(), 0.9, 1e-6);
  EXPECT_FALSE(json.contains("baseline"));
}

TEST(PageOfScaling, StandsAlone) {
  ScalingFile file = measured_file();
  file.machine.emplace_back("odd", "<script>alert('x')</script>");
  const std::string page = page_of(report_of(scaling_options(), file, {}));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("href=")));
  EXPECT_THAT(page, Not(HasSubstr("url(")));
  EXPECT_THAT(page, HasSubstr("2 ranks keep 90.0 %")) << "the largest number that has cores";
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(page, HasSubstr("@media print"));
  EXPECT_TRUE(figure_of(report_of(scaling_options(), file, {})).starts_with("<svg"));
}

std::vector<Outcome> outcomes(const std::vector<ScalingChange>& changes) {
  std::vector<Outcome> all;
  for (const auto& change : changes) all.push_back(change.outcome);
  return all;
}

TEST(ScalingBaseline, SlowerIsSignificantAndMoreThanTheThreshold) {
  const ScalingFile before = measured_file();
  for (const auto outcome : outcomes(compare(before, measured_file(), 5))) EXPECT_EQ(outcome, Outcome::kSame);
  for (const auto outcome : outcomes(compare(before, measured_file(1.2), 5))) EXPECT_EQ(outcome, Outcome::kSlower);
  for (const auto outcome : outcomes(compare(before, measured_file(0.8), 5))) EXPECT_EQ(outcome, Outcome::kFaster);
  for (const auto outcome : outcomes(compare(before, measured_file(1.04), 5))) EXPECT_EQ(outcome, Outcome::kSame);
  for (const auto outcome : outcomes(compare(before, measured_file(1.04), 2))) EXPECT_EQ(outcome, Outcome::kSlower);
  // Half as fast, in one of five rounds.
  ScalingFile now = measured_file();
  now.results[{ScalingMode::kWeak, "cnn", 2}][1].step_ms *= 2;
  for (const auto outcome : outcomes(compare(before, now, 5))) EXPECT_EQ(outcome, Outcome::kSame);
  now.results.erase({ScalingMode::kWeak, "cnn", 2});
  now.results[{ScalingMode::kWeak, "mlp", 2}][1] = job_result(10, 100);
  EXPECT_EQ(compare(before, now, 5).back().outcome, Outcome::kSame);
  EXPECT_THAT(outcomes(compare(before, now, 5)), ::testing::Contains(Outcome::kMissing));
}

TEST(ScalingBaseline, WithTooFewRoundsIsRefused) {
  const Facts settings = settings_of(scaling_options());
  EXPECT_EQ(failure_of([&] { check_baseline(measured_file(), settings, 5, "b.jsonl"); }), "none");
  EXPECT_THAT(failure_of([&] { check_baseline(measured_file(), settings, 3, "b.jsonl"); }),
              HasSubstr("has 5 rounds, and --rounds is 3: no difference of those has p < 0.01 → measure at least 5"));
  ScalingOptions other = scaling_options();
  other.threads = 2;
  EXPECT_THAT(failure_of([&] { check_baseline(measured_file(), settings_of(other), 5, "b.jsonl"); }),
              HasSubstr("--threads 1, and this is 2"));
  other = scaling_options();
  other.ranks = {1, 2};
  EXPECT_EQ(failure_of([&] { check_baseline(measured_file(), settings_of(other), 5, "b.jsonl"); }), "none");
  EXPECT_THAT(failure_of([&] {
                check_baseline(ScalingFile{.settings = settings, .machine = {}, .results = {}}, settings, 5, "b.jsonl");
              }),
              HasSubstr("no results"));
}

}  // namespace
}  // namespace lockstep::bench
