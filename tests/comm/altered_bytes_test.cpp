// What ranks on several hosts do about a network that alters what it carries.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/ethtool.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/hosts/host_connections.h"
#include "comm/hosts/host_engine.h"
#include "comm/store.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/world.h"
#include "tests/comm/forked_ranks.h"
#include "tests/support/namespaces.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using testing::on_processes;
using testing::throws;

/// Stands between a link's connection and its rank, and alters one bit of what comes in.
class Tamperer {
 public:
  static constexpr std::size_t kNothing = std::numeric_limits<std::size_t>::max();

  /// Of byte number `at`, counted from 0. Keeps all that it sees in `record`, if there is one.
  Tamperer(const Link& link, std::size_t at, std::string* record = nullptr) : at_(at), record_(record) {
    int ends[2];
    LOCKSTEP_ASSERT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    inside_.reset(ends[0]);
    outside_.reset(::fcntl(link.fd(), F_DUPFD_CLOEXEC, 0));
    LOCKSTEP_ASSERT(::dup3(ends[1], link.fd(), O_CLOEXEC) == link.fd());
    ::close(ends[1]);
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
    if (record_ != nullptr) record_->append(bytes.data(), count);
    if (tamper && at_ >= seen_ && at_ < seen_ + count) bytes[at_ - seen_] ^= 0x20;
    if (tamper) seen_ += count;
    for (std::size_t sent = 0; sent < count;) {
      const ssize_t n = ::send(to.get(), bytes.data() + sent, count - sent, MSG_NOSIGNAL);
      // Nobody reads any more: what comes is dropped until its sender ends, as unread bytes would reset the connection.
      if (n < 0 && errno != EAGAIN) return true;
      if (n > 0) sent += static_cast<std::size_t>(n);
      pollfd room{to.get(), POLLOUT, 0};
      if (n < 0) ::poll(&room, 1, 1000);
    }
    return true;
  }

  const std::size_t at_;
  std::string* const record_;
  std::size_t seen_ = 0;
  UniqueFd inside_, outside_;
  std::thread thread_;
};

/// Forked ranks whose first one gets a byte of the last host's that is not as it was sent. `look` is shown all that
/// passed there, once it has ended.
void with_tampering(
    const std::string& hosts, std::size_t at, bool threaded, bool encrypts,
    const std::function<bool(ProcessGroup&)>& body,
    const std::function<bool(const std::string&)>& look = [](const std::string&) { return true; }) {
  const JobSecret secret = JobSecret::random();
  on_processes({hosts}, [&](World world) {
    const auto deadline = Deadline::after(20s);
    world.rendezvous.secret = secret;
    world.rendezvous.encrypts = encrypts;
    std::string record;
    auto store = make_tcp_store(world, deadline);
    Peers peers(*store, deadline);
    HostConnections connections = connect_hosts(*store, peers, world.rendezvous, 20s);
    std::optional<Tamperer> tamperer;
    if (world.rank == 0) tamperer.emplace(connections.links.back(), at, &record);
    auto group = make_hosts_group(std::move(store), std::move(connections), 20s, threaded);
    const bool well = body(*group);
    group.reset();
    tamperer.reset();
    return well && (world.rank > 0 || look(record));
  });
}

/// 4 MB of `fill` on each rank.
std::unique_ptr<Arena> filled_arena(ProcessGroup& group, std::int32_t fill) {
  auto arena = group.allocate(4 << 20);
  for (auto& value : arena->view<std::int32_t>(0, 1 << 20)) value = fill;
  return arena;
}

