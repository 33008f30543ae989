// What ranks say while they wait for one of them: who it is, and nothing of anybody else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <span>
#include <thread>

#include "base/error.h"
#include "base/text.h"
#include "comm/stall.h"
#include "lockstep/comm/process_group.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

enum class Late { kBeforeIssuing, kAfterIssuing };

/// Lines that hold "has waited", of all ranks, after `be_late` has kept the last rank from an operation, or in it.
template <class Action>
std::vector<std::string> lines_of_all(Late when, Action&& be_late) {
  ProcessGroup& group = testing::group();
  const auto arena = group.allocate(4 << 20);
  const Region region{arena.get(), 0, 1 << 20, DType::kI32};
  group.barrier().wait_host();
  const auto before = stall_warning();
  set_stall_warning(500ms);
  ::testing::internal::CaptureStderr();
  const bool late = group.rank() + 1 == group.size();
  // What it issues first cannot be complete before it stops.
  if (!late && when == Late::kAfterIssuing) std::this_thread::sleep_for(1s);
  if (late && when == Late::kBeforeIssuing) be_late();
  const Work work = group.all_reduce(region, ReduceOp::kSum);
  if (late && when == Late::kAfterIssuing) be_late();
  work.wait_host();
  const std::string said = ::testing::internal::GetCapturedStderr();
  set_stall_warning(before);
  std::vector<std::string> lines;
  for (const std::string& text : group.all_gather_text(said))
    for (std::size_t at = 0, end = 0; at < text.size(); at = end + 1) {
      end = std::min(text.find('\n', at), text.size());
      if (text.substr(at, end - at).find("has waited") != std::string::npos) lines.push_back(text.substr(at, end - at));
    }
  return lines;
}

/// That rank alone is named, by one rank of each host that waits, ever more rarely.
void expect_the_last_one_named(const std::vector<std::string>& lines, const char* operation) {
  const int last = testing::group().size() - 1;
  // After 0.5, 1, 2 and 4 seconds, on each host.
  EXPECT_GE(lines.size(), 1u);
  EXPECT_LE(lines.size(), 4u * static_cast<std::size_t>(last));
  for (const std::string& line : lines) {
    const auto said = line.substr(line.find("] ") + 2);
    EXPECT_THAT(said, ::testing::AllOf(::testing::HasSubstr(operation),
                                       ::testing::HasSubstr(fmt::format(" s for rank {} (host ", last))));
    for (int other = 0; other < last; ++other)
      EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr(fmt::format("rank {} ", other))));
  }
}

void be_stopped() {
  const std::string wake = fmt::format("(sleep 5; kill -CONT {}) >/dev/null 2>&1 &", ::getpid());
  ASSERT_EQ(std::system(wake.c_str()), 0);
  std::raise(SIGSTOP);
}

TEST(Stalls, ALateRankIsNamed) {
  const auto lines = lines_of_all(Late::kBeforeIssuing, [] { std::this_thread::sleep_for(5s); });
  expect_the_last_one_named(lines, "allreduce #");
}

TEST(Stalls, AStoppedRankIsNamedAndSaysNothingItself) {
  expect_the_last_one_named(lines_of_all(Late::kBeforeIssuing, be_stopped), "allreduce #");
}

// What it has begun stands still with it.
TEST(Stalls, ARankThatIsStoppedInAnOperationIsNamed) {
  expect_the_last_one_named(lines_of_all(Late::kAfterIssuing, be_stopped), "allreduce #");
}

// Of two transfers that stand still, the one that is waited for; and none before anybody waits.
TEST(Stalls, TheTransferThatIsWaitedForIsNamed) {
  ProcessGroup& group = testing::group();
  if (group.size() < 3) GTEST_SKIP() << "rank 0 receives from two";
  group.barrier().wait_host();
  std::vector<float> values(4), others(4);
  if (group.rank() > 0) {
    if (group.rank() < 3) {
      std::this_thread::sleep_for(3s);
      group.send(std::span(values), 0);
    }
  } else {
    const auto before = stall_warning();
    set_stall_warning(500ms);
    ::testing::internal::CaptureStderr();
    const Transfer other = group.irecv(std::span(others), 1), awaited = group.irecv(std::span(values), 2);
    for (const auto end = Clock::now() + 1200ms; Clock::now() < end; std::this_thread::sleep_for(10ms)) group.poll();
    const std::string said_before = ::testing::internal::GetCapturedStderr();
    ::testing::internal::CaptureStderr();
    awaited.wait();
    const std::string said = ::testing::internal::GetCapturedStderr();
    set_stall_warning(before);
    other.wait();
    EXPECT_THAT(said_before, ::testing::Not(::testing::HasSubstr("has waited")));
    EXPECT_THAT(said, ::testing::ContainsRegex("receive #1 from rank 2 .*has waited .* s for rank 2 "));
    EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("from rank 1")));
  }
  group.barrier().wait_host();
}

}  // namespace
}  // namespace lockstep::comm
