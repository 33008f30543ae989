// The group on several hosts that are one machine, on processes that this test forks, so that it can end them as it
// likes.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <thread>

#include "base/error.h"
#include "comm/hosts/peer_connector.h"
#include "comm/store.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/world.h"
#include "tests/comm/forked_ranks.h"
#include "tests/support/allocations.h"
#include "tests/support/free_port.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using testing::on_processes;
using testing::Setting;
using testing::throws;

void on_ranks(const Setting& setting, const std::function<bool(ProcessGroup&)>& body) {
  on_processes(setting, [&](const World& world) {
    GroupOptions options;
    options.timeout_seconds = setting.timeout_seconds;
    options.progress = GroupOptions::Progress::kInline;
    const auto group = make_group(world, options);
    return group->name() == "hosts" && body(*group);
  });
}

TEST(Hosts, SumsOnForkedRanks) {
  for (const char* hosts : {"ab", "aab", "abab", "abc"})
    on_ranks({hosts}, [](ProcessGroup& group) {
      const auto arena = group.allocate(4 << 20);
      const Region region{arena.get(), 0, 1 << 20, DType::kI32};
      for (std::int32_t round = 1; round < 4; ++round) {
        const auto values = arena->view<std::int32_t>(0, region.count);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = round * static_cast<std::int32_t>(i % 1000);
        group.all_reduce(region, ReduceOp::kSum).wait_host();
        for (std::size_t i = 0; i < values.size(); ++i)
          if (values[i] != group.size() * round * static_cast<std::int32_t>(i % 1000)) return false;
      }
      group.shutdown();
      return true;
    });
}

// One that is connected to other hosts, and one that is not; in a small and in a large operation, awake or asleep.
// Ranks that drive a channel, by the rank at the other end.
TEST(Hosts, TransfersAreTimed) {
  for (const char* hosts : {"ab", "abc"})
    on_ranks({hosts}, [](ProcessGroup& group) {
      const auto arena = group.allocate(8 << 20);
      for (int i = 0; i < 5; ++i) group.all_reduce({arena.get(), 0, 1 << 21, DType::kF32}, ReduceOp::kSum).wait_host();
      const auto times = group.sending_times();
      bool right = static_cast<int>(times.size()) == group.size() - 1;
      for (const auto& [rank, time] : times)
        right = right && rank != group.rank() && rank < group.size() && time > Clock::duration::zero();
      group.shutdown();
      return right;
    });
}

// Long before an operation times out, after 20 s.
TEST(Hosts, ARankThatDiesIsNamedToAllAtOnce) {
  for (const int doomed : {0, 1, 2})
    for (const std::size_t count : {1u, 1u << 20})
      on_ranks({"aab", doomed}, [&](ProcessGroup& group) {
        const auto arena = group.allocate(4 << 20);
        const auto pids = group.all_gather_text(std::to_string(::getpid()));
        group.set_step(7);
        group.barrier().wait_host();
        const auto delay = count == 1 ? 0ms : 300ms;
        if (group.rank() == doomed) {
          std::this_thread::sleep_for(delay);
          ::kill(::getpid(), SIGKILL);
        }
        const auto begin = Clock::now();
        const std::string named = fmt::format("rank {} (host {}, pid {}) has ended", doomed, doomed < 2 ? "a" : "b",
                                              pids[static_cast<std::size_t>(doomed)]);
        return throws<DeviceError>(
                   [&] {
                     group.all_reduce({arena.get(), 0, count, DType::kF32}, ReduceOp::kSum).wait_host();
                   },
                   {named, "this rank waits for it in allreduce #", "step 7"}) &&
               Clock::now() - begin < 10s && throws<DeviceError>([&] { group.barrier(); }, {named});
      });
}

TEST(Hosts, DeadRankIsNamedToThoseWhoWaitElsewhere) {
  on_ranks({"ab", 1}, [](ProcessGroup& group) {
    group.barrier().wait_host();
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    const auto end = Deadline::after(5s);
    return throws<DeviceError>(
        [&] {
          while (!end.expired()) group.watch_peers();
        },
        {"rank 1 (host b, pid"});
  });
}

