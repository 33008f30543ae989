#include "lockstep/trainer/metrics.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/error.h"
#include "base/log.h"
#include "base/scope.h"
#include "lockstep/data/open.h"
#include "tests/support/json.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::trainer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class MetricsTest : public ::testing::Test {
 protected:
  std::vector<nlohmann::json> lines() const {
    std::ifstream in(path_);
    std::vector<nlohmann::json> all;
    for (std::string line; std::getline(in, line);) all.push_back(testing::json_in(line));
    return all;
  }

  testing::TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_.path("m.jsonl");
};

TEST_F(MetricsTest, ResumedRunContinuesAtItsCheckpoint) {
  {
    Metrics metrics(path_);
    for (int step = 1; step <= 4; ++step) metrics.write(StepReport{.step = step});
    metrics.write(EvalReport{.step = 4});
    FinalReport final;
    final.steps = 4;
    metrics.write(final);
    metrics.write(ResumeReport{.step = 4});
    for (int step = 5; step <= 9; ++step) metrics.write(StepReport{.step = step});
    metrics.write(EvalReport{.step = 9});
  }
  const auto told = [&] {
    std::string text;
    for (const auto& event : lines())
      text += event["event"].get<std::string>()[0] + std::to_string(event.value("step", 0)) + " ";
    return text;
  };
  std::ofstream(path_, std::ios::app) << R"({"event":"step","step":10,"ep)";  // cut by the end of the process
  Metrics::resumed(path_, 9).write(ResumeReport{.step = 9});
  EXPECT_EQ(told(), "s1 s2 s3 s4 e4 f0 r4 s5 s6 s7 s8 s9 r9 ");
  Metrics::resumed(path_, 6).write(StepReport{.step = 7});
  EXPECT_EQ(told(), "s1 s2 s3 s4 e4 f0 r4 s5 s6 s7 ");
  Metrics::resumed(path_, 4).write(EvalReport{.step = 4});
  EXPECT_EQ(told(), "s1 s2 s3 s4 e4 ");
  Metrics::resumed(path_, 0);
  EXPECT_EQ(told(), "");
  Metrics::resumed(directory_.path("new.jsonl"), 5).write(StepReport{.step = 6});
  EXPECT_GT(std::filesystem::file_size(directory_.path("new.jsonl")), 0u);
  EXPECT_FALSE(Metrics::resumed("", 5));
  EXPECT_NO_THROW(Metrics::resumed("/dev/null", 5));
}

// They are true from whatever step a run resumes.
TEST_F(MetricsTest, WarningsAndRestartsStayWhenStepsAreDoneAgain) {
  {
    Metrics metrics(path_);
    metrics.take_warnings();
    for (int step = 1; step <= 4; ++step) metrics.write(StepReport{.step = step});
    log_warn("slow");
    metrics.write(StepReport{.step = 5});
    metrics.write(RestartReport{.attempt = 1, .cause = "why"});
  }
  Metrics::resumed(path_, 2).write(ResumeReport{.step = 2});
  std::string events;
  for (const auto& event : lines()) events += event["event"].get<std::string>() + " ";
  EXPECT_EQ(events, "step step warning restart resume ");
}

// What a killed process had not written yet is done again, unless a checkpoint has it.
TEST_F(MetricsTest, LinesOfShortStepsWaitForACheckpointAtMost) {
  Metrics metrics(path_);
  for (int step = 1; step <= 3; ++step) metrics.write(StepReport{.step = step});
  metrics.flush();
  EXPECT_EQ(lines().size(), 3u);
}

TEST_F(MetricsTest, ATableHasStepsEvaluationsAndTheEnd) {
  const auto table = directory_.path("m.csv");
  const auto text = [&] { return testing::read_file(table); };
  const auto rows = [&] {
    std::string begins;
    std::istringstream in(text());
    for (std::string line; std::getline(in, line);) begins += line.substr(0, line.find(',', line.find(',') + 1)) + " ";
    return begins;
  };
  {
    Metrics metrics(table);
    metrics.write(RunReport{.command = "c"});
    for (int step = 1; step <= 3; ++step)
      metrics.write(StepReport{.step = step, .loss = 0.1, .grad_norm = std::nan(""), .memory_bytes = 4096});
    metrics.write(EvalReport{.step = 3, .split = "val", .loss = 0.5, .accuracy = 0.25});
    metrics.write(CheckpointReport{.step = 3});
    metrics.write(FinalReport{.steps = 3, .peak_memory_bytes = {}, .params_sha256 = "ab"});
  }
  EXPECT_EQ(rows(), "event,step step,1 step,2 step,3 eval,3 final,3 ");
  EXPECT_THAT(text(), HasSubstr(",4096,"));
  EXPECT_THAT(text(), HasSubstr(",val,0.5,0.25,"));
  EXPECT_EQ(text().find("null"), std::string::npos);
  const auto cells = [](const std::string& line) { return std::ranges::count(line, ','); };
  std::istringstream in(text());
  std::string header;
  std::getline(in, header);
  for (std::string line; std::getline(in, line);) EXPECT_EQ(cells(line), cells(header)) << line;
  Metrics::resumed(table, 2).write(StepReport{.step = 3});
  EXPECT_EQ(rows(), "event,step step,1 step,2 step,3 ");
  testing::write_file(table, "event,step\n");
  EXPECT_THROW(Metrics::resumed(table, 2), UsageError) << "of another version";
}

