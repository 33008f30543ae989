// --trace: what the file holds, and what becomes of it when things go wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "tests/program/command.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using nlohmann::json;

struct Span {
  double begin, end;  // µs
  std::string name;
  std::int64_t step;
};

struct File {
  std::map<std::pair<int, int>, std::vector<Span>> rows;  // by rank and row: spans
  std::map<std::pair<int, int>, std::string> row_names;
  std::map<int, std::vector<json>> instants;  // by rank
  std::set<int> ranks;
};

File read_trace(const std::filesystem::path& path) {
  std::ifstream in(path);
  const json whole = json::parse(in);
  File file;
  for (const auto& event : whole["traceEvents"]) {
    const int rank = event["pid"], row = event["tid"];
    if (event["ph"] == "X") {
      const double begin = event["ts"], duration = event["dur"];
      file.rows[{rank, row}].push_back({begin, begin + duration, event["name"], event["args"]["step"]});
      file.ranks.insert(rank);
    }
    if (event["ph"] == "i") file.instants[rank].push_back(event);
    if (event["name"] == "thread_name") file.row_names[{rank, row}] = event["args"]["name"];
  }
  return file;
}

constexpr int kSteps = 0, kComputation = 1, kFirstBucket = 1000;
constexpr double kRounding = 0.0021;  // times are written in ns

std::vector<Span> of_step(const std::vector<Span>& spans, std::int64_t step) {
  std::vector<Span> chosen;
  std::ranges::copy_if(spans, std::back_inserter(chosen), [&](const Span& s) { return s.step == step; });
  std::ranges::sort(chosen, {}, &Span::begin);
  return chosen;
}

std::vector<std::string> names_of(const std::vector<Span>& spans) {
  std::vector<std::string> names;
  for (const auto& span : spans)
    if (span.name != "wait for bucket" && span.name != "optimizer") names.push_back(span.name);
  return names;
}

TEST(Trace, ShowsEveryStepOfEveryRankOnOneClock) {
  const TemporaryDirectory directory;
  run_well(on_ranks(3) +
               "lockstep train cnn --data digits --epochs 1 --quiet --bucket-mb 0.1 --first-bucket-mb 0.05 "
               "--trace t.json",
           directory.path());
  File file = read_trace(directory.path() / "t.json");
  ASSERT_EQ(file.ranks, (std::set<int>{0, 1, 2}));

  const std::vector<std::string> wanted = {"data",
                                           "conv1 conv2d+max_pool2d",
                                           "conv2 conv2d+max_pool2d",
                                           "flatten",
                                           "fc1 linear",
                                           "fc2 linear",
                                           "cross_entropy",
                                           "cross_entropy backward",
                                           "fc2 linear backward",  // of the weight
                                           "fc2 linear backward",  // and, after its bucket's collective, of the input
                                           "fc1 linear backward",
                                           "fc1 linear backward",
                                           "flatten backward",
                                           "conv2 conv2d+max_pool2d backward",
                                           "conv1 conv2d+max_pool2d backward"};
  for (const int rank : file.ranks) {
    EXPECT_EQ(file.row_names[std::pair(rank, 10)], "data loader 0");
    EXPECT_EQ(file.row_names[std::pair(rank, kFirstBucket + 1)], "bucket 1");
    const auto& computation = file.rows[{rank, kComputation}];
    std::size_t buckets = 0;
    while (file.rows.contains({rank, kFirstBucket + static_cast<int>(buckets)})) ++buckets;
    EXPECT_GE(buckets, 3u);
    for (std::int64_t step = 1; step <= 15; ++step) {
      const auto spans = of_step(computation, step);
      EXPECT_EQ(names_of(spans), wanted) << "rank " << rank << " step " << step;
      EXPECT_EQ(std::ranges::count(spans, "optimizer", &Span::name), static_cast<std::ptrdiff_t>(buckets));
      for (std::size_t i = 1; i < spans.size(); ++i)
        EXPECT_LE(spans[i - 1].end, spans[i].begin + kRounding) << spans[i - 1].name << " and " << spans[i].name;
    }
    EXPECT_EQ(std::ranges::count(file.rows[{rank, kSteps}], "step", &Span::name), 15);
    EXPECT_EQ(std::ranges::count(file.rows[{rank, kSteps}], "evaluate", &Span::name), 1);
    EXPECT_EQ(file.instants[rank].size(), 15 * buckets);
  }

  // One clock: no rank has finished an allreduce before the last has begun it.
  for (int bucket = kFirstBucket; file.rows.contains({0, bucket}); ++bucket) {
    for (std::int64_t step = 1; step <= 15; ++step) {
      double last_begin = 0, first_end = 1e300;
      for (const int rank : file.ranks) {
        const auto spans = of_step(file.rows[{rank, bucket}], step);
        ASSERT_EQ(spans.size(), 1u);
        last_begin = std::max(last_begin, spans[0].begin);
        first_end = std::min(first_end, spans[0].end);
      }
      EXPECT_LE(last_begin, first_end + kRounding) << "bucket " << bucket - kFirstBucket << " step " << step;
    }
  }
}

TEST(Trace, FailedRunStillHasRankZero) {
  const TemporaryDirectory directory;
  const auto outcome = run("lockstep launch -n 2 -- lockstep train mlp --data digits --lr 1e30 --quiet --trace t.json",
                           directory.path());
  EXPECT_EQ(outcome.code, 7) << outcome.err;
  const File file = read_trace(directory.path() / "t.json");
  EXPECT_EQ(file.ranks, std::set<int>{0});
}

TEST(Trace, BadPathsAreRefusedBeforeTraining) {
  const TemporaryDirectory directory;
  for (const char* path : {"/nowhere/t.json", ".", "t/", "/dev/null"}) {
    const auto outcome = run(on_ranks(2) + "lockstep train mlp --data digits --trace " + path, directory.path());
    EXPECT_TRUE(outcome.code == 2 || outcome.code == 3) << path << ": " << outcome.code;
    EXPECT_EQ(outcome.out.find("epoch"), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.err.find("→"), std::string::npos) << outcome.err;
  }
}

TEST(Trace, MustBeAskedForOnAllRanks) {
  const TemporaryDirectory directory;
  EXPECT_THAT(
      run(on_ranks(2) + "bash -c \"lockstep train mlp --data digits \\$([ \\$RANK = 1 ] && echo --trace t.json)\"",
          directory.path()),
      fails_with(5, "trace=yes"));
}

}  // namespace
}  // namespace lockstep::testing
