// More than one group in a process, where the ranks join over TCP. Each test has processes of its own: see
// CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/store.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::unique_ptr<ProcessGroup> make() {
  GroupOptions options = testing::group_options();
  options.timeout_seconds = 10;
  return make_group(testing::world(), options);
}

void expect_that_it_sums(ProcessGroup& group) {
  const auto numbers = group.all_gather_numbers(group.rank());
  for (int rank = 0; rank < group.size(); ++rank) EXPECT_EQ(numbers[static_cast<std::size_t>(rank)], rank);
}

TEST(MoreGroups, OneAfterTheOther) {
  for (int i = 0; i < 5; ++i) {
    const auto group = make();
    expect_that_it_sums(*group);
    group->shutdown();
  }
}

// Each has a table and connections of its own, at one port.
TEST(MoreGroups, TwoAtATime) {
  auto first = make();
  auto second = make();
  expect_that_it_sums(*second);
  expect_that_it_sums(*first);
  first->shutdown();
  first.reset();
  expect_that_it_sums(*second);
  const auto third = make();
  expect_that_it_sums(*third);
  expect_that_it_sums(*second);
  third->shutdown();
  second->shutdown();
}

// The others come back to rank 0 until it opens the second group's table.
TEST(MoreGroups, RankZeroIsLate) {
  const auto first = make();
  expect_that_it_sums(*first);
  if (first->rank() == 0) std::this_thread::sleep_for(700ms);
  const auto second = make();
  expect_that_it_sums(*second);
  second->shutdown();
  first->shutdown();
}

TEST(MoreGroups, OneForEachThread) {
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int i = 0; i < 3; ++i) groups.push_back(make());
  std::vector<std::thread> threads;
  for (const auto& group : groups)
    threads.emplace_back([&group] {
      for (int round = 0; round < 100; ++round) expect_that_it_sums(*group);
      group->shutdown();
    });
  for (std::thread& thread : threads) thread.join();
}

// The last rank comes later, so the operation cannot be complete while another thread calls.
TEST(MoreGroups, TwoThreadsOfOneGroup) {
  const auto group = make(), control = make();
  const auto arena = group->allocate(4096);
  const Region region{arena.get(), 0, 8, DType::kF32};
  const auto elsewhere = [](const auto& work) {
    std::string refusal;
    std::thread([&] { refusal = testing::refusal_of(work); }).join();
    return refusal;
  };
  const bool last = group->rank() + 1 == group->size();
  for (int round = 0; round < 2; ++round) {
    if (last) control->barrier().wait_host();
    const Work work = group->all_reduce(region, ReduceOp::kSum);
    if (!last) {
      const auto refused = HasSubstr(" from another thread than the one whose operations are under way → let one");
      EXPECT_THAT(elsewhere([&] { group->all_reduce(region, ReduceOp::kMax); }), refused);
      EXPECT_THAT(elsewhere([&] { group->barrier(); }), refused);
      std::vector<float> values(4);
      EXPECT_THAT(elsewhere([&] { group->isend(std::span(values), group->size() - 1); }), refused);
      EXPECT_THAT(elsewhere([&] { group->irecv(std::span(values), group->size() - 1); }), refused);
      EXPECT_THAT(elsewhere([&] { work.wait_host(); }), refused);
      EXPECT_THAT(elsewhere([&] { work.done(); }), refused);
      EXPECT_THAT(elsewhere([&] { group->poll(); }), refused);
      EXPECT_THAT(elsewhere([&] { group->allocate(64); }), refused);
      control->barrier().wait_host();
    }
    work.wait_host();  // it is as it was
    // When all is complete, another thread may take over, and this one again.
    EXPECT_EQ(elsewhere([&] { expect_that_it_sums(*group); }), "");
    expect_that_it_sums(*group);
  }
  control->shutdown();
  group->shutdown();
}

// A group that ends without shutdown() leaves the other one as it is.
TEST(MoreGroups, OneEndsWithoutAWord) {
  auto first = make();
  const auto second = make();
  if (second->rank() == 0) first.reset();
  expect_that_it_sums(*second);
  if (second->rank() > 0) {
    EXPECT_THROW(first->store()->get("never set", Deadline::after(10s)), DeviceError);
    first.reset();
  }
  expect_that_it_sums(*second);
  second->shutdown();
}

TEST(MoreGroups, OtherSecretAtTheSamePort) {
  const auto first = make();
  World world = testing::world();
  world.rendezvous.secret = JobSecret::of_text("another job, as it seems");
  if (first->rank() == 0) {
    EXPECT_REFUSED("this process has another group at", make_group(world, testing::group_options()));
  }
  expect_that_it_sums(*first);
  first->shutdown();
}

}  // namespace
}  // namespace lockstep::comm
