// Who follows a run: the files of events that TensorBoard reads, and the status server.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/event_reader.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Of each file of events, in the order of their names.
std::vector<std::vector<ReadEvent>> read_board(const fs::path& directory) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory)) files.push_back(entry.path());
  std::ranges::sort(files);
  std::vector<std::vector<ReadEvent>> all;
  for (const auto& file : files) {
    EXPECT_THAT(file.filename().string(), StartsWith("events.out.tfevents."));
    all.push_back(read_events(read_file(file)));
  }
  return all;
}

const ReadEvent* find(const std::vector<ReadEvent>& events, const std::string& tag, std::int64_t step) {
  const auto at = std::ranges::find_if(
      events, [&](const ReadEvent& event) { return event.step == step && event.scalars.contains(tag); });
  return at == events.end() ? nullptr : &*at;
}

void expect_what_metrics_have(const std::vector<ReadEvent>& events, const fs::path& metrics) {
  for (const auto& line : events_of(read_file(metrics))) {
    const bool step = line["event"] == "step";
    if (!step && line["event"] != "eval") continue;
    const std::string group = step ? "train/" : line.contains("ema") ? "validation_ema/" : "validation/";
    const auto* const event = find(events, group + "loss", line["step"]);
    ASSERT_NE(event, nullptr) << line;
    EXPECT_NEAR(event->wall_time, line["unix_s"].get<double>(), 1);
    for (const char* name : {"loss", "lr", "grad_norm", "memory_bytes", "accuracy"}) {
      if (line.contains(name) && !line[name].is_null()) {
        EXPECT_EQ(event->scalars.at(group + name), line[name].get<float>()) << name;
      }
    }
    if (!step) continue;
    for (const char* name : {"step_ms", "comm_wait_ms", "samples_per_s"})
      EXPECT_NEAR(event->scalars.at(group + name), line[name].get<double>(), 0.1) << name;
  }
}

/// The norm of all gradients that an event has histograms of.
double norm_of(const ReadEvent& event) {
  double squares = 0;
  for (const auto& [name, histogram] : event.histograms)
    if (name.starts_with("gradients/")) squares += histogram.sum_squares;
  return std::sqrt(squares);
}

TEST(TensorBoard, HasWhatTheMetricsFileHas) {
  const TemporaryDirectory directory;
  const auto in = [&](const char* name) { return directory.path() / name; };
  const std::string line = on_ranks(3) +
                           "lockstep train mlp --hidden 8 --data digits --threads 1 --global-batch 95 --steps 5 "
                           "--eval-steps 4 --clip-norm 0.01 --ema 0.9 --checkpoint-dir c --checkpoint-every 3 --keep 0 "
                           "--metrics m.jsonl --quiet --tensorboard a/board --histogram-steps 2";
  run_well(line, directory.path());
  const auto boards = read_board(in("a/board"));
  ASSERT_EQ(boards.size(), 1u);
  const auto& events = boards[0];
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_EQ(events[1].session_status, 1u);
  EXPECT_EQ(events[1].step, 0);
  EXPECT_THAT(events[2].texts.at("settings"),
              AllOf(HasSubstr("| model | mlp |"), HasSubstr("| histogram-steps | 2 | command line |")));
  expect_what_metrics_have(events, in("m.jsonl"));
  std::vector<std::int64_t> looked;
  for (const ReadEvent& event : events) {
    if (event.histograms.empty()) continue;
    looked.push_back(event.step);
    ASSERT_EQ(event.histograms.size(), 8u);  // two layers' weights and biases
    EXPECT_EQ(event.histograms.at("parameters/fc1.weight").num, 8 * 64);
    // Before clipping, over the ranks' samples together.
    const double norm = static_cast<double>(find(events, "train/grad_norm", event.step)->scalars.at("train/grad_norm"));
    EXPECT_GT(norm, 0.01);
    EXPECT_NEAR(norm_of(event), norm, 1e-5 * norm) << event.step;
  }
  EXPECT_EQ(looked, (std::vector<std::int64_t>{2, 4}));
}