// In the first header, in later ones, in payloads; with ranks beside and hosts elsewhere that have no part in it.
TEST(AlteredBytes, AbortAllRanksBeforeTheyAreUsed) {
  for (const bool threaded : {false, true})
    for (const char* const hosts : {"ab", "aab", "abc"})
      for (const std::size_t at : {3u, 50u, 1'000u, 300'000u, 1'500'000u})
        with_tampering(hosts, at, threaded, false, [&](ProcessGroup& group) {
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

// Tags take the place of checksums, with the same end.
TEST(AlteredBytes, EndAnEncryptedJobToo) {
  for (const bool threaded : {false, true})
    for (const char* const hosts : {"ab", "aab"})
      for (const std::size_t at : {3u, 100u, 1'000u, 300'000u, 1'500'000u})
        with_tampering(hosts, at, threaded, true, [&](ProcessGroup& group) {
          bool right = true;
          return throws<DeviceError>(
                     [&] {
                       const auto arena = filled_arena(group, 1);
                       const auto values = arena->view<std::int32_t>(0, 1 << 20);
                       for (int step = 0, sum = 1; step < 20; ++step) {
                         group.all_reduce({arena.get(), 0, values.size(), DType::kI32}, ReduceOp::kMax).wait_host();
                         for (const auto& value : values) right = right && value == sum;
                       }
                     },
                     {"rank 0 (host a) were altered on their way, or come from somebody else: ", "a wrong tag"}) &&
                 right;
        });
}

// Neither what ranks put in nor what comes out is to be seen between hosts; without encryption both are.
TEST(Encryption, NothingToReadBetweenHosts) {
  constexpr std::int32_t kFill = 0x21436587;
  const auto text_of = [](std::int32_t value) {
    std::string text;
    for (int i = 0; i < 4; ++i) text.append(reinterpret_cast<const char*>(&value), sizeof value);
    return text;
  };
  for (const bool encrypts : {false, true})
    with_tampering(
        "ab", Tamperer::kNothing, false, encrypts,
        [&](ProcessGroup& group) {
          const auto arena = filled_arena(group, kFill);
          const auto values = arena->view<std::int32_t>(0, 1 << 20);
          group.all_reduce({arena.get(), 0, values.size(), DType::kI32}, ReduceOp::kSum).wait_host();
          const bool right = values.front() == 2 * kFill && values.back() == 2 * kFill && group.encrypts() == encrypts;
          group.shutdown();
          return right;
        },
        [&](const std::string& record) {
          if (record.size() < 8 << 20) return false;
          for (const std::int32_t value : {kFill, 2 * kFill})
            if ((record.find(text_of(value)) == std::string::npos) != encrypts) return false;
          return true;
        });
}

/// Between two hosts: passes Ethernet frames on as they are, but for one byte of a TCP payload, whose checksum it then
/// makes right.
class TamperingSwitch {
 public:
  explicit TamperingSwitch(const testing::Namespaces& network) {
    pid_ = ::fork();
    if (pid_ != 0) return;
    network.enter(network.switch_name());
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::alarm(60);
    serve();
    ::_exit(1);
  }
  ~TamperingSwitch() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  TamperingSwitch(const TamperingSwitch&) = delete;

 private:
  static constexpr int kTampersWith = 2000;  // this large packet

  static UniqueFd open_port(const char* name) {
    UniqueFd port(::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, htons(ETH_P_ALL)));
    sockaddr_ll address{};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(ETH_P_ALL);
    address.sll_ifindex = static_cast<int>(::if_nametoindex(name));
    const int on = 1, bytes = 8 << 20;
    ::setsockopt(port.get(), SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on);
    ::setsockopt(port.get(), SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
    LOCKSTEP_ASSERT(::bind(port.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return port;
  }

  static void serve() {
    const std::array<UniqueFd, 2> ports = {open_port("v0"), open_port("v1")};
    std::vector<unsigned char> frame(1 << 16);
    int large = 0;
    for (;;) {
      std::array<pollfd, 2> ends = {pollfd{ports[0].get(), POLLIN, 0}, pollfd{ports[1].get(), POLLIN, 0}};
      ::poll(ends.data(), ends.size(), -1);
      for (std::size_t i = 0; i < 2; ++i) {
        if ((ends[i].revents & POLLIN) == 0) continue;
        const ssize_t got = ::recv(ports[i].get(), frame.data(), frame.size(), 0);
        if (got <= 0) continue;
        const auto bytes = std::span(frame).first(static_cast<std::size_t>(got));
        if (bytes.size() > 1000 && ++large == kTampersWith) tamper(bytes);
        [[maybe_unused]] const ssize_t sent = ::send(ports[1 - i].get(), bytes.data(), bytes.size(), 0);
      }
    }
  }

  static void tamper(std::span<unsigned char> frame) {
    const auto ip = frame.subspan(14);
    const std::size_t ip_header = std::size_t{4} * (ip[0] & 0xfu), total = std::size_t{ip[2]} << 8 | ip[3];
    const auto tcp = ip.subspan(ip_header, total - ip_header);
    tcp[tcp.size() / 2] ^= 0x04;
    tcp[16] = tcp[17] = 0;
    std::uint32_t sum = 6 + static_cast<std::uint32_t>(tcp.size());
    const auto add = [&](std::span<const unsigned char> bytes) {
      for (std::size_t at = 0; at < bytes.size(); ++at) sum += at % 2 == 0 ? bytes[at] << 8u : bytes[at];
    };
    add(ip.subspan(12, 8));
    add(tcp);
    while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
    tcp[16] = static_cast<unsigned char>(~sum >> 8);
    tcp[17] = static_cast<unsigned char>(~sum);
  }

  pid_t pid_ = -1;
};

/// So that frames are whole, with checksums, where the switch sees them.
void let_the_host_compute_checksums() {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  for (const std::uint32_t command : {ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO}) {
    ethtool_value value{command, 0};
    ifreq request{};
    std::strcpy(request.ifr_name, "eth0");
    request.ifr_data = reinterpret_cast<char*>(&value);
    ::ioctl(socket.get(), SIOCETHTOOL, &request);
  }
}

// TCP itself has nothing to object.
TEST(AlteredBytes, PacketWithAValidTcpChecksum) {
  const testing::Namespaces network(2);
  if (!network.why_not().empty()) GTEST_SKIP() << network.why_not();
  const TamperingSwitch tampering(network);
  on_processes({.hosts = "ab"}, [&](World world) {
    network.enter(network.name(world.rank));
    let_the_host_compute_checksums();
    world.rendezvous.host = network.address(0);
    const auto group = make_group(world, {.timeout_seconds = 20});
    const auto arena = group->allocate(4 << 20);
    const auto values = arena->view<std::int32_t>(0, 1 << 20);
    bool right = true;
    const bool named = throws<DeviceError>(
        [&] {
          for (int step = 0; step < 20; ++step) {
            for (auto& value : values) value = 1 + step;
            group->all_reduce({arena.get(), 0, values.size(), DType::kI32}, ReduceOp::kSum).wait_host();
            for (const auto& value : values) right = right && value == 2 * (1 + step);
          }
        },
        {"the network altered bytes between rank ", "a wrong checksum"});
    return named && right;
  });
}

}  // namespace
}  // namespace lockstep::comm
