// The group in shared memory on processes that this test forks, so that it can end them as it likes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

#include "base/error.h"
#include "comm/shm/segment.h"
#include "comm/shm/shm_engine.h"
#include "comm/store.h"
#include "lockstep/comm/world.h"
#include "tests/comm/forked_ranks.h"
#include "tests/support/allocations.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;
using testing::on_processes;
using testing::throws;

void on_one_host(int size, const std::function<bool(ProcessGroup&)>& body, int doomed = -1,
                 Clock::duration timeout = 20s) {
  on_processes({.hosts = std::string(static_cast<std::size_t>(size), 'a'), .doomed = doomed, .alarm_seconds = 30},
               [&](const World& world) {
                 const auto group = make_shm_group(make_tcp_store(world, Deadline::after_seconds(20)), timeout);
                 return body(*group);
               });
}

TEST(Shm, SumsOnForkedRanks) {
  on_one_host(4, [](ProcessGroup& group) {
    const auto arena = group.allocate(4 << 20);
    const Region region{arena.get(), 0, 1 << 20, DType::kI32};
    for (std::int32_t round = 1; round < 4; ++round) {
      const auto values = arena->view<std::int32_t>(0, region.count);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = round * static_cast<std::int32_t>(i % 1000);
      group.all_reduce(region, ReduceOp::kSum).wait_host();
      for (std::size_t i = 0; i < values.size(); ++i)
        if (values[i] != 4 * round * static_cast<std::int32_t>(i % 1000)) return false;
    }
    group.shutdown();
    return true;
  });
}

