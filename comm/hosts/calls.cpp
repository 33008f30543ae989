#include "comm/hosts/calls.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "base/packing.h"
#include "base/stop.h"
#include "comm/tcp/socket.h"

namespace lockstep::comm {
namespace {

// One address gets this long before the next one has its turn: a firewall that says nothing must not use up all.
constexpr auto kOneAttempt = std::chrono::milliseconds(2000);
// Before all of a rank's addresses are tried again.
constexpr auto kPause = std::chrono::milliseconds(50);
// How long a rank that has been called may take to answer: it may still be on its way to the meeting.
constexpr auto kAnswerWithin = std::chrono::seconds(5);
// Beside those who are to call.
constexpr std::size_t kMostStrangers = 64;
constexpr int kMostWarnings = 5;
constexpr auto kCallNap = std::chrono::milliseconds(50);

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

/// What a rank says of itself when it calls.
std::string identity_text(int from, int to) {
  return Packer().number(static_cast<std::uint32_t>(from)).number(static_cast<std::uint32_t>(to)).bytes();
}

std::string address_text(const CallAddress& address) { return text_of(MeetingPoint{address.host, address.port, {}}); }

}  // namespace

/// Another rank, and how far the way to it has got.
struct Calls::Contact {
  int rank = -1;
  std::vector<CallAddress> addresses;
  bool calls = false;  // this rank calls
  bool there = false;
  UniqueFd socket;
  std::optional<SessionCiphers> ciphers;

  // Of calls:
  enum class State : std::uint8_t { kPausing, kConnecting, kShakingHands } state = State::kPausing;
  std::size_t next = 0;       // of addresses
  Clock::time_point until{};  // of this state
  std::optional<Handshake> handshake;
  std::string complaint;  // of the last attempt
};

struct Calls::Visitor {
  UniqueFd socket;
  Handshake handshake;
  Clock::time_point until{};
};

Calls::Calls(int rank, const Peers& peers, Clock::duration patience)
    : rank_(rank), peers_(peers), patience_(patience) {}
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

std::vector<Link> Calls::connect(const JobSecret& secret, bool encrypts, Deadline deadline) {
  secret_ = secret;
  encrypts_ = encrypts;
  const auto begin = Clock::now();
  const auto all_there = [&] { return std::ranges::all_of(contacts_, [](const Contact& one) { return one.there; }); };
  while (!all_there()) {
    throw_if_stopped("connecting to the other hosts");
    if (deadline.expired()) give_up(seconds_between(begin, Clock::now()));
    wait(deadline);
  }
  listeners_.clear();
  visitors_.clear();
  if (turned_away_ > kMostWarnings)
    log_warn("{} connections to this rank came from strangers, and had no part in this job", turned_away_);
  std::vector<Link> links;
  for (Contact& contact : contacts_)
    links.emplace_back(std::move(contact.socket), peers_.host_of(contact.rank), contact.rank,
                       std::move(contact.ciphers));
  return links;
}

void Calls::wait(Deadline deadline) {
  const auto now = Clock::now();
  Clock::time_point until = std::min(now + std::chrono::duration_cast<Clock::duration>(kCallNap), deadline.when());
  std::vector<pollfd> entries;
  for (const UniqueFd& listener : listeners_) entries.push_back({listener.get(), POLLIN, 0});
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
    if (entries[listeners_.size() + i].revents != 0) go_on(contact);
    if (contact.calls && !contact.there && contact.state != Contact::State::kPausing && Clock::now() >= contact.until)
      hang_up(contact, errno_text(ETIMEDOUT));
  }
  std::vector<bool> gone(visitors_.size());
  for (std::size_t i = 0; i < visitors; ++i) {
    if (entries[first_visitor + i].revents != 0) gone[i] = hear(visitors_[i]);
    if (!gone[i] && Clock::now() >= visitors_[i].until) {
      turn_away(visitors_[i], visitors_[i].handshake.has_heard() ? "it takes too long" : "it says nothing");
      gone[i] = true;
    }
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < visitors; ++i)
    if (!gone[i]) std::swap(visitors_[kept++], visitors_[i]);
  visitors_.erase(visitors_.begin() + static_cast<std::ptrdiff_t>(kept), visitors_.end());
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

void Calls::go_on(Contact& contact) {
  if (contact.state == Contact::State::kConnecting) {
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(contact.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return hang_up(contact, errno_text(error));
    contact.handshake = Handshake::call(Handshake::Port::kData, secret_, identity_text(rank_, contact.rank), encrypts_);
    contact.state = Contact::State::kShakingHands;
    contact.until = Clock::now() + kAnswerWithin;
  }
  switch (contact.handshake->advance(contact.socket.get())) {
    case Handshake::State::kDone:
      if (encrypts_) contact.ciphers.emplace(contact.handshake->take_ciphers());
      contact.there = true;
      return;
    case Handshake::State::kFailed: return hang_up(contact, contact.handshake->why());
    default: return;
  }
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
  for (std::size_t i = 0; i < kMostStrangers; ++i) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if ((errno == EMFILE || errno == ENFILE) && !visitors_.empty()) {  // strangers have them, most likely
        make_room();
        continue;
      }
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
        throw DeviceError(fmt::format("cannot accept a connection of another host: {}", errno_text(errno)),
                          "raise ulimit -n");
      return;
    }
    set_up(socket);
    visitors_.push_back({std::move(socket), Handshake::listen(Handshake::Port::kData, secret_, encrypts_),
                         Clock::now() + kHandshakeWithin});
    if (visitors_.size() > kMostStrangers + contacts_.size()) make_room();
  }
}

