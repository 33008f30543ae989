#include "comm/hosts/calls.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>

#include "base/error.h"
#include "base/log.h"
#include "base/stop.h"
#include "comm/tcp/socket.h"

namespace lockstep::comm {
namespace {

constexpr std::uint32_t kProtocol = 2;
constexpr std::array<char, 8> kCallMagic = {'l', 's', '-', 'c', 'a', 'l', 'l', '\0'};
constexpr std::array<char, 8> kAnswerMagic = {'l', 's', '-', 'a', 'n', 's', 'w', '\0'};

// One address gets this long before the next one has its turn: a firewall that says nothing must not use up all.
constexpr auto kOneAttempt = std::chrono::milliseconds(2000);
// Before all of a rank's addresses are tried again.
constexpr auto kPause = std::chrono::milliseconds(50);
// How long somebody who has connected may take to say who it is.
constexpr auto kHelloWithin = std::chrono::seconds(5);
constexpr std::size_t kMostVisitors = 64;
constexpr int kMostWarnings = 5;
constexpr auto kNap = std::chrono::milliseconds(50);

// What the kernel is asked to hold for each direction: what a link of 10 Gbit/s moves in 3 ms, so that bytes flow while
// this rank computes.
constexpr int kBufferBytes = 4 << 20;

void set_option(const UniqueFd& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
}

/// Where the system allows sizes worth having: a socket whose size has been set grows no more by itself.
void set_buffer(const UniqueFd& socket, int force, int name, const char* limit) {
  int most = 0;
  if (::setsockopt(socket.get(), SOL_SOCKET, force, &kBufferBytes, sizeof kBufferBytes) == 0) return;
  if (std::ifstream(limit) >> most && most >= kBufferBytes / 2) set_option(socket, SOL_SOCKET, name, kBufferBytes);
}

std::string address_text(const CallAddress& address) { return text_of(MeetingPoint{address.host, address.port, {}}); }

}  // namespace

/// Both ways alike, but for the magic.
struct Calls::Hello {
  std::array<char, 8> magic{};
  std::uint32_t protocol = kProtocol;
  std::int32_t from = -1;
  std::int32_t to = -1;
  std::uint32_t unused = 0;
  std::array<char, kNonceBytes> nonce{};
};

/// Another rank, and how far the way to it has got.
struct Calls::Contact {
  int rank = -1;
  std::vector<CallAddress> addresses;
  bool calls = false;  // this rank calls
  bool there = false;
  UniqueFd socket;

  // Of calls:
  enum class State : std::uint8_t { kPausing, kConnecting, kListening } state = State::kPausing;
  std::size_t next = 0;       // of addresses
  Clock::time_point until{};  // of this state
  std::array<char, 64> answer{};
  std::size_t answered = 0;
  std::string complaint;  // of the last attempt
};

struct Calls::Visitor {
  UniqueFd socket;
  std::array<char, 64> said{};
  std::size_t bytes = 0;
  Clock::time_point until{};
};

Calls::Calls(int rank, int host, const Peers& peers, Clock::duration patience)
    : rank_(rank), host_(host), peers_(peers), patience_(patience) {
  static_assert(sizeof(Hello) <= 64 && std::is_trivially_copyable_v<Hello>);
}
Calls::~Calls() = default;

void Calls::set_up(const UniqueFd& socket) const {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // Six intervals make up the patience. What is on its way is looked after by HostEngine::check_connections().
  const int interval =
      std::max(1, static_cast<int>(std::chrono::duration_cast<std::chrono::seconds>(patience_).count() / 6));
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 2 * interval);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set_buffer(socket, SO_SNDBUFFORCE, SO_SNDBUF, "/proc/sys/net/core/wmem_max");
  set_buffer(socket, SO_RCVBUFFORCE, SO_RCVBUF, "/proc/sys/net/core/rmem_max");
}

std::vector<CallAddress> Calls::listen(const std::vector<InterfaceAddress>& addresses) {
  constexpr std::size_t kMostAddresses = 8;
  std::vector<CallAddress> where;
  std::string complaint = "it has none";
  for (const InterfaceAddress& address : addresses) {
    if (where.size() == kMostAddresses) break;
    UniqueFd socket(::socket(address.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    if (socket) set_up(socket);  // before connections come: the window that TCP offers is fixed then
    if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.address), address.length) != 0 ||
        ::listen(socket.get(), SOMAXCONN) != 0 ||
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
      complaint = fmt::format("{}: {}", address.text(), errno_text(errno));
      continue;
    }
    const auto port = bound.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(bound).sin_port
                                                 : reinterpret_cast<sockaddr_in6&>(bound).sin6_port;
    where.push_back({address.text(), ntohs(port)});
    listens_at_ += (listens_at_.empty() ? "" : ", ") + address_text(where.back());
    listeners_.push_back(std::move(socket));
  }
  if (where.empty())
    throw DeviceError(fmt::format("this host has no address to listen at: {}", complaint), "look at its network");
  return where;
}

