// Subgroups, on every kind of group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using testing::group;
using ::testing::HasSubstr;

int rank() { return group().rank(); }
int size() { return group().size(); }

/// Where a thread of the group calls MPI, no other may: its parts have no MPI.
bool has_parts() {
  return !(group().name() == "mpi" && testing::group_options().progress == GroupOptions::Progress::kThread);
}
#define SKIP_WITHOUT_PARTS() \
  if (!has_parts()) GTEST_SKIP() << "a group whose own thread calls MPI is not divided"

/// Sums, in the slots and in place, and objects of all of its ranks; they are `ranks` of the test's group.
void expect_that_it_works(ProcessGroup& part, const std::vector<int>& ranks) {
  ASSERT_EQ(part.size(), static_cast<int>(ranks.size()));
  for (int r = 0; r < part.size(); ++r) EXPECT_EQ(part.job_rank(r), ranks[static_cast<std::size_t>(r)]);
  ASSERT_EQ(ranks[static_cast<std::size_t>(part.rank())], rank());
  const auto sum = std::accumulate(ranks.begin(), ranks.end(), 0);
  for (const std::size_t count : {3u, 100'000u}) {
    std::vector<std::int32_t> values(count, rank());
    part.all_reduce(std::span(values));
    EXPECT_EQ(std::ranges::count(values, sum), static_cast<std::ptrdiff_t>(count));
  }
  const auto arena = part.allocate(4096);
  const auto bytes = arena->view<std::uint8_t>(0, 4096);
  std::ranges::fill(bytes, static_cast<std::uint8_t>(rank() + 1));
  part.broadcast({arena.get(), 0, bytes.size(), DType::kU8}, part.size() - 1).wait_host();
  EXPECT_EQ(std::ranges::count(bytes, ranks.back() + 1), 4096);
  const auto numbers = part.all_gather_numbers(rank());
  EXPECT_TRUE(std::ranges::equal(numbers, ranks));
}

std::vector<int> every_second_from(int first) {
  std::vector<int> ranks;
  for (int r = first; r < size(); r += 2) ranks.push_back(r);
  return ranks;
}

std::vector<int> all_ranks() {
  std::vector<int> ranks(static_cast<std::size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

TEST(Split, ByColor) {
  SKIP_WITHOUT_PARTS();
  const auto part = group().split(rank() % 2);
  ASSERT_NE(part, nullptr);
  expect_that_it_works(*part, every_second_from(rank() % 2));
  expect_that_it_works(group(), all_ranks());
  expect_that_it_works(*part, every_second_from(rank() % 2));
  part->shutdown();
}

TEST(Split, ByKey) {
  SKIP_WITHOUT_PARTS();
  const auto part = group().split(7, -rank());
  auto ranks = all_ranks();
  std::ranges::reverse(ranks);
  expect_that_it_works(*part, ranks);
  part->shutdown();
}

TEST(Split, SomeRanksAreInNoGroup) {
  SKIP_WITHOUT_PARTS();
  const bool in = rank() > 0;
  const auto part = group().split(in ? 0 : -1);
  EXPECT_EQ(part != nullptr, in);
  if (in) {
    auto ranks = all_ranks();
    ranks.erase(ranks.begin());
    expect_that_it_works(*part, ranks);
    part->shutdown();
  }
  EXPECT_EQ(group().split(-1), nullptr);
}

TEST(Split, EachAlone) {
  const auto part = group().split(rank());
  EXPECT_EQ(part->name(), "self");
  expect_that_it_works(*part, {rank()});
  const auto again = part->split(0);
  expect_that_it_works(*again, {rank()});
  EXPECT_EQ(part->split(-1), nullptr);
  part->shutdown();
}

TEST(Split, SubgroupOfASubgroup) {
  SKIP_WITHOUT_PARTS();
  auto part = group().split(rank() == 0 ? 1 : 0, -rank());
  auto smaller = part->split(part->rank() % 2);
  std::vector<int> ranks;
  for (int r = part->rank() % 2; r < part->size(); r += 2) ranks.push_back(part->job_rank(r));
  expect_that_it_works(*smaller, ranks);
  // The first one goes first, on all ranks.
  part->shutdown();
  part.reset();
  expect_that_it_works(*smaller, ranks);
  smaller->shutdown();
}

TEST(Split, TheSameRanksOnceMore) {
  SKIP_WITHOUT_PARTS();
  const auto copy = group().duplicate();
  EXPECT_EQ(copy->name(), group().name());
  EXPECT_EQ(copy->encrypts(), group().encrypts());
  expect_that_it_works(*copy, all_ranks());
  // Operations of both under way at once.
  const auto ours = copy->allocate(1 << 20), theirs = group().allocate(1 << 20);
  std::ranges::fill(ours->view<float>(0, 1000), 1.f);
  std::ranges::fill(theirs->view<float>(0, 1000), 2.f);
  const Work one = copy->all_reduce({ours.get(), 0, 1000, DType::kF32}, ReduceOp::kSum);
  const Work other = group().all_reduce({theirs.get(), 0, 1000, DType::kF32}, ReduceOp::kSum);
  one.wait_host();
  other.wait_host();
  EXPECT_EQ(ours->view<float>(0, 1000)[999], static_cast<float>(size()));
  EXPECT_EQ(theirs->view<float>(0, 1000)[999], static_cast<float>(2 * size()));
  EXPECT_REFUSED("is not this group's", copy->all_reduce({theirs.get(), 0, 1, DType::kF32}, ReduceOp::kSum));
  copy->shutdown();
}

TEST(Split, ManyAtATime) {
  SKIP_WITHOUT_PARTS();
  std::vector<std::unique_ptr<ProcessGroup>> parts;
  for (int i = 0; i < 5; ++i) parts.push_back(group().split((rank() + i) % 2));
  for (const auto& part : parts) expect_that_it_works(*part, every_second_from(rank() % 2));
  // The middle one first; each rank is in one part of each split.
  for (const std::size_t i : {2u, 4u, 0u, 1u, 3u}) parts[i]->shutdown();
}

TEST(Split, AThreadThatCallsMpi) {
  if (has_parts() || size() == 1) GTEST_SKIP() << "of groups whose own thread calls MPI";
  try {
    group().split(0);
    FAIL() << "it was split";
  } catch (const UsageError& error) {
    EXPECT_EQ(rank(), 0);
    EXPECT_THAT(error.line(), HasSubstr("has no MPI for this thread"));
  } catch (const PeerError& error) {
    EXPECT_GT(rank(), 0);
    EXPECT_EQ(error.code(), static_cast<int>(ExitCode::kUsage));
  }
  expect_that_it_works(group(), all_ranks());
}

TEST(Split, RanksInTheJob) {
  EXPECT_EQ(group().job_rank(size() - 1), size() - 1);
  EXPECT_REFUSED("of a group of", static_cast<void>(group().job_rank(size())));
  EXPECT_REFUSED("rank -1", static_cast<void>(group().job_rank(-1)));
}

}  // namespace
}  // namespace lockstep::comm
