#include "nn/ops/cpu/spread_threads.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <string>

namespace lockstep::nn::cpu {
namespace {

using Moves = std::vector<int>;

Moves moves_apart(const Moves& on, const std::vector<std::vector<int>>& allowed) {
  Moves moves(on.size(), 7);
  cpu::moves_apart(on, allowed, moves);
  return moves;
}

const std::vector<int> kFour = {0, 1, 2, 3};

TEST(MovesApart, ThreadsOnProcessorsOfTheirOwnStay) {
  EXPECT_EQ(moves_apart(Moves{2, 0, 3}, std::vector{kFour, kFour, kFour}), (Moves{-1, -1, -1}));
  EXPECT_EQ(moves_apart(Moves{1}, std::vector<std::vector<int>>{kFour}), (Moves{-1}));
  EXPECT_EQ(moves_apart(Moves{}, {}), Moves{});
}

TEST(MovesApart, OthersTakeWhatIsFree) {
  EXPECT_EQ(moves_apart(Moves{1, 1}, std::vector{kFour, kFour}), (Moves{-1, 0}));
  EXPECT_EQ(moves_apart(Moves{0, 0, 0, 0}, std::vector{kFour, kFour, kFour, kFour}), (Moves{-1, 1, 2, 3}));
  // One that comes later in the list has its processor all the same.
  EXPECT_EQ(moves_apart(Moves{0, 0, 1}, std::vector{kFour, kFour, kFour}), (Moves{-1, 2, -1}));
}

TEST(MovesApart, NobodyLeavesItsAffinity) {
  EXPECT_EQ(moves_apart(Moves{0, 0}, std::vector{kFour, {0}}), (Moves{-1, -1}));
  EXPECT_EQ(moves_apart(Moves{0, 0, 0}, std::vector<std::vector<int>>{{0, 1}, {0, 1}, {0, 1}}), (Moves{-1, 1, -1}));
}

std::vector<pid_t> threads_of_this_process() {
  std::vector<pid_t> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    threads.push_back(std::stoi(entry.path().filename().string()));
  return threads;
}

cpu_set_t affinity(pid_t thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(::sched_getaffinity(thread, sizeof set, &set), 0);
  return set;
}

TEST(ThreadSpreader, TakesThreadsApartAndBindsNone) {
  const cpu_set_t before = affinity(0);
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "one processor";
  // Says that all run on one, where Linux may have taken them apart.
  static int here;
  here = ::sched_getcpu();
  EXPECT_EQ(ThreadSpreader(2, [] { return here; }).spread(), 1);
  ASSERT_GE(threads_of_this_process().size(), 2u);
  for (const pid_t thread : threads_of_this_process()) {
    const cpu_set_t now = affinity(thread);
    EXPECT_TRUE(CPU_EQUAL(&now, &before));
  }
}

}  // namespace
}  // namespace lockstep::nn::cpu
