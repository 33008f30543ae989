// Deadlines of a process that is stopped, and of one that is not.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "lockstep/base/deadline.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// In a process of its own: the clock runs to the end of one. Its exit code: whether a deadline of 1 s had expired when
// it had been stopped for `stopped`, and what it may then have waited besides.
int expired_after(std::chrono::milliseconds stopped, std::chrono::milliseconds besides, bool starts) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (starts) RunningClock::start();
    std::this_thread::sleep_for(50ms);
    const auto deadline = Deadline::after(1s);
    ::raise(SIGSTOP);
    std::this_thread::sleep_for(besides);
    ::_exit(deadline.expired() ? 1 : 0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFSTOPPED(status));
  std::this_thread::sleep_for(stopped);
  ::kill(child, SIGCONT);
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(RunningClock, AStopDoesNotCount) { EXPECT_EQ(expired_after(1600ms, 0ms, true), 0); }

TEST(RunningClock, WaitingCounts) { EXPECT_EQ(expired_after(0ms, 2500ms, true), 1); }

TEST(RunningClock, StopsCountUnlessItIsStarted) { EXPECT_EQ(expired_after(1600ms, 0ms, false), 1); }

TEST(RunningClock, NeverGoesBack) {
  RunningClock::start();
  auto last = RunningClock::now();
  for (int i = 0; i < 1000; ++i) {
    const auto now = RunningClock::now();
    EXPECT_GE(now, last);
    last = now;
    std::this_thread::sleep_for(300us);
  }
}

}  // namespace
}  // namespace lockstep
