// Sends and receives that do not fit each other, and ranks that end, on processes that this test forks.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/signals.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/forked_ranks.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using testing::die;
using testing::on_group;
using testing::on_hosts;
using testing::Setting;
using testing::throws;

constexpr std::size_t kMuch = 3'000'000;

/// Runs `body` on a group of forked ranks, which the caller moves on, and on one with a thread where there is one.
/// On each of `all_hosts`.
void on_groups(const std::vector<std::string>& all_hosts, Setting setting, const testing::GroupBody& body) {
  for (const std::string& hosts : all_hosts) {
    setting.hosts = hosts;
    on_group(setting, body, GroupOptions::Progress::kInline);
    if (hosts != std::string(hosts.size(), hosts[0])) on_group(setting, body, GroupOptions::Progress::kThread);
  }
}

/// Its peers may have ended before.
void end_of(ProcessGroup& group) {
  try {
    group.shutdown();
  } catch (const Error&) {
  }
}

TEST(PairFaults, AnotherSizeOrType) {
  on_groups({"aa", "ab"}, {}, [](ProcessGroup& group) {
    std::vector<float> values(8);
    const std::span<float> few = std::span(values).first(4);
    if (group.rank() == 1) {
      group.send(few, 0);
      group.send(std::span(values), 0);
      // It hears of the failure, or of the end of the one that has failed.
      return throws<Error>([&] { group.barrier().wait_host(); }, {});
    }
    group.recv(few, 1);
    const bool well = throws<OutOfStepError>(
        [&] { group.recv(few, 1); },
        {"rank 1 (host ", "is in send #2 to this rank (8 f32)", "this rank is in receive #2 from rank 1", "(4 f32)"});
    return well && throws<OutOfStepError>([&] { group.barrier(); }, {"receive #2"});
  });
}

TEST(PairFaults, ASendWhereTheOtherRankIsInAnAllToAll) {
  on_groups({"aa"}, {}, [](ProcessGroup& group) {
    std::vector<float> values(8), theirs(8);
    // Its peer ends.
    if (group.rank() == 1) return throws<Error>([&] { group.all_to_all(std::span(values), std::span(theirs)); }, {});
    return throws<OutOfStepError>([&] { group.recv(std::span(values).first(4), 1); },
                                  {"its part of all-to-all #1 for this rank (4 f32)", "receive #1 from rank 1"});
  });
}

TEST(PairFaults, ARankThatDoesNotSend) {
  on_groups({"aaa", "aba"}, {.timeout_seconds = 0.8}, [](ProcessGroup& group) {
    std::vector<double> values(kMuch);
    if (group.rank() == 0) {
      // Not the other two, who are not asked for anything.
      return throws<TimeoutError>(
          [&] { group.recv(std::span(values), 1); },
          {"receive #1 from rank 1 (host ", "(3000000 f64) timed out after ", "waiting for rank 1 (host "}, "rank 2");
    }
    std::this_thread::sleep_for(1600ms);
    return true;
  });
}

TEST(PairFaults, ARankThatDoesNotReceive) {
  on_groups({"aa", "ab"}, {.timeout_seconds = 0.8}, [](ProcessGroup& group) {
    const std::vector<double> values(kMuch);
    if (group.rank() == 0)
      return throws<TimeoutError>([&] { group.send(std::span(values), 1); },
                                  {"send #1 to rank 1 (host ", "timed out after ", "waiting for rank 1 (host "});
    std::this_thread::sleep_for(1600ms);
    return true;
  });
}

TEST(PairFaults, ARankThatDies) {
  for (const bool sends : {false, true})
    on_groups({"aa", "ab"}, {.doomed = 1}, [sends](ProcessGroup& group) {
      std::vector<float> values(kMuch);
      if (group.rank() == 1) {
        std::this_thread::sleep_for(300ms);
        die();
      }
      const auto work = [&] {
        if (sends)
          group.send(std::span(values), 1);
        else
          group.recv(std::span(values), 1);
      };
      return throws<DeviceError>(work, {"rank 1 (host ", "has ended", sends ? "send #1" : "receive #1"});
    });
}

// What has come is not taken for all.
TEST(PairFaults, ARankThatDiesAmidASend) {
  const auto body = [](ProcessGroup& group) {
    std::vector<float> values(kMuch);
    if (group.rank() == 1) {
      const Transfer transfer = group.isend(std::span(values), 0);
      std::this_thread::sleep_for(300ms);
      if (transfer.done()) return false;
      die();
    }
    return throws<DeviceError>([&] { group.recv(std::span(values), 1); }, {"rank 1 (host ", "has ended", "receive #1"});
  };
  on_hosts({"aa", "ab"}, {.doomed = 1}, body, GroupOptions::Progress::kInline);
}

// A send notices it by itself: nothing is received from that rank, and no channel leads to it.
TEST(PairFaults, AReceiverThatDiesOnAnotherChannel) {
  on_groups({"aabb"}, {.doomed = 3}, [](ProcessGroup& group) {
    std::vector<float> values(5 * kMuch);  // more than the kernels take
    const std::span<float> few = std::span(values).first(4);
    if (group.rank() == 3) {
      group.send(few, 0);
      std::this_thread::sleep_for(300ms);
      die();
    }
    if (group.rank() > 0) return true;
    group.recv(few, 3);
    return throws<DeviceError>([&] { group.send(std::span(values), 3); }, {"rank 3 (host b)", "has ended", "send #1"});
  });
}

