// What ranks on several hosts do about a network that alters what it carries.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <thread>

#include "base/error.h"
#include "comm/hosts/host_meeting.h"
#include "comm/hosts/inline_hosts.h"
#include "comm/hosts/thread_hosts.h"
#include "comm/tcp/tcp_store.h"
#include "tests/comm/forked_ranks.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using testing::on_processes;
using testing::throws;

/// Stands between a link's connection and its rank, and alters one bit of what comes in.
class Tamperer {
 public:
  /// Of byte number `at`, counted from 0.
  Tamperer(Link& link, std::size_t at) : at_(at) {
    int ends[2];
    LOCKSTEP_ASSERT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    inside_.reset(ends[0]);
    outside_.reset(::fcntl(link.fd(), F_DUPFD_CLOEXEC, 0));
    link = Link(UniqueFd(ends[1]), link.host(), link.rank());
    thread_ = std::thread([this] { relay(); });
  }
  /// Once both ends are closed.
  ~Tamperer() { thread_.join(); }
  Tamperer(const Tamperer&) = delete;

 private:
  void relay() {
    bool out = true, in = true;
    while (out || in) {
      std::array<pollfd, 2> ends = {pollfd{in ? outside_.get() : -1, POLLIN, 0},
                                    pollfd{out ? inside_.get() : -1, POLLIN, 0}};
      if (::poll(ends.data(), ends.size(), 10'000) <= 0) return;
      if (ends[0].revents != 0) in = pass(outside_, inside_, true);
      if (ends[1].revents != 0) out = pass(inside_, outside_, false);
    }
  }
  bool pass(const UniqueFd& from, const UniqueFd& to, bool tamper) {
    std::array<char, 1 << 16> bytes;
    const ssize_t got = ::recv(from.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) {
      ::shutdown(to.get(), SHUT_WR);
      return false;
    }
    const auto count = static_cast<std::size_t>(got);
    if (tamper && at_ >= seen_ && at_ < seen_ + count) bytes[at_ - seen_] ^= 0x20;
    if (tamper) seen_ += count;
    for (std::size_t sent = 0; sent < count;) {
      const ssize_t n = ::send(to.get(), bytes.data() + sent, count - sent, MSG_NOSIGNAL);
      if (n < 0 && errno != EAGAIN) return false;
      if (n > 0) sent += static_cast<std::size_t>(n);
      pollfd room{to.get(), POLLOUT, 0};
      if (n < 0) ::poll(&room, 1, 1000);
    }
    return true;
  }

  const std::size_t at_;
  std::size_t seen_ = 0;
  UniqueFd inside_, outside_;
  std::thread thread_;
};

/// Forked ranks whose first one gets a byte of the last host's that is not as it was sent.
void with_tampering(const std::string& hosts, std::size_t at, bool threaded,
                    const std::function<bool(ProcessGroup&)>& body) {
  on_processes({hosts}, [&](const World& world) {
    const auto deadline = Deadline::after(20s);
    auto store = make_tcp_store(world, deadline);
    Peers peers(*store, deadline);
    HostMeeting met = meet_hosts(*store, peers, "127.0.0.1", 20s);
    std::optional<Tamperer> tamperer;
    if (world.rank == 0) tamperer.emplace(met.links.back(), at);
    std::unique_ptr<ProcessGroup> group;
    if (threaded)
      group = std::make_unique<ThreadHosts>(std::move(store), std::move(met), 20s);
    else
      group = std::make_unique<InlineHosts>(std::move(store), std::move(met), 20s);
    const bool well = body(*group);
    group.reset();
    return well;
  });
}

// In the first header, in later ones, in payloads; with ranks beside and hosts elsewhere that have no part in it.
TEST(AlteredBytes, EndTheJobOnAllRanksBeforeTheyAreUsed) {
  for (const bool threaded : {false, true})
    for (const char* const hosts : {"ab", "aab", "abc"})
      for (const std::size_t at : {3u, 50u, 1'000u, 300'000u, 1'500'000u})
        with_tampering(hosts, at, threaded, [&](ProcessGroup& group) {
          const auto begin = Clock::now();
          std::string first = "rank 0 (host a)", last = hosts[1] == 'b' ? "rank 1 (host b)" : "rank 2 (host b)";
          if (hosts == std::string("abc")) last = "rank 2 (host c)";
          const std::string link = fmt::format("the network altered bytes between {} and {}: ", last, first);
          std::unique_ptr<Arena> arena;
          bool right = true;
          const bool named = throws<DeviceError>(
              [&] {
                arena = group.allocate(4 << 20);
                const auto values = arena->view<std::int32_t>(0, 1 << 20);
                for (int step = 0; step < 20; ++step) {
                  for (auto& value : values) value = 1 + step;
                  group.all_reduce({arena.get(), 0, values.size(), DType::kI32}, ReduceOp::kSum).wait_host();
                  for (const auto& value : values) right = right && value == group.size() * (1 + step);
                }
              },
              {link, "a wrong checksum"});
          return named && right && Clock::now() - begin < 15s;
        });
}

}  // namespace
}  // namespace lockstep::comm