// Of steps whose losses are scaled, and of no others. A skipped one has no norm that JSON knows.
TEST_F(MetricsTest, ScalesOfLossesAreInTheLinesOfTheirSteps) {
  Metrics metrics(path_);
  metrics.write(StepReport{.step = 1});
  metrics.write(
      StepReport{.step = 2,
                 .grad_norm = std::numeric_limits<double>::infinity(),
                 .scaling = LossScaling{.scale = 65536, .next_scale = 32768, .skipped = true, .skipped_steps = 1}});
  metrics.write(FinalReport{.steps = 2,
                            .peak_memory_bytes = {},
                            .params_sha256 = {},
                            .scaling = LossScaling{.scale = 32768, .good_steps = 5, .skipped_steps = 1}});
  const auto all = lines();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_FALSE(all[0].contains("loss_scale"));
  EXPECT_EQ(all[1]["loss_scale"], 65536);
  EXPECT_EQ(all[1]["good_steps"], 0);
  EXPECT_EQ(all[1]["skipped_steps"], 1);
  EXPECT_TRUE(all[1]["grad_norm"].is_null());
  EXPECT_EQ(all[2]["loss_scale"], 32768);
  EXPECT_EQ(all[2]["good_steps"], 5);
  EXPECT_EQ(all[2]["skipped_steps"], 1);
}

TEST_F(MetricsTest, WhatWasFoundHasALineForEachPart) {
  std::ofstream table(directory_.path("t.csv"));
  table << "id,text,label\n";
  for (int i = 0; i < 30; ++i) table << i << ",some words," << (i < 20 ? "good" : "bad") << '\n';
  table.close();
  Metrics metrics(path_);
  data::OpenOptions options;
  options.context = 8;
  options.word_pieces = data::WordPieceOptions{};
  options.settings.set("text", "text");
  metrics.write(data::open_data("csv:" + directory_.path("t.csv"), options));
  metrics.write(data::open_data("random:4,20"));
  const auto all = lines();
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0]["event"], "data");
  EXPECT_EQ(all[0]["name"], "csv " + directory_.path("t.csv") + " train");
  EXPECT_EQ(all[0]["samples"], 27);
  EXPECT_EQ(all[1]["samples"], 3);
  EXPECT_EQ(all[0]["classes"], 2);
  EXPECT_EQ(all[0]["class_names"], (std::vector<std::string>{"bad", "good"}));
  for (const std::size_t c : {0u, 1u})
    EXPECT_EQ(all[0]["class_counts"][c].get<int>() + all[1]["class_counts"][c].get<int>(), c == 0 ? 10 : 20);
  EXPECT_THAT(all[0]["reading"].get<std::string>(),
              AllOf(HasSubstr("30 rows"), HasSubstr("the class in 'label'"), HasSubstr("not read: 'id'")));
  EXPECT_EQ(all[2]["classes"], 10);
  EXPECT_FALSE(all[2].contains("reading"));
}

TEST_F(MetricsTest, EveryLineIsAnObjectWithTheDocumentedKeys) {
  Metrics metrics(path_);
  metrics.write(StepReport{.step = 3,
                           .epoch = 1,
                           .loss = 0.1,
                           .lr = 1e-3,
                           .grad_norm = 2.5,
                           .step_ms = 1.5,
                           .comm_wait_ms = 0.25,
                           .samples_per_s = 4e4});
  metrics.write(EvalReport{.step = 3, .loss = 0.5, .accuracy = 0.975, .samples = 360});
  metrics.write(FinalReport{.steps = 3,
                            .epochs = 1,
                            .world_size = 2,
                            .wall_s = 0.7,
                            .loss = 0.5,
                            .accuracy = 0.975,
                            .peak_memory_bytes = {7, 9},
                            .params_sha256 = "ab"});
  const auto all = lines();
  ASSERT_EQ(all.size(), 3u);
  for (const char* key : {"step", "epoch", "loss", "lr", "grad_norm", "step_ms", "comm_wait_ms", "samples_per_s"})
    EXPECT_TRUE(all[0].contains(key)) << key;
  EXPECT_EQ(all[0]["event"], "step");
  EXPECT_EQ(all[0]["loss"].get<double>(), 0.1);  // numbers survive to the last bit
  EXPECT_EQ(all[1]["event"], "eval");
  EXPECT_EQ(all[1]["samples"], 360);
  EXPECT_EQ(all[2]["event"], "final");
  for (const char* key : {"steps", "epochs", "world_size", "wall_s", "loss", "accuracy", "params_sha256"})
    EXPECT_TRUE(all[2].contains(key)) << key;
  EXPECT_EQ(all[2]["peak_memory_bytes"], (std::vector<int>{7, 9}));
  EXPECT_TRUE(metrics.failure().empty());
}

