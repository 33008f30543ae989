#include "comm/agree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>

#include "base/error.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using testing::group;
using ::testing::HasSubstr;

int last() { return group().size() - 1; }

TEST(Divide, FindsTheDifferingRanks) {
  const auto of = [](std::vector<std::uint64_t> values) { return divide(values); };
  EXPECT_EQ(of({7}).most, std::vector<int>{0});
  EXPECT_TRUE(of({7, 7, 7}).others.empty());
  EXPECT_EQ(of({7, 8, 7, 7}).others, std::vector<int>{1});
  EXPECT_TRUE(of({7, 8, 7, 7}).has_majority());
  EXPECT_EQ(of({8, 7, 7}).most, (std::vector<int>{1, 2})) << "rank 0 may be the odd one";
  EXPECT_EQ(of({7, 8}).most, std::vector<int>{0});
  EXPECT_FALSE(of({7, 8}).has_majority());
  EXPECT_EQ(of({9, 8, 7, 8}).others, (std::vector<int>{0, 2}));
  EXPECT_FALSE(of({9, 8, 7, 8}).has_majority());
}

TEST(Divide, NamesFewRanks) {
  EXPECT_EQ(ranks_text({3}), "rank 3");
  EXPECT_EQ(ranks_text({1, 2, 5}), "ranks 1, 2, 5");
  EXPECT_EQ(ranks_text({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
}

TEST(Agree, AllWell) {
  int ran = 0;
  run_collectively(group(), [&] { ++ran; });
  EXPECT_EQ(ran, 1);
}

TEST(Agree, SameFailureIsReportedOnce) {
  const auto work = [] { throw IoError("no such file: x.idx", "check --data"); };
  if (group().rank() == 0) {
    const auto error = testing::thrown<IoError>([&] { run_collectively(group(), work); });
    EXPECT_STREQ(error.what(), "no such file: x.idx");
    EXPECT_EQ(error.remedy(), "check --data");
    return;
  }
  const auto error = testing::thrown<PeerError>([&] { run_collectively(group(), work); });
  EXPECT_EQ(error.code(), 3);
  EXPECT_THAT(error.what(), HasSubstr("rank 0"));
}

TEST(Agree, OneRankFails) {
  const auto work = [] {
    if (group().rank() == last()) throw CheckpointError("cut short");
  };
  if (group().rank() == last()) {
    EXPECT_THROW(run_collectively(group(), work), CheckpointError);
    return;
  }
  const auto error = testing::thrown<PeerError>([&] { run_collectively(group(), work); });
  EXPECT_EQ(error.code(), 6);
  EXPECT_EQ(std::string(error.what()), fmt::format("rank {} failed: cut short", last()));
}

TEST(Agree, DifferentFailuresAreAllReported) {
  EXPECT_THROW(run_collectively(group(), [] { throw IoError(fmt::format("disk of rank {}", group().rank())); }),
               IoError);
}

TEST(Agree, OtherExceptionsCountToo) {
  const auto work = [] {
    if (group().rank() == 0) throw std::runtime_error("anything");
  };
  if (group().rank() == 0) {
    EXPECT_THROW(run_collectively(group(), work), std::runtime_error);
    return;
  }
  const auto error = testing::thrown<PeerError>([&] { run_collectively(group(), work); });
  EXPECT_EQ(error.code(), 1);
}

// The code of a device or a host that has not as much memory, whoever notices.
TEST(Agree, OutOfMemoryIsNoInternalError) {
  const auto work = [] {
    if (group().rank() == last()) throw std::bad_alloc();
  };
  if (group().rank() == last()) {
    EXPECT_THROW(run_collectively(group(), work), std::bad_alloc);
    return;
  }
  const auto error = testing::thrown<PeerError>([&] { run_collectively(group(), work); });
  EXPECT_EQ(error.code(), static_cast<int>(ExitCode::kDevice));
}

TEST(LargestOfRanks, ElementByElement) {
  const double rank = group().rank();
  const std::vector<double> mine = {rank, -rank, 5.0};
  EXPECT_EQ(largest_of_ranks(group(), mine), (std::vector<double>{static_cast<double>(group().size() - 1), 0.0, 5.0}));
  EXPECT_TRUE(largest_of_ranks(group(), {}).empty());
}

TEST(LargestOfRanks, OfEquallyMany) {
  if (group().size() == 1) return;
  const std::vector<double> mine(group().rank() == last() ? 2 : 1);
  EXPECT_THROWN(OutOfStepError, "values where rank", largest_of_ranks(group(), mine));
}

TEST(Manifest, Equal) {
  EXPECT_NO_THROW(compare_manifests(group(), {{"lr", "0.1"}, {"seed", "1"}}));
  // The order does not matter.
  if (group().rank() == 0)
    EXPECT_NO_THROW(compare_manifests(group(), {{"a", "1"}, {"b", "2"}}));
  else
    EXPECT_NO_THROW(compare_manifests(group(), {{"b", "2"}, {"a", "1"}}));
}

TEST(Manifest, LowestDifferingRankReports) {
  if (group().size() == 1) {
    EXPECT_NO_THROW(compare_manifests(group(), {{"lr", "0.2"}}));
    return;
  }
  Manifest mine = {{"model", "cnn"}, {"lr", "0.1"}, {"seed", "1"}};
  if (group().rank() >= 1) mine[1].second = "0.2";
  if (group().rank() >= 1) mine.pop_back();
  try {
    compare_manifests(group(), mine);
    FAIL();
  } catch (const OutOfStepError& error) {
    EXPECT_EQ(group().rank(), 1);
    EXPECT_EQ(error.code(), 5);
    EXPECT_THAT(error.what(), HasSubstr("rank 1 (host "));
    EXPECT_THAT(error.what(), HasSubstr("has lr=0.2, no seed where rank 0 (host "));
    EXPECT_THAT(error.what(), HasSubstr("has lr=0.1, seed=1"));
    EXPECT_THAT(error.what(), Not(HasSubstr("model")));
    EXPECT_FALSE(error.remedy().empty());
  } catch (const PeerError& error) {
    EXPECT_NE(group().rank(), 1);
    EXPECT_EQ(error.code(), 5);
  }
}

TEST(Manifest, ManyDifferencesAreCounted) {
  if (group().size() == 1) {
    EXPECT_NO_THROW(compare_manifests(group(), {}));
    return;
  }
  Manifest mine;
  for (int i = 0; i < 9; ++i) mine.emplace_back(fmt::format("key{}", i), group().rank() == last() ? "x" : "y");
  const auto error = testing::thrown<Error>([&] { compare_manifests(group(), mine); });
  EXPECT_THAT(error.what(), HasSubstr("key4=x"));
  EXPECT_THAT(error.what(), Not(HasSubstr("key5=x")));
  EXPECT_THAT(error.what(), HasSubstr("4 more"));
}

}  // namespace
}  // namespace lockstep::comm