// The one who is late is named to all, and nobody else is: also where it is the other end's neighbour who is late.
TEST(Hosts, ATimeoutNamesWhoeverIsLate) {
  for (const int late : {1, 3, 4})
    on_ranks({"aabbc", -1, 2.4}, [&](ProcessGroup& group) {
      const auto arena = group.allocate(1 << 20);
      group.barrier().wait_host();
      group.set_step(4);
      if (group.rank() == late) {
        std::this_thread::sleep_for(4s);
        return true;
      }
      const std::string text = fmt::format("waiting for rank {} (host {})", late,
                                           late == 1   ? "a"
                                           : late == 3 ? "b"
                                                       : "c");
      return throws<TimeoutError>(
          [&] {
            group.all_reduce({arena.get(), 0, 100'000, DType::kF32}, ReduceOp::kMax).wait_host();
          },
          {"allreduce #2 (max of 100000 f32 at byte 0, step 4) timed out after ", text}, "; rank");
    });
}

TEST(Hosts, AnAllocationThatOnlyOneRankMakes) {
  for (const char* hosts : {"ab", "aab"})
    on_ranks({hosts}, [](ProcessGroup& group) {
      if (group.rank() == 0) return throws<OutOfStepError>([&] { group.allocate(100); }, {"an allocation"});
      return throws<OutOfStepError>([&] { group.barrier().wait_host(); }, {"rank 0 (host a)", "an allocation"});
    });
}

// One rank gets no memory: all say so, and remain in step.
TEST(Hosts, NoMemoryOnOneRank) {
  on_ranks({"aab"}, [](ProcessGroup& group) {
    bool well = false;
    if (group.rank() == 1) {
      std::size_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY}, low{pages * 4096 + (8 << 20), RLIM_INFINITY};
      ::setrlimit(RLIMIT_AS, &low);
      well = throws<DeviceError>([&] { group.allocate(8'000'000); },
                                 {"mapping 16.0 MB of shared memory: Cannot allocate memory"});
      ::setrlimit(RLIMIT_AS, &unlimited);
    } else {
      well = throws<PeerError>([&] { group.allocate(8'000'000); }, {"rank 1: mapping 16.0 MB of shared memory"});
    }
    const auto arena = group.allocate(8'000'000);
    group.broadcast({arena.get(), 0, 1'000'000, DType::kF64}, 1).wait_host();
    group.shutdown();
    return well;
  });
}

// Far more than a rank remembers of operations that it has not come to, and than sockets hold.
TEST(Hosts, ARootMayBeFarAhead) {
  on_ranks({"aab"}, [](ProcessGroup& group) {
    constexpr std::size_t kOps = 60, kCount = 50'000;
    const auto arena = group.allocate(kOps * kCount * sizeof(std::int32_t));
    group.barrier().wait_host();
    if (group.rank() > 0) std::this_thread::sleep_for(500ms);
    std::vector<Work> works;
    for (std::size_t i = 0; i < kOps; ++i) {
      const Region region{arena.get(), i * kCount * sizeof(std::int32_t), kCount, DType::kI32};
      for (auto& value : arena->view<std::int32_t>(region.offset_bytes, kCount))
        value = group.rank() == 0 ? static_cast<std::int32_t>(i) : -1;
      works.push_back(group.broadcast(region, 0));
    }
    for (const Work& work : works) work.wait_host();
    for (std::size_t i = 0; i < kOps; ++i)
      for (const auto value : arena->view<std::int32_t>(i * kCount * sizeof(std::int32_t), kCount))
        if (value != static_cast<std::int32_t>(i)) return false;
    group.shutdown();
    return true;
  });
}

TEST(Hosts, NoAllocationsInTheSteadyState) {
  on_ranks({"aab"}, [](ProcessGroup& group) {
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

/// Connects to `address`, says `words`; whether the connection is closed without an answer.
bool is_rejected(const ListenAddress& address, const std::string& words) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(address.port));
  ::inet_pton(AF_INET, address.host.c_str(), &to.sin_addr);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) return false;
  if (::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL) < 0) return false;
  char answer = 0;
  return ::recv(socket.get(), &answer, 1, 0) <= 0;
}