void Calls::expect(int rank, std::vector<CallAddress> addresses) {
  Contact& contact = contacts_.emplace_back();
  contact.rank = rank;
  contact.addresses = std::move(addresses);
  contact.calls = rank < rank_;
}

std::vector<Link> Calls::connect(const std::string& nonce, Deadline deadline) {
  nonce_ = nonce;
  nonce_.resize(kNonceBytes);
  const auto begin = Clock::now();
  const auto all_there = [&] { return std::ranges::all_of(contacts_, [](const Contact& one) { return one.there; }); };
  while (!all_there()) {
    throw_if_stopped("connecting to the other hosts");
    if (deadline.expired()) give_up(seconds_between(begin, Clock::now()));
    wait(deadline);
  }
  listeners_.clear();
  visitors_.clear();
  std::vector<Link> links;
  for (Contact& contact : contacts_)
    links.emplace_back(std::move(contact.socket), peers_.host_of(contact.rank), contact.rank);
  return links;
}

void Calls::wait(Deadline deadline) {
  const auto now = Clock::now();
  Clock::time_point until = std::min(now + std::chrono::duration_cast<Clock::duration>(kNap), deadline.when());
  std::vector<pollfd> entries;
  const bool accepts = visitors_.size() < kMostVisitors;
  for (const UniqueFd& listener : listeners_) entries.push_back({accepts ? listener.get() : -1, POLLIN, 0});
  for (Contact& contact : contacts_) {
    if (contact.calls && !contact.there && contact.state == Contact::State::kPausing && now >= contact.until)
      call(contact);
    const bool calling = contact.calls && !contact.there && contact.state != Contact::State::kPausing;
    entries.push_back({calling ? contact.socket.get() : -1,
                       static_cast<short>(contact.state == Contact::State::kConnecting ? POLLOUT : POLLIN), 0});
    if (contact.calls && !contact.there) until = std::min(until, std::max(contact.until, now));
  }
  const std::size_t first_visitor = entries.size(), visitors = visitors_.size();
  for (const Visitor& visitor : visitors_) entries.push_back({visitor.socket.get(), POLLIN, 0});
  const auto nap = std::chrono::duration_cast<Millis>(until - now).count();
  if (::poll(entries.data(), entries.size(), static_cast<int>(nap) + 1) < 0) return;

  for (std::size_t i = 0; i < contacts_.size(); ++i) {
    Contact& contact = contacts_[i];
    const short events = entries[listeners_.size() + i].revents;
    if (events != 0) go_on(contact, events);
    if (contact.calls && !contact.there && contact.state != Contact::State::kPausing && Clock::now() >= contact.until)
      hang_up(contact, errno_text(ETIMEDOUT));
  }
  std::vector<bool> gone(visitors_.size());
  for (std::size_t i = 0; i < visitors; ++i) {
    if (entries[first_visitor + i].revents != 0) gone[i] = hear(visitors_[i]);
    if (!gone[i] && Clock::now() >= visitors_[i].until) {
      turn_away(visitors_[i], "it says nothing");
      gone[i] = true;
    }
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < visitors; ++i)
    if (!gone[i]) std::swap(visitors_[kept++], visitors_[i]);
  visitors_.resize(kept);
  for (std::size_t i = 0; i < listeners_.size(); ++i)
    if (entries[i].revents != 0) accept(listeners_[i]);
}

// ---- Calling ----

