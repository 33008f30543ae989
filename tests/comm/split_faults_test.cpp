// Subgroups whose ranks do not do their part, on processes that this test forks.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/forked_ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using testing::die;
using testing::on_group;
using testing::on_hosts;
using testing::on_processes;
using testing::throws;

bool works(ProcessGroup& group) {
  std::vector<std::int32_t> ones(2000, 1);
  group.all_reduce(std::span(ones));
  return ones[1999] == group.size();
}

constexpr const char* kOneHost = "aaaa";
constexpr const char* kTwoHosts = "aabb";

TEST(SplitFaults, ARankThatDoesNotSplit) {
  on_hosts({kOneHost, kTwoHosts}, {.timeout_seconds = 2}, [](ProcessGroup& group) {
    works(group);
    if (group.rank() != 2) return throws<TimeoutError>([&] { group.split(0); }, {"timed out", "waiting for rank 2 ("});
    std::this_thread::sleep_for(4s);
    return true;
  });
}

TEST(SplitFaults, ARankThatReducesInstead) {
  on_hosts({kOneHost, kTwoHosts}, {}, [](ProcessGroup& group) {
    const auto arena = group.allocate(64);
    works(group);
    return throws<OutOfStepError>(
        [&] {
          if (group.rank() == 3)
            group.all_reduce({arena.get(), 0, 7, DType::kF32}, ReduceOp::kSum).wait_host();
          else
            group.split(0);
        },
        {"out of step"});
  });
}

TEST(SplitFaults, ARankThatDies) {
  on_hosts({kOneHost, kTwoHosts}, {.doomed = 3}, [](ProcessGroup& group) {
    works(group);  // until then some may still be joining
    if (group.rank() == 3) die();
    return throws<DeviceError>([&] { group.split(group.rank() % 2); }, {"rank 3 (host ", "has ended"});
  });
}

// Somewhere in between: however far it has come, all others end, and none hangs.
TEST(SplitFaults, ARankThatDiesMeanwhile) {
  for (const auto after : {1ms, 3ms, 6ms})
    on_hosts({kOneHost, kTwoHosts}, {.doomed = 1, .timeout_seconds = 5}, [&](ProcessGroup& group) {
      works(group);
      if (group.rank() == 1)
        std::thread([&] {
          std::this_thread::sleep_for(after);
          die();
        }).detach();
      try {
        for (;;) {
          const auto part = group.split(group.rank() % 2, -group.rank());
          works(*part);
        }
      } catch (const Error&) {
        return group.rank() != 1;
      }
    });
}

// Messages name the ranks of the job.
TEST(SplitFaults, ARankOfASubgroupDies) {
  on_hosts({kOneHost, kTwoHosts}, {.doomed = 3}, [](ProcessGroup& group) {
    const auto part = group.split(group.rank() % 2);
    works(*part);
    if (group.rank() == 3) die();
    if (group.rank() == 1) {
      const std::string line = testing::thrown<DeviceError>([&] {
                                 for (;;) works(*part);
                               }).line();
      return line.find("rank 3 (host ") != line.npos && line.find("rank 1 of its subgroup) has ended") != line.npos &&
             line.find("log of rank 3") != line.npos;
    }
    // The other part has nothing to do with it.
    for (int i = 0; i < 100; ++i)
      if (!works(*part)) return false;
    part->shutdown();
    return true;
  });
}

TEST(SplitFaults, ARankOfASubgroupNeverComes) {
  on_hosts({kOneHost, kTwoHosts}, {.timeout_seconds = 2}, [](ProcessGroup& group) {
    const auto part = group.split(group.rank() < 1 ? -1 : 0, -group.rank());  // 3, 2, 1
    if (part == nullptr || group.rank() == 2) {
      std::this_thread::sleep_for(3s);
      return true;
    }
    return throws<TimeoutError>([&] { works(*part); }, {"waiting for rank 2 (host ", "rank 1 of its subgroup"});
  });
}

TEST(SplitFaults, OtherOptions) {
  on_processes({.hosts = "aaa"}, [](const World& world) {
    const auto group = make_group(world, {.timeout_seconds = 20, .backend = world.rank == 2 ? "shm" : "auto"});
    const auto split = [&] { group->split(group->rank() == 1 ? 1 : 0); };
    const bool refused = group->rank() == 0
                             ? throws<UsageError>(split, {"rank 2, in the same subgroup, with --backend shm"})
                             : throws<PeerError>(split, {"rank 0 failed: ", "--backend shm"});
    // The group is as it was, and other parts can be made.
    const auto part = group->split(group->rank());
    const bool good = refused && works(*group) && works(*part);
    group->shutdown();
    return good;
  });
}

// Ranks end what they are in in other orders, and one without a word.
TEST(SplitFaults, EndsInAnyOrder) {
  on_hosts({kOneHost, kTwoHosts, "aab", "abc", "aaabbcc"}, {}, [](ProcessGroup& group) {
    auto part = group.split(0, -group.rank());
    auto other = group.split(group.rank() % 2);
    if (!works(*part) || !works(*other)) return false;
    if (group.rank() % 2 == 0) other.reset();
    part->shutdown();
    if (group.rank() % 2 == 1 && !works(*other)) return false;
    group.shutdown();
    if (group.rank() % 2 == 1) other->shutdown();
    return true;
  });
}

TEST(SplitFaults, AfterTheEnd) {
  on_group({.hosts = "aa"}, [](ProcessGroup& group) {
    const auto part = group.split(0);
    group.shutdown();
    const bool good = works(*part);
    part->shutdown();
    return good;
  });
}

}  // namespace
}  // namespace lockstep::comm