/// From now on process_vm_readv() fails in this process, as seccomp profiles of containers make it.
bool forbid_reading_others() {
  std::array<sock_filter, 4> rules = {{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                       BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
                                       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                                       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)}};
  const sock_fprog program = {.len = rules.size(), .filter = rules.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Of all sizes around where bytes are offered instead of written, twice, while another message is under way.
TEST(Shm, MessagesOfAllSizesWhereMemoryOfOthersMayBeReadAndWhereNot) {
  for (const bool forbidden : {false, true})
    on_one_host(2, [&](ProcessGroup& group) {
      if (forbidden && group.rank() == 1 && !forbid_reading_others()) return false;
      const int peer = 1 - group.rank();
      const auto value = [](int rank, std::size_t size, std::size_t i) {
        return static_cast<std::uint8_t>(i * 31 + size * 7 + static_cast<std::size_t>(rank));
      };
      for (const std::size_t size : {1u, 4095u, 8191u, 8192u, 8193u, 131071u, 131072u, 300001u, 4194304u, 9000001u}) {
        std::vector<std::uint8_t> mine(size), theirs(size), second(size);
        for (std::size_t i = 0; i < size; ++i) mine[i] = value(group.rank(), size, i);
        auto first_in = group.irecv(theirs.data(), size, DType::kU8, peer);
        auto first_out = group.isend(mine.data(), size, DType::kU8, peer);
        auto second_out = group.isend(mine.data(), size, DType::kU8, peer);
        auto second_in = group.irecv(second.data(), size, DType::kU8, peer);
        for (Transfer* const one : {&first_in, &first_out, &second_out, &second_in}) one->wait();
        for (std::size_t i = 0; i < size; ++i)
          if (theirs[i] != value(peer, size, i) || second[i] != theirs[i]) return false;
      }
      group.shutdown();
      return true;
    });
}

// More messages than there may be offers, small ones between them, both ways; what has been sent may be written to.
TEST(Shm, WindowsOfMessages) {
  for (const bool forbidden : {false, true})
    on_one_host(2, [&](ProcessGroup& group) {
      if (forbidden && group.rank() == 1 && !forbid_reading_others()) return false;
      constexpr std::size_t kMessages = 100;
      const int peer = 1 - group.rank();
      const auto size_of_message = [](std::size_t i) { return i % 3 == 0 ? 5 + i : 8192 * (1 + i % 4) + i; };
      for (std::uint8_t round = 0; round < 4; ++round) {
        std::vector<std::vector<std::uint8_t>> out(kMessages), in(kMessages);
        std::vector<Transfer> sends, receives;
        for (std::size_t i = 0; i < kMessages; ++i) {
          out[i].assign(size_of_message(i),
                        static_cast<std::uint8_t>(i * 7 + round + static_cast<std::size_t>(group.rank())));
          in[i].resize(size_of_message(i));
          sends.push_back(group.isend(out[i].data(), out[i].size(), DType::kU8, peer));
          receives.push_back(group.irecv(in[i].data(), in[i].size(), DType::kU8, peer));
        }
        for (std::size_t i = 0; i < kMessages; ++i) {
          sends[i].wait();
          out[i].assign(out[i].size(), 255);
        }
        for (std::size_t i = 0; i < kMessages; ++i) {
          receives[i].wait();
          const auto expected = static_cast<std::uint8_t>(i * 7 + round + static_cast<std::size_t>(peer));
          for (const std::uint8_t value : in[i])
            if (value != expected) return false;
        }
      }
      group.shutdown();
      return true;
    });
}

// A send of many bytes that nobody has received is not done: they are still read from where they are.
TEST(Shm, ASendOfManyBytesIsDoneWhenTheyHaveBeenCopied) {
  on_one_host(2, [](ProcessGroup& group) {
    std::vector<std::uint8_t> values(100'000, 1);
    for (int round = 0; round < 3; ++round) {
      if (group.rank() == 0) {
        const Transfer send = group.isend(values.data(), values.size(), DType::kU8, 1);
        for (int i = 0; i < 1000; ++i)
          if (send.done()) return false;
        group.barrier().wait_host();
        send.wait();
      } else {
        group.barrier().wait_host();
        group.irecv(values.data(), values.size(), DType::kU8, 0).wait();
      }
    }
    group.shutdown();
    return true;
  });
}

TEST(Shm, ReadingThatIsForbiddenLaterIsNamed) {
  on_one_host(2, [](ProcessGroup& group) {
    std::vector<std::uint8_t> values(100'000, 1);
    if (group.rank() == 0) {
      group.isend(values.data(), values.size(), DType::kU8, 1).wait();
      return throws<DeviceError>([&] { group.isend(values.data(), values.size(), DType::kU8, 1).wait(); },
                                 {"rank 1 (host a, pid "});
    }
    group.irecv(values.data(), values.size(), DType::kU8, 0).wait();
    return forbid_reading_others() &&
           throws<DeviceError>([&] { group.irecv(values.data(), values.size(), DType::kU8, 0).wait(); },
                               {"what another rank of this host sends cannot be read where it lies"});
  });
}

// In a small and in a large operation, awake or asleep: the death is noticed though nobody has waited for the process.
TEST(Shm, ARankThatDiesIsNamedAtOnce) {
  for (const std::size_t count : {1u, 1u << 20})
    for (const auto delay : {0ms, 300ms})
      on_one_host(
          3,
          [&](ProcessGroup& group) {
            const auto arena = group.allocate(4 << 20);
            const auto pids = group.all_gather_text(std::to_string(::getpid()));
            group.set_step(7);
            group.barrier().wait_host();
            if (group.rank() == 2) {
              std::this_thread::sleep_for(delay);
              ::kill(::getpid(), SIGKILL);
            }
            const auto begin = Clock::now();
            const bool named = throws<DeviceError>(
                [&] {
                  group.all_reduce({arena.get(), 0, count, DType::kF32}, ReduceOp::kSum).wait_host();
                },
                {"rank 2 (host ", "pid " + pids[2], "this rank waits for it in allreduce #", "step 7",
                 "the last that it issued is barrier #"});
            return named && Clock::now() - begin < 10s && throws<DeviceError>([&] { group.barrier(); }, {"rank 2"});
          },
          2);
}

// A caller that never waits notices it as well.
TEST(Shm, ARankThatDiesIsNamedToThoseWhoOnlyPoll) {
  for (const bool asks : {false, true})
    on_one_host(
        3,
        [&](ProcessGroup& group) {
          group.barrier().wait_host();
          if (group.rank() == 2) ::kill(::getpid(), SIGKILL);
          const Work work = group.barrier();
          const auto end = Deadline::after(5s);
          return throws<DeviceError>(
                     [&] {
                       while (!end.expired())
                         if (asks)
                           work.done();
                         else
                           group.poll();
                     },
                     {"rank 2 (host ", "this rank waits for it in barrier #2"}) &&
                 !end.expired();
        },
        2);
}

TEST(Shm, OperationsBeforeARanksEndCount) {
  on_one_host(2, [](ProcessGroup& group) {
    const auto arena = group.allocate(64);
    arena->view<std::int64_t>(0, 1)[0] = group.rank() + 1;
    const Region region{arena.get(), 0, 1, DType::kI64};
    if (group.rank() == 1) {
      group.all_reduce(region, ReduceOp::kSum);
      return true;
    }
    std::this_thread::sleep_for(200ms);
    group.all_reduce(region, ReduceOp::kSum).wait_host();
    return arena->view<std::int64_t>(0, 1)[0] == 3;
  });
}

TEST(Shm, TimeoutReportsTheProgressOfOthers) {
  on_one_host(
      3,
      [](ProcessGroup& group) {
        const auto arena = group.allocate(1 << 20);
        group.set_step(3);
        group.all_reduce({arena.get(), 0, 100'000, DType::kF32}, ReduceOp::kMax).wait_host();
        group.set_step(4);
        if (group.rank() == 1) {
          std::this_thread::sleep_for(1500ms);
          return true;
        }
        return throws<TimeoutError>([&] { group.barrier().wait_host(); },
                                    {"barrier #2 (step 4) timed out after ", "s waiting for rank 1 (host ",
                                     "the last that it issued is allreduce #1 (max of 100000 f32 at byte 0, step 3)"});
      },
      -1, 500ms);
}

TEST(Shm, AnAllocationThatOnlyOneRankMakes) {
  on_one_host(2, [](ProcessGroup& group) {
    if (group.rank() == 0)
      return throws<OutOfStepError>([&] { group.allocate(100); }, {"this rank is in an allocation"});
    return throws<OutOfStepError>([&] { group.barrier().wait_host(); }, {"rank 0 (host ", "is in an allocation"});
  });
}

TEST(Shm, ArenasMustBeTheSame) {
  on_one_host(2, [](ProcessGroup& group) {
    const auto a = group.allocate(100'000), b = group.allocate(100'000);
    const Region region{group.rank() == 0 ? a.get() : b.get(), 0, 25'000, DType::kF32};
    return throws<OutOfStepError>([&] { group.all_reduce(region, ReduceOp::kSum).wait_host(); },
                                  {"arena 1 of 100000 bytes", "arena 2 of 100000 bytes"});
  });
}

// Few bytes are in the slots: the root of a broadcast and those who contribute to a reduction continue until all slots
// are taken. The others find the bytes that were there, in their order.
TEST(Shm, RootsAndContributorsOfFewBytesDoNotWait) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  on_one_host(3, [&](ProcessGroup& group) {
    constexpr std::int32_t kRounds = 7;  // of two operations: fewer than there are slots
    const auto arena = group.allocate(64);
    const Region region{arena.get(), 0, 1, DType::kI32};
    std::int32_t& value = arena->view<std::int32_t>(0, 1)[0];
    group.barrier().wait_host();
    char word = 0;
    if (group.rank() == 2 && ::read(ends[0], &word, 1) != 1) return false;
    for (std::int32_t round = 0; round < kRounds; ++round) {
      if (group.rank() == 0) value = round;
      group.broadcast(region, 0).wait_host();
      if (value != round) return false;
      value = group.rank() == 2 ? 0 : value + 1;
      group.reduce(region, ReduceOp::kSum, 2).wait_host();
      if (group.rank() == 2 && value != 2 * (round + 1)) return false;
    }
    if (group.rank() == 0 && ::write(ends[1], &word, 1) != 1) return false;
    for (std::int32_t round = 0; round < 1000; ++round) {
      if (group.rank() == 1) value = 3 * round;
      group.broadcast(region, 1).wait_host();
      if (value != 3 * round) return false;
    }
    group.shutdown();
    return true;
  });
  for (const int end : ends) ::close(end);
}

// It only shows in what comes next.
TEST(Shm, ARootThatIsOutOfStepIsNamed) {
  on_one_host(3, [](ProcessGroup& group) {
    const auto arena = group.allocate(64);
    const Region region{arena.get(), 0, 1, DType::kI32};
    if (group.rank() == 1)
      return throws<OutOfStepError>([&] { group.barrier().wait_host(); },
                                    {"is in broadcast #1 (1 i32 at byte 0, from rank 0), this rank is in barrier #1"});
    return throws<OutOfStepError>(
        [&] {
          for (int i = 0; i < 1000; ++i) group.broadcast(region, 0).wait_host();
        },
        {"rank 1 (host ", "is in barrier #1, this rank is in broadcast #1"});
  });
}

TEST(Shm, ARootThatRunsAheadNamesTheRankThatHasDied) {
  on_one_host(
      3,
      [](ProcessGroup& group) {
        const auto arena = group.allocate(64);
        group.barrier().wait_host();
        if (group.rank() == 2) ::kill(::getpid(), SIGKILL);
        const auto broadcasts = [&] {
          for (int i = 0; i < 1000; ++i) group.broadcast({arena.get(), 0, 1, DType::kI32}, 0).wait_host();
        };
        return throws<DeviceError>(broadcasts, {"rank 2 (host ", "this rank waits for it in broadcast #",
                                                "the last that it issued is barrier #1"});
      },
      2);
}

// One rank gets no memory: all say so, and remain in step.
TEST(Shm, NoMemoryOnOneRank) {
  on_one_host(3, [](ProcessGroup& group) {
    bool well = false;
    if (group.rank() == 1) {
      std::size_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY}, low{pages * 4096 + (8 << 20), RLIM_INFINITY};
      ::setrlimit(RLIMIT_AS, &low);
      well = throws<DeviceError>([&] { group.allocate(8'000'000); },
                                 {"mapping 24.0 MB of shared memory: Cannot allocate memory"});
      ::setrlimit(RLIMIT_AS, &unlimited);
    } else {
      well = throws<PeerError>([&] { group.allocate(8'000'000); }, {"rank 1: mapping 24.0 MB of shared memory"});
    }
    const auto arena = group.allocate(8'000'000);
    group.broadcast({arena.get(), 0, 1'000'000, DType::kF64}, 1).wait_host();
    group.shutdown();
    return well;
  });
}

TEST(Shm, MoreThanTheMachineHas) {
  on_one_host(2, [](ProcessGroup& group) {
    const std::size_t bytes = std::size_t{1} << 50;
    if (group.rank() == 0)
      return throws<DeviceError>([&] { group.allocate(bytes); }, {"not enough memory: 2 ranks ask for ", " are free"});
    return throws<PeerError>([&] { group.allocate(bytes); }, {"rank 0: not enough memory"});
  });
}

TEST(Shm, FreeSharedMemoryIsChecked) {
  EXPECT_NO_THROW(check_shared_memory(1000, 2, 1000));
  const auto error = testing::thrown<DeviceError>([&] { check_shared_memory(64'000'001, 2, 64'000'000); });
  EXPECT_STREQ(error.what(), "not enough memory: 2 ranks ask for 64.0 MB of shared memory, 64.0 MB are free");
  EXPECT_THAT(error.remedy(), HasSubstr("--memory"));
  EXPECT_GT(available_memory_bytes(), 0u);
}

TEST(Shm, NoAllocationsInTheSteadyState) {
  on_one_host(2, [](ProcessGroup& group) {
    const auto arena = group.allocate(1 << 20);
    const auto step = [&] {
      std::array<Work, 20> works;
      for (std::size_t i = 0; i < works.size(); ++i)
        works[i] = group.all_reduce({arena.get(), i * 50'000, i % 2 == 0 ? 10u : 12'000u, DType::kF32}, ReduceOp::kSum);
      group.poll();
      for (const Work& work : works) work.wait_host();
      group.barrier().wait_host();
    };
    for (int i = 0; i < 5; ++i) step();
    const std::size_t before = testing::thread_allocations();
    for (int i = 0; i < 200; ++i) step();
    return testing::thread_allocations() == before;
  });
}

}  // namespace
}  // namespace lockstep::comm