TEST_F(MetricsTest, NumbersThatJsonLacksAreNull) {
  Metrics metrics(path_);
  metrics.write(EvalReport{.loss = std::nan(""), .accuracy = INFINITY});
  ASSERT_EQ(lines().size(), 1u);
  EXPECT_TRUE(lines()[0]["loss"].is_null());
  EXPECT_TRUE(lines()[0]["accuracy"].is_null());
}

TEST_F(MetricsTest, FullDiskIsOneWarning) {
  set_log_level(LogLevel::kError);
  Metrics metrics("/dev/full");
  EXPECT_NO_THROW(metrics.write(StepReport{}));
  EXPECT_NO_THROW(metrics.write(StepReport{}));
  EXPECT_NE(metrics.failure().find("/dev/full"), std::string::npos);
  EXPECT_NE(metrics.failure().find("No space left"), std::string::npos);
  set_log_level(LogLevel::kInfo);
}

// A limit on the size of files stands for a disk, which takes a part of what is written, too.
TEST_F(MetricsTest, LinesWaitUntilThereIsSpace) {
  set_log_level(LogLevel::kError);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  {
    Metrics metrics(path_);
    metrics.write(EvalReport{.step = 1});
    rlimit none = before;
    none.rlim_cur = static_cast<rlim_t>(std::filesystem::file_size(path_)) + 10;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
    metrics.write(EvalReport{.step = 2});
    metrics.write(EvalReport{.step = 3});
    EXPECT_THAT(metrics.failure(), HasSubstr("is cut: File too large"));
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    metrics.write(EvalReport{.step = 4});
    EXPECT_EQ(metrics.failure(), "");
  }
  std::signal(SIGXFSZ, SIG_DFL);
  const auto all = lines();
  ASSERT_EQ(all.size(), 4u);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i]["step"], i + 1);
  set_log_level(LogLevel::kInfo);
}

TEST_F(MetricsTest, AGapIsAFailureOfARestartedRun) {
  set_log_level(LogLevel::kError);
  {
    Metrics metrics(path_);
    for (const std::int64_t step : {1, 2, 3}) metrics.write(StepReport{.step = step});
  }
  for (const auto& [step, restarted, failure] :
       {std::tuple(3, true, ""), std::tuple(5, false, ""), std::tuple(5, true, "lacks the steps from 4 to 5")}) {
    Metrics metrics = Metrics::resumed(path_, step);
    EXPECT_EQ(metrics.last_step(), 3);
    metrics.look_for_gap(step, restarted);
    EXPECT_THAT(metrics.failure(), HasSubstr(failure));
    if (*failure == 0) {
      EXPECT_EQ(metrics.failure(), "");
    }
  }
  std::filesystem::remove(path_);
  Metrics metrics = Metrics::resumed(path_, 5);  // the run had no such file before
  metrics.look_for_gap(5, true);
  EXPECT_EQ(metrics.failure(), "");
  set_log_level(LogLevel::kInfo);
}

TEST_F(MetricsTest, AMissingDirectoryIsNamed) {
  try {
    Metrics metrics(directory_.path("none/m.jsonl"));
    FAIL() << "opened";
  } catch (const IoError& error) {
    EXPECT_NE(error.line().find("none/m.jsonl"), std::string::npos) << error.line();
  }
}

// Opening a pipe waits for who reads it, and writing to it for how fast.
TEST_F(MetricsTest, APipeIsNoFile) {
  const std::string pipe = directory_.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(Metrics{pipe}, UsageError);
  const UniqueFd reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  EXPECT_THROW(Metrics{pipe}, UsageError);
  EXPECT_NO_THROW(Metrics{"/dev/null"});
}

TEST(Metrics, WithoutAPathWritesNothing) {
  Metrics metrics("");
  EXPECT_FALSE(metrics);
  metrics.write(StepReport{});
  EXPECT_TRUE(metrics.failure().empty());
}

}  // namespace
}  // namespace lockstep::trainer