/// The one that has been silent for longest goes; where none is silent, the oldest.
void Calls::make_room() {
  const auto silent = std::ranges::find_if(
      visitors_, [](const Visitor& one) { return !one.handshake.has_heard() && !has_bytes(one.socket); });
  const auto leaves = silent != visitors_.end() ? silent : visitors_.begin();
  turn_away(*leaves, "it says nothing, and others wait");
  visitors_.erase(leaves);
}

bool Calls::hear(Visitor& visitor) {
  switch (visitor.handshake.advance(visitor.socket.get())) {
    case Handshake::State::kAsked: break;
    case Handshake::State::kFailed:
      // Somebody who only looked whether the port is open, or who tries another way, goes without a word.
      if (visitor.handshake.failure() != Handshake::Failure::kGone) turn_away(visitor, visitor.handshake.why());
      return true;
    default: return false;
  }
  if (!take(visitor)) turn_away(visitor, visitor.handshake.why());
  return true;
}

bool Calls::take(Visitor& visitor) {
  const auto contact = std::ranges::find_if(contacts_, [&](const Contact& one) {
    return !one.calls && visitor.handshake.identity() == identity_text(one.rank, rank_);
  });
  if (contact == contacts_.end()) {
    visitor.handshake.refuse("it is no rank that this one waits for");
    visitor.handshake.flush(visitor.socket.get());
    return false;
  }
  visitor.handshake.accept({});
  visitor.handshake.flush(visitor.socket.get());
  LOCKSTEP_ASSERT(!visitor.handshake.has_unsent(), "a connection in which nothing has been sent takes no answer");
  // One that calls again has given its first call up.
  contact->socket = std::move(visitor.socket);
  if (encrypts_) contact->ciphers.emplace(visitor.handshake.take_ciphers());
  contact->there = true;
  return true;
}

void Calls::turn_away(const Visitor& visitor, const std::string& why) {
  if (++turned_away_ > kMostWarnings) return;
  log_warn("a connection from {} was refused: {}{}", peer_text(visitor.socket), why,
           turned_away_ == kMostWarnings ? "; more of them are not mentioned" : "");
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