// What a rank says before it ends comes first: on the connection of the channel, though no operation is under way.
TEST(PairFaults, AFailureThatARankAnnouncesBeforeItEnds) {
  on_groups({"ab", "aab"}, {}, [](ProcessGroup& group) {
    const int last = group.size() - 1;
    std::vector<float> values(8);
    if (group.rank() == last)
      return throws<OutOfStepError>([&] { group.recv(std::span(values), last - 1); }, {"send #1 to this rank (4 f32)"});
    if (group.rank() == last - 1) group.send(std::span(values).first(4), last);
    const auto waits = [&] { group.recv(std::span(values), group.rank() == 0 ? 1 : last); };
    return throws<OutOfStepError>(waits, {fmt::format("rank {} (host b) is out of step", last), "send #1"});
  });
}

// What nobody receives yet is read once, and lets those who wait for something else sleep.
TEST(PairFaults, UnreceivedMessageDoesNotKeepWaitersBusy) {
  on_groups({"abc"}, {}, [](ProcessGroup& group) {
    std::vector<float> values(kMuch);
    const std::span<float> few = std::span(values).first(4);
    if (group.rank() == 0) {
      group.recv(few, 1);
      const auto cpu_seconds = [] {
        rusage used;
        ::getrusage(RUSAGE_SELF, &used);
        return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
               1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
      };
      const double before = cpu_seconds();
      group.recv(few, 2);
      const double used = cpu_seconds() - before;
      group.recv(std::span(values), 1);
      group.barrier().wait_host();
      if (used > 0.5) std::fprintf(stderr, "%.3f s of the CPU in a wait\n", used);
      return used <= 0.5;
    }
    if (group.rank() == 1) {
      group.send(few, 0);
      group.send(std::span(values), 0);
    } else {
      std::this_thread::sleep_for(1500ms);
      group.send(few, 0);
    }
    group.barrier().wait_host();
    return true;
  });
}

// What is sent and never received is lost: the receiver says so at the end.
TEST(PairFaults, ASendThatIsNotReceived) {
  on_groups({"aa", "ab"}, {.timeout_seconds = 5}, [](ProcessGroup& group) {
    const std::vector<float> values(4);
    if (group.rank() == 1) {
      std::vector<float> mine(4);
      group.recv(std::span(mine), 0);
      return throws<OutOfStepError>([&] { group.shutdown(); },
                                    {"rank 0 (host ", "has issued send #2 to this rank (4 f32)", "without receiving"});
    }
    group.send(std::span(values), 1);
    group.send(std::span(values), 1);
    end_of(group);
    return true;
  });
}

// The call of rank 1 is taken while rank 0 waits for that of rank 2.
TEST(PairFaults, SendThatIsNotReceivedByAnIdleRank) {
  on_groups({"abc"}, {.timeout_seconds = 5}, [](ProcessGroup& group) {
    std::vector<float> values(4);
    const std::span<float> all(values);
    if (group.rank() == 0) {
      group.recv(all, 2);
      return throws<OutOfStepError>([&] { group.shutdown(); },
                                    {"rank 1 (host b) has issued send #1 to this rank (4 f32)", "without receiving"});
    }
    if (group.rank() == 1) group.send(all, 0);
    if (group.rank() == 1) group.send(all, 2);
    if (group.rank() == 2) group.recv(all, 1);
    if (group.rank() == 2) group.send(all, 0);
    end_of(group);
    return true;
  });
}

// A rank that looks at its callers now and then only takes their calls all the same.
TEST(PairFaults, ARankThatSeldomAnswers) {
  on_group(
      {.hosts = "ab"},
      [](ProcessGroup& group) {
        std::vector<float> values(4);
        if (group.rank() == 1) {
          group.send(std::span(values), 0);
        } else {
          std::this_thread::sleep_for(200ms);
          const Transfer transfer = group.irecv(std::span(values), 1);
          for (int i = 0; i < 5 && !transfer.done(); ++i) std::this_thread::sleep_for(2100ms);
          if (!transfer.done()) return false;
        }
        group.shutdown();
        return true;
      },
      GroupOptions::Progress::kInline);
}

TEST(PairFaults, ATransferThatNobodyHasWaitedFor) {
  on_groups({"aa"}, {.timeout_seconds = 5}, [](ProcessGroup& group) {
    group.barrier().wait_host();  // rank 0 ends at once: not during rank 1's rendezvous
    std::vector<float> values(4);
    if (group.rank() == 1) return throws<Error>([&] { group.shutdown(); }, {});
    const Transfer transfer = group.irecv(std::span(values), 1);
    return throws<UsageError>([&] { group.shutdown(); }, {"receive #1 from rank 1 (4 f32) is not done"});
  });
}

// Who has been asked to stop frees what it was receiving into: nobody writes there afterwards.
TEST(PairFaults, AStopWhileReceiving) {
  on_groups({"ab"}, {}, [](ProcessGroup& group) {
    group.barrier().wait_host();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(300ms);
      const std::vector<float> values(kMuch);
      return throws<Error>([&] { group.send(std::span(values), 0); }, {});
    }
    watch_for_stops();
    void* const memory =
        ::mmap(nullptr, kMuch * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const Transfer transfer = group.irecv(std::span(static_cast<float*>(memory), kMuch), 1);
    ::kill(::getpid(), SIGTERM);
    const bool well = throws<InterruptedError>([&] { transfer.wait(); }, {"SIGTERM"});
    ::mprotect(memory, kMuch * sizeof(float), PROT_NONE);
    std::this_thread::sleep_for(1s);
    return well;
  });
}

}  // namespace
}  // namespace lockstep::comm
