#include "trainer/event_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "tests/support/event_reader.h"
#include "tests/support/temporary_directory.h"
#include "trainer/tensorboard.h"

namespace lockstep::trainer {
namespace {

using ::testing::HasSubstr;
using testing::read_events;
using testing::read_file;
using testing::TemporaryDirectory;

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}

std::string record_of(Event& event) {
  std::string record;
  event.append_to(record);
  return record;
}

// What protobuf's own classes and tensorboard.summary.writer.record_writer (2.21) make of the same events.
TEST(Events, AreTheBytesOfTensorBoardsOwnWriter) {
  Event event;
  event.begin(1.5, 0);
  event.set_file_version();
  EXPECT_EQ(hex(record_of(event)), "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c");
  event.begin(1.5, 300);
  event.set_session_start();
  EXPECT_EQ(hex(record_of(event)), "100000000000000095fbfe1809000000000000f83f10ac023a020801713b788a");
  event.begin(1.5, 7);
  event.add_scalar("a/b", 0.5);
  event.add_scalar("c", -3);
  EXPECT_EQ(hex(record_of(event)),
            "2300000000000000b09f774309000000000000f83f10072a160a0a0a03612f62150000003f0a080a016315000040c0a31268ef");
  event.begin(1.5, 7);
  event.add_text("s", std::string(200, 'x'));
  std::string x;
  for (int i = 0; i < 200; ++i) x += "78";
  EXPECT_EQ(hex(record_of(event)),
            "f000000000000000974165aa09000000000000f83f10072ae2010adf010a017342cf010807120042c801" + x +
                "4a080a060a0474657874cb0bb496");
  event.begin(1.5, 7);
  Histogram histogram{.count = 4, .min = -1, .max = 2, .sum = 2, .squares = 6, .limits = {2}, .counts = {4}};
  event.add_histogram("h", histogram);
  EXPECT_EQ(hex(record_of(event)),
            "5500000000000000d7df0fc109000000000000f83f10072a480a460a01682a4109000000000000f0bf110000000000000040190000"
            "000000001040210000000000000040290000000000001840320800000000000000403a080000000000001040969b7c40");
}

std::string record_of_step(std::int64_t step) {
  Event event;
  event.begin(static_cast<double>(step), step);
  event.add_scalar("train/loss", static_cast<double>(step) / 2);
  return record_of(event);
}

TEST(EventFile, HasWhatWasAddedSoonWithoutItsEnd) {
  const TemporaryDirectory directory;
  EventFile file(directory.path("deep/below"));
  file.add(record_of_step(3));
  const auto size = [&] { return std::filesystem::file_size(file.path()); };
  while (size() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a second at most
  file.add(record_of_step(4));
  file.hurry();
  while (read_file(file.path()).size() < record_of_step(3).size() + record_of_step(4).size())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto events = read_events(read_file(file.path()));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].step, 4);
  EXPECT_EQ(events[1].wall_time, 4);
  EXPECT_EQ(events[1].scalars.at("train/loss"), 2);
  EXPECT_EQ(file.failure(), "");
}

TEST(EventFile, ComesAfterTheOthersOfItsDirectory) {
  const TemporaryDirectory directory;
  directory.write("events.out.tfevents.4000000000.other.1.0", "");
  directory.write("events.out.tfevents.x.other.1.0", "");
  const EventFile first(directory.path()), second(directory.path());
  EXPECT_THAT(first.path(), HasSubstr("/events.out.tfevents.4000000001."));
  EXPECT_THAT(second.path(), HasSubstr("/events.out.tfevents.4000000002."));
}

TEST(EventFile, ADirectoryThatCannotBeIsNamed) {
  const TemporaryDirectory directory;
  directory.write("file", "");
  for (const char* name : {"file", "file/below"}) {
    try {
      const EventFile file(directory.path(name));
      FAIL() << name;
    } catch (const IoError& error) {
      EXPECT_THAT(error.line(), HasSubstr(directory.path(name)));
    }
  }
}