void Calls::call(Contact& contact) {
  const CallAddress& address = contact.addresses[contact.next];
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found) != 0)
    return hang_up(contact, "it is no address");
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  contact.socket.reset(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!contact.socket) return hang_up(contact, errno_text(errno));
  set_up(contact.socket);
  contact.state = Contact::State::kConnecting;
  contact.until = Clock::now() + kOneAttempt;
  if (::connect(contact.socket.get(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS)
    hang_up(contact, errno_text(errno));
}

void Calls::go_on(Contact& contact, short) {
  if (contact.state == Contact::State::kConnecting) {
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(contact.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return hang_up(contact, errno_text(error));
    const Hello hello = hello_to(contact.rank, false);
    if (::send(contact.socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
      return hang_up(contact, errno_text(errno));
    contact.state = Contact::State::kListening;
    contact.until = Clock::now() + kHelloWithin;
    contact.answered = 0;
    return;
  }
  const ssize_t got = ::recv(contact.socket.get(), contact.answer.data() + contact.answered,
                             sizeof(Hello) - contact.answered, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return hang_up(contact, got < 0 ? errno_text(errno) : "it hangs up");
  contact.answered += static_cast<std::size_t>(got);
  if (contact.answered < sizeof(Hello)) return;
  Hello wanted = hello_to(rank_, true);
  wanted.from = contact.rank;
  if (std::memcmp(contact.answer.data(), &wanted, sizeof wanted) != 0)
    return hang_up(contact, "who answers is another one");
  contact.there = true;
}

void Calls::hang_up(Contact& contact, const std::string& why) {
  contact.complaint = fmt::format("{}: {}", address_text(contact.addresses[contact.next]), why);
  contact.socket.reset();
  contact.next = (contact.next + 1) % contact.addresses.size();
  contact.state = Contact::State::kPausing;
  contact.until = Clock::now();
  if (contact.next == 0) contact.until += kPause;
}

// ---- Being called ----

void Calls::accept(const UniqueFd& listener) {
  for (;;) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
        throw DeviceError(fmt::format("cannot accept a connection of another host: {}", errno_text(errno)),
                          "raise ulimit -n");
      return;
    }
    set_up(socket);
    Visitor& visitor = visitors_.emplace_back();
    visitor.socket = std::move(socket);
    visitor.until = Clock::now() + kHelloWithin;
  }
}

bool Calls::hear(Visitor& visitor) {
  const ssize_t got =
      ::recv(visitor.socket.get(), visitor.said.data() + visitor.bytes, sizeof(Hello) - visitor.bytes, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) return true;  // somebody who only looked whether the port is open, or who tries another way
  visitor.bytes += static_cast<std::size_t>(got);
  const std::size_t known = std::min(visitor.bytes, kCallMagic.size());
  if (std::memcmp(visitor.said.data(), kCallMagic.data(), known) != 0) {
    turn_away(visitor, "it is no rank of lockstep");
    return true;
  }
  if (visitor.bytes < sizeof(Hello)) return false;
  Hello hello;
  std::memcpy(&hello, visitor.said.data(), sizeof hello);
  const auto contact =
      std::ranges::find_if(contacts_, [&](const Contact& one) { return one.rank == hello.from && !one.calls; });
  Hello wanted = hello_to(rank_, false);
  wanted.from = hello.from;
  if (contact == contacts_.end() || std::memcmp(&hello, &wanted, sizeof hello) != 0) {
    turn_away(visitor, hello.protocol == kProtocol ? "it is of another job" : "it speaks another version");
    return true;
  }
  const Hello answer = hello_to(hello.from, true);
  if (::send(visitor.socket.get(), &answer, sizeof answer, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof answer))
    return true;
  // One that calls again has given its first call up.
  contact->socket = std::move(visitor.socket);
  contact->there = true;
  return true;
}

void Calls::turn_away(const Visitor& visitor, const std::string& why) {
  if (++turned_away_ > kMostWarnings) return;
  log_warn("a connection from {} was refused: {}{}", peer_text(visitor.socket), why,
           turned_away_ == kMostWarnings ? "; more of them are not mentioned" : "");
}

Calls::Hello Calls::hello_to(int rank, bool answers) const {
  Hello hello;
  hello.magic = answers ? kAnswerMagic : kCallMagic;
  hello.from = rank_;
  hello.to = rank;
  nonce_.copy(hello.nonce.data(), hello.nonce.size());
  return hello;
}

void Calls::give_up(double waited_seconds) const {
  constexpr const char* kRemedy =
      "let the hosts reach each other over TCP (firewalls!), or name the network with LOCKSTEP_SOCKET_IFNAME";
  for (const Contact& contact : contacts_)
    if (contact.calls && !contact.there)
      throw DeviceError(fmt::format("{} cannot be reached within {:.3g} s: {}", peers_.name_of(contact.rank),
                                    waited_seconds, contact.complaint),
                        kRemedy);
  for (const Contact& contact : contacts_)
    if (!contact.there)
      throw DeviceError(fmt::format("{} has not connected within {:.3g} s to this rank, which listens at {}",
                                    peers_.name_of(contact.rank), waited_seconds, listens_at_),
                        kRemedy);
  LOCKSTEP_ASSERT(false, "all are there");
}

}  // namespace lockstep::comm