// Steps that are done again are dropped by who reads, and have the same numbers.
TEST(TensorBoard, OfARunThatResumesIsAFurtherFile) {
  const TemporaryDirectory directory;
  const std::string line =
      "lockstep train mlp --hidden 8 --data digits --threads 1 --batch 64 --steps 6 --checkpoint-dir c "
      "--checkpoint-every 4 --keep 0 --quiet --tensorboard b --histogram-steps 3 ";
  run_well(line, directory.path());
  fs::remove_all(directory.path() / "c/step-0000000006");
  run_well(line + "--resume auto", directory.path());
  const auto boards = read_board(directory.path() / "b");
  ASSERT_EQ(boards.size(), 2u);
  EXPECT_EQ(boards[1][1].session_status, 1u);
  EXPECT_EQ(boards[1][1].step, 5);
  EXPECT_EQ(boards[1][2].step, 4);
  EXPECT_TRUE(boards[1][2].texts.contains("settings"));
  for (const std::int64_t step : {4, 5, 6}) {
    const auto* const before = find(boards[0], "train/loss", step);
    const auto* const again = find(boards[1], "train/loss", step);
    ASSERT_NE(before, nullptr);
    ASSERT_EQ(again != nullptr, step > 4);
    if (again != nullptr) {
      EXPECT_EQ(again->scalars.at("train/loss"), before->scalars.at("train/loss"));
    }
  }
}

// A shard's or a device's gradients are a part of the global batch's.
TEST(TensorBoard, HistogramsAreOfTheGlobalBatch) {
  const TemporaryDirectory directory;
  for (const char* how : {"--shards 4 --global-batch 96", "--parallel dp --device cpu:0,1 --global-batch 96",
                          "--accumulate 3 --global-batch 96", "--comm-hook bf16 --global-batch 96"}) {
    fs::remove_all(directory.path() / "b");
    run_well(
        fmt::format("lockstep train cnn --data digits --threads 1 --steps 2 --quiet --clip-norm 10 --tensorboard b "
                    "--histogram-steps 1 {}",
                    how),
        directory.path());
    const auto boards = read_board(directory.path() / "b");
    ASSERT_EQ(boards.size(), 1u);
    int seen = 0;
    for (const ReadEvent& event : boards[0]) {
      if (event.histograms.empty()) continue;
      ++seen;
      const double norm =
          static_cast<double>(find(boards[0], "train/grad_norm", event.step)->scalars.at("train/grad_norm"));
      EXPECT_NEAR(norm_of(event), norm, 1e-5 * norm) << how;
    }
    EXPECT_EQ(seen, 2) << how;
  }
}

/// Starts `train` in the background, waits for the line that names its port, and runs `then` with that in $port; ask
/// PATH prints an answer. Then training is ended.
std::string with_server(const std::string& train, const std::string& then) {
  return train +
         " 2>err & until port=$(sed -n \"s,.*status of this run: http://[0-9.]*:\\([0-9]*\\)/.*,\\1,p\" err) && "
         "[ \"$port\" ]; do sleep 0.1; done; "
         "ask() { exec 3<>/dev/tcp/127.0.0.1/$port && printf \"GET $1 HTTP/1.1\\r\\n$2\\r\\n\" >&3 && cat <&3; }; " +
         then + "; kill %1; wait %1; exit 0";
}

TEST(StatusServer, AnswersWhileARunTrains) {
  const TemporaryDirectory directory;
  const auto outcome = run_well(
      with_server(
          "lockstep train mlp --hidden 8 --data digits --threads 1 --steps 1000000 --eval-every 1 --quiet "
          "--status-port 0",
          "until ask /metrics | grep -q validation_loss; do sleep 0.1; done; ask /metrics; ask /healthz; ask /x"),
      directory.path());
  for (const char* line :
       {"HTTP/1.1 200 OK\r\n", "\nlockstep_info{version=", "\nlockstep_planned_steps 1000000\n",
        "\nlockstep_healthy 1\n", "\nlockstep_loss ", "\nlockstep_validation_accuracy{weights=\"last\"} 0.",
        "\r\n\r\nok\n", "HTTP/1.1 404 Not Found\r\n"})
    EXPECT_THAT(outcome.out, HasSubstr(line));
}

TEST(StatusServer, DemandsItsTokenAndKeepsItsPort) {
  const TemporaryDirectory directory;
  const auto outcome = run_well(
      "LOCKSTEP_STATUS_TOKEN=0123456789abcdef0123 " +
          with_server(
              "lockstep train mlp --hidden 8 --data digits --threads 1 --steps 1000000 --quiet --metrics m.jsonl "
              "--status-port 0 --status-address 0.0.0.0",
              "ask /metrics; "
              "ask /healthz \"Authorization: Bearer 0123456789abcdef0123\\r\\n\"; "
              "lockstep train mlp --data digits --status-port $port 2>&1 || echo code $?"),
      directory.path());
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("HTTP/1.1 401 Unauthorized\r\n"), HasSubstr("\r\n\r\nok\n"),
                                 HasSubstr("is in use → choose another port"), HasSubstr("code 2\n")));
  EXPECT_THAT(read_file(directory.path() / "m.jsonl"), ::testing::Not(HasSubstr("0123456789abcdef0123")));
}

}  // namespace
}  // namespace lockstep::testing