// A disk that is full in the middle of a record.
TEST(EventFile, EndsWithAWholeRecordWhereTheDiskIsFull) {
  const TemporaryDirectory directory;
  set_log_level(LogLevel::kError);
  const auto before = ::signal(SIGXFSZ, SIG_IGN);
  rlimit most = {}, small = {};
  ::getrlimit(RLIMIT_FSIZE, &most);
  std::string path, failure;
  {
    EventFile file(directory.path());
    path = file.path();
    file.add(record_of_step(1));
    file.hurry();
    while (read_file(path).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    small = {2 * record_of_step(1).size() + 5, most.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    file.add(record_of_step(2) + record_of_step(3));
    file.hurry();
    while (file.failure().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ::setrlimit(RLIMIT_FSIZE, &most);
    file.add(record_of_step(4));
    failure = file.failure();
  }
  ::signal(SIGXFSZ, before);
  set_log_level(LogLevel::kInfo);
  EXPECT_THAT(failure, HasSubstr(path + " is cut"));
  EXPECT_EQ(read_events(read_file(path)).size(), 2u);
}

// Short steps by the million are no file by the gigabyte; the last one before an evaluation and the end is there.
TEST(TensorBoard, LeavesOutSomeOfManyShortSteps) {
  const TemporaryDirectory directory;
  const auto board = make_tensorboard_follower(directory.path(), 0);
  for (int step = 1; step <= 11'003; ++step) {
    board->write(StepReport{.step = step, .step_ms = 0.5});
    if (step == 6'001) board->write(EvalReport{.step = step});
  }
  board->write(FinalReport{});
  std::vector<std::int64_t> steps;
  const auto path = std::filesystem::directory_iterator(directory.path())->path();
  while (steps.empty() || steps.back() < 11'003) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    steps.clear();
    for (const auto& event : read_events(read_file(path)))
      if (event.scalars.contains("train/loss")) steps.push_back(event.step);
  }
  EXPECT_NEAR(static_cast<double>(steps.size()), 1000 + 11'003 * 0.1, 5);
  EXPECT_EQ(steps[999], 1000);
  EXPECT_TRUE(std::ranges::binary_search(steps, 6'001));
}

// ---- Histograms ----

double total(const Histogram& histogram) {
  return std::accumulate(histogram.counts.begin(), histogram.counts.end(), 0.0);
}

TEST(Histograms, OfFewValuesAreExact) {
  EXPECT_EQ(histogram_of({}).count, 0);
  EXPECT_TRUE(histogram_of({}).counts.empty());
  const std::vector<float> same(5, -0.25f);
  const Histogram one = histogram_of(same, 2);
  EXPECT_EQ(one.count, 5);
  EXPECT_EQ(one.min, -0.5);
  EXPECT_EQ(one.max, -0.5);
  EXPECT_EQ(one.sum, -2.5);
  EXPECT_EQ(one.squares, 1.25);
  EXPECT_EQ(one.limits, std::vector<double>{-0.5});
  EXPECT_EQ(one.counts, std::vector<double>{5});
  const std::vector<float> odd = {NAN, INFINITY, 1, -INFINITY, -1, 0, -0.0f, 1e-45f};
  const Histogram five = histogram_of(odd);
  EXPECT_EQ(five.count, 5);
  EXPECT_EQ(five.left_out, 3);
  EXPECT_EQ(five.min, -1);
  EXPECT_EQ(five.max, 1);
  ASSERT_EQ(five.counts.size(), 30u);
  EXPECT_EQ(five.counts.front(), 1);
  EXPECT_EQ(five.counts.back(), 1);
  EXPECT_EQ(five.counts[14] + five.counts[15], 3);
  EXPECT_EQ(five.limits.back(), 1);
  const std::vector<float> widest = {-3.4028235e38f, 3.4028235e38f, 0};
  const Histogram all = histogram_of(widest);
  EXPECT_DOUBLE_EQ(total(all), 3);
  EXPECT_TRUE(std::isfinite(all.squares));
  const std::vector<float> close = {1.0f, std::nextafter(1.0f, 2.0f)};
  EXPECT_DOUBLE_EQ(total(histogram_of(close)), 2);
}

// Against counting in the buckets themselves, which takes a second pass: no more than what a cell at a limit spans goes
// to the neighbour.
TEST(Histograms, AreNearThoseOfTwoPasses) {
  std::mt19937 random(7);
  for (const double mean : {0.0, 3.0, -0.01}) {
    std::normal_distribution<float> normal(static_cast<float>(mean), 0.5f);
    std::vector<float> values(100'000);
    for (float& value : values) value = normal(random);
    const Histogram histogram = histogram_of(values, 0.5);
    ASSERT_EQ(histogram.counts.size(), 30u);
    EXPECT_NEAR(total(histogram), 100'000, 1e-6);
    double sum = 0, squares = 0, seen = 0;
    for (const float value : values) {
      const double half = 0.5 * static_cast<double>(value);
      sum += half;
      squares += half * half;
    }
    EXPECT_NEAR(histogram.sum, sum, 1e-6 * std::sqrt(squares * 1e5));
    EXPECT_NEAR(histogram.squares, squares, 1e-9 * squares);
    std::ranges::sort(values);
    for (std::size_t i = 0; i < 30; ++i) {
      seen += histogram.counts[i];
      const auto below = std::ranges::upper_bound(values, static_cast<float>(2 * histogram.limits[i])) - values.begin();
      EXPECT_NEAR(seen, static_cast<double>(below), 1500) << mean << " bucket " << i;
    }
  }
}

}  // namespace
}  // namespace lockstep::trainer