TEST(PeerConnector, StrangersAndOtherJobsAreRejected) {
  on_processes({"ab"}, [](const World& world) {
    const auto store = make_tcp_store(world, Deadline::after(20s));
    const Peers peers(*store, Deadline::after(20s));
    PeerConnector connector(world.rank, 20s);
    const auto where = connector.listen(usable_addresses(env, "127.0.0.1")).at(0);
    const auto addresses =
        store->all_gather_text("addresses", fmt::format("{} {}", where.host, where.port), Deadline::after(20s));
    ListenAddress other;
    std::istringstream(addresses[static_cast<std::size_t>(1 - world.rank)]) >> other.host >> other.port;
    connector.expect(peers, 1 - world.rank, {other});
    bool well = true;
    if (world.rank == 1) {
      PeerConnector of_another_job(world.rank, 20s);
      of_another_job.expect(peers, 0, {other});
      well = is_rejected(other, "GET / HTTP/1.0\r\n\r\n") && is_rejected(other, std::string(200, '\0')) &&
             throws<DeviceError>([&] { of_another_job.connect(JobSecret::random(), false, Deadline::after(1s)); },
                                 {"rank 0 (host a) cannot be reached", "it does not know this job's secret"});
    }
    const auto links = connector.connect(JobSecret::of_text("this"), false, Deadline::after(20s));
    store->leave(Deadline::after(20s));
    return well && links.size() == 1 && links[0].rank() == 1 - world.rank;
  });
}

TEST(PeerConnector, UnreachablePeerIsNamed) {
  on_processes({"ab"}, [](const World& world) {
    const auto store = make_tcp_store(world, Deadline::after(20s));
    const Peers peers(*store, Deadline::after(20s));
    PeerConnector connector(world.rank, 20s);
    connector.listen(usable_addresses(env, "127.0.0.1"));
    connector.expect(peers, 1 - world.rank, {{"127.0.0.1", testing::free_port()}});
    const bool well =
        world.rank == 1
            ? throws<DeviceError>([&] { connector.connect(JobSecret::of_text("x"), false, Deadline::after(300ms)); },
                                  {"rank 0 (host a) cannot be reached within ", "127.0.0.1:", "Connection refused"})
            : throws<DeviceError>([&] { connector.connect(JobSecret::of_text("x"), false, Deadline::after(300ms)); },
                                  {"rank 1 (host b) has not connected within ", "listens at 127.0.0.1:"});
    store->leave(Deadline::after(20s));
    return well;
  });
}

TEST(Hosts, AnInterfaceThatIsNotThereIsARanksOwnError) {
  on_processes({"ab"}, [](const World& world) {
    if (world.rank == 1) set_env("LOCKSTEP_SOCKET_IFNAME", "nosuch");
    if (world.rank == 1)
      return throws<UsageError>([&] { make_group(world); }, {"LOCKSTEP_SOCKET_IFNAME=\"nosuch\" names no interface"});
    return throws<PeerError>([&] { make_group(world); }, {"rank 1: LOCKSTEP_SOCKET_IFNAME"});
  });
}

TEST(Hosts, SharedMemoryBetweenHostsIsRefused) {
  on_processes({"ab"}, [](const World& world) {
    GroupOptions options;
    options.backend = "shm";
    if (world.rank == 1)
      return throws<DeviceError>([&] { make_group(world, options); }, {"(host a) and rank 1 (host b) share no memory"});
    return throws<PeerError>([&] { make_group(world, options); }, {"share no memory"});
  });
}

}  // namespace
}  // namespace lockstep::comm
