// A group in a program that uses it wrongly.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "base/error.h"
#include "lockstep/comm/agree.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using testing::group;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

// Whose counters and sockets are its parent's.
TEST(GroupMisuse, CallsInAForkedProcess) {
  const auto part = group().duplicate();
  std::vector<float> values(8, 1);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int refused = 0;
    for (const bool sends : {false, true}) try {
        sends ? part->isend(std::span(values), 0).wait() : part->all_reduce(std::span(values));
      } catch (const UsageError& error) {
        refused += std::string(error.what()).find("in a forked process") != std::string::npos;
      }
    ::_exit(refused == 2 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  part->all_reduce(std::span(values));
  EXPECT_EQ(values, std::vector<float>(8, static_cast<float>(part->size())));
  part->shutdown();
}

TEST(GroupMisuse, CallsAfterShutdown) {
  const auto part = group().duplicate();
  const auto arena = part->allocate(64);
  const Region region{arena.get(), 0, 8, DType::kF32};
  const Work work = part->all_reduce(region, ReduceOp::kSum);
  work.wait_host();
  part->shutdown();
  std::vector<float> values(8);
  const char* const refused = "a call of a group after its shutdown() → issue all operations";
  EXPECT_REFUSED(refused, part->barrier());
  EXPECT_REFUSED(refused, part->all_reduce(region, ReduceOp::kSum));
  EXPECT_REFUSED(refused, part->all_reduce(std::span(values)));
  EXPECT_REFUSED(refused, part->isend(std::span(values), (part->rank() + 1) % part->size()));
  EXPECT_REFUSED(refused, work.done());
  EXPECT_REFUSED(refused, part->poll());
  EXPECT_REFUSED(refused, part->allocate(64));
  EXPECT_REFUSED(refused, part->split(0));
  EXPECT_REFUSED(refused, part->shutdown());
}

// Whatever moves the group's messages on, a thread of its own too.
TEST(GroupMisuse, ReceiveBufferIsReleasedAfterAThrow) {
  const auto part = group().duplicate();
  auto arena = part->allocate(4096);
  std::vector<float> values(1000, 1.0f);
  if (part->rank() == 0) {
    const Transfer transfer = part->irecv(std::span(values), 1);
    part->all_reduce({arena.get(), 0, 8, DType::kF32}, ReduceOp::kSum);
    arena.reset();  // under way
    EXPECT_REFUSED("was destroyed while", part->barrier());
    std::ranges::fill(values, 7.0f);
  }
  group().barrier().wait_host();
  if (part->rank() == 1) {
    try {
      part->isend(std::span(values), 0).wait(Deadline::after(500ms));
    } catch (const Error&) {  // rank 0 has given up
    }
  }
  group().barrier().wait_host();
  if (part->rank() == 0) {
    EXPECT_EQ(std::ranges::count(values, 7.0f), 1000);
  }
}

TEST(GroupMisuse, NonExceptionIsThrown) {
  const int last = group().size() - 1;
  try {
    run_collectively(group(), [&] {
      if (group().rank() == last) throw 42;
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const PeerError& error) {
    EXPECT_NE(group().rank(), last);
    EXPECT_THAT(error.what(), HasSubstr("the thrown object is no std::exception"));
  } catch (int thrown) {
    EXPECT_EQ(group().rank(), last);
    EXPECT_EQ(thrown, 42);
  }
}

}  // namespace
}  // namespace lockstep::comm
