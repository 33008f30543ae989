// What ranks that join over TCP say of those who do not come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "base/status_report.h"
#include "comm/stall.h"
#include "comm/store.h"
#include "lockstep/comm/world.h"
#include "tests/comm/forked_ranks.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::on_processes;
using testing::throws;

/// When a rank comes that is late: after the first two lines (1 s and 2 s), and a second before the third.
constexpr auto kLate = 3s;

/// What this process says of waiting in `doing` while it acts. On a busy machine ranks are late elsewhere, too.
template <class Action>
std::vector<std::string> lines_while(const std::string& doing, Action&& action) {
  ::testing::internal::CaptureStderr();
  action();
  const std::string said = ::testing::internal::GetCapturedStderr();
  std::fputs(said.c_str(), stderr);
  std::vector<std::string> lines;
  for (std::size_t at = 0, end = 0; at < said.size(); at = end + 1) {
    end = std::min(said.find('\n', at), said.size());
    if (said.substr(at, end - at).find(doing + " has waited") != std::string::npos)
      lines.push_back(said.substr(at, end - at));
  }
  return lines;
}

bool matches(const std::vector<std::string>& lines, const ::testing::Matcher<std::vector<std::string>>& matcher) {
  ::testing::StringMatchResultListener listener;
  if (::testing::ExplainMatchResult(matcher, lines, &listener)) return true;
  std::fprintf(stderr, "%zu lines: %s\n", lines.size(), listener.str().c_str());
  return false;
}

TEST(RendezvousStalls, ARankThatHasNotJoinedIsNamedByOne) {
  on_processes({.hosts = "aaa"}, [](const World& world) {
    set_stall_warning(1s);
    if (world.rank == 2) std::this_thread::sleep_for(kLate);
    const auto lines = lines_while("the roll", [&] {
      const auto store = make_tcp_store(world, Deadline::after(20s));
      store->barrier("the roll", Deadline::after(20s));
      store->leave(Deadline::after(20s));
    });
    if (world.rank > 0) return matches(lines, IsEmpty());
    return matches(lines, AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr("the roll has waited"),
                                                           HasSubstr(" s for rank 2, which has not joined →")))));
  });
}

TEST(RendezvousStalls, ARankThatHasJoinedIsNamedWithItsHost) {
  on_processes({.hosts = "abc"}, [](const World& world) {
    set_stall_warning(1s);
    const auto lines = lines_while("what to do", [&] {
      const auto store = make_tcp_store(world, Deadline::after(20s));
      store->barrier("all", Deadline::after(20s));
      if (world.rank == 1) std::this_thread::sleep_for(kLate);
      store->broadcast_text("what to do", "nothing", 1, Deadline::after(20s));
      store->barrier("the end", Deadline::after(20s));
      store->leave(Deadline::after(20s));
    });
    if (world.rank > 0) return matches(lines, IsEmpty());
    return matches(
        lines,
        AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr("what to do has waited"), HasSubstr(" s for rank 1 (host b) →")))));
  });
}

TEST(RendezvousStalls, AFirstRankThatIsNotThereYet) {
  on_processes({.hosts = "aaa"}, [](const World& world) {
    set_stall_warning(1s);
    if (world.rank == 0) std::this_thread::sleep_for(kLate);
    const auto lines = lines_while("joining the other ranks", [&] {
      const auto store = make_tcp_store(world, Deadline::after(20s));
      store->barrier("all", Deadline::after(20s));
      store->leave(Deadline::after(20s));
    });
    if (world.rank != 1) return matches(lines, IsEmpty());
    return matches(lines, AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr("joining the other ranks has waited"),
                                                           HasSubstr(" s for rank 0, which is to be at 127.0.0.1:")))));
  });
}

TEST(RendezvousStalls, AFirstRankThatIsStopped) {
  on_processes({.hosts = "aaa"}, [](const World& world) {
    set_stall_warning(1s);
    const auto lines = lines_while("again", [&] {
      const auto store = make_tcp_store(world, Deadline::after(20s));
      store->barrier("all", Deadline::after(20s));
      // They have heard of it: one that still waits for the answer would speak, too.
      store->set(fmt::format("through {}", world.rank), "");
      if (world.rank == 0) {
        for (const char* key : {"through 1", "through 2"}) store->get(key, Deadline::after(20s));
        const std::string wake = fmt::format("(sleep 5; kill -CONT {}) >/dev/null 2>&1 &", ::getpid());
        if (std::system(wake.c_str()) == 0) std::raise(SIGSTOP);
      } else {
        std::this_thread::sleep_for(1s);  // it is stopped by then: one whose word it has heard would speak, too
      }
      store->barrier("again", Deadline::after(20s));
      store->leave(Deadline::after(20s));
    });
    if (world.rank != 1) return matches(lines, IsEmpty());
    return matches(lines, AllOf(Not(IsEmpty()), Each(AllOf(HasSubstr("again has waited"), HasSubstr(" s for rank 0"),
                                                           Not(HasSubstr("rank 1")), Not(HasSubstr("rank 2"))))));
  });
}

TEST(RendezvousStalls, ATimeoutReportsMissingRanksToTheLauncher) {
  on_processes({.hosts = "aaa"}, [](const World& world) {
    int ends[2];
    struct stat found = {};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0 || ::fstat(ends[1], &found) != 0)
      return false;
    set_env(kStatusVariable, fmt::format("{}:{}:0", ends[1], found.st_ino));
    const auto store = make_tcp_store(world, Deadline::after(20s));
    store->barrier("all", Deadline::after(20s));
    const auto meet = [&] { store->barrier("again", Deadline::after(500ms)); };
    if (world.rank == 2) return throws<PeerError>([&] { store->barrier("the end", Deadline::after(20s)); }, {"again"});
    if (world.rank == 0) return throws<PeerError>([&] { store->barrier("again", Deadline::after(20s)); }, {"rank 1"});
    if (!throws<TimeoutError>(meet, {"waiting for rank 2"})) return false;
    char bytes[256];
    const ssize_t got = ::recv(ends[0], bytes, sizeof bytes, MSG_DONTWAIT);
    const auto report = decode_status({bytes, static_cast<std::size_t>(std::max<ssize_t>(got, 0))});
    return report && report->ranks == std::vector<std::int32_t>{2};
  });
}

}  // namespace
}  // namespace lockstep::comm
