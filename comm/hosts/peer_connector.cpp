#include "comm/hosts/peer_connector.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <optional>

#include "base/codec.h"
#include "base/error.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/signals.h"
#include "base/text.h"
#include "comm/tcp/socket.h"

namespace lockstep::comm {
namespace {

constexpr const char* kVariable = "LOCKSTEP_SOCKET_IFNAME";

/// Made by container engines and hypervisors for what runs on this machine: others may have one of the same address.
constexpr std::array kInnerInterfaces = {"docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc"};

bool is_inner(const std::string& name) {
  return std::any_of(kInnerInterfaces.begin(), kInnerInterfaces.end(),
                     [&](const char* prefix) { return name.starts_with(prefix); });
}

/// Not of one link only.
std::vector<NetworkInterface> usable_interfaces() {
  std::vector<NetworkInterface> all = list_interfaces();
  std::erase_if(all, [](const NetworkInterface& one) {
    const auto* ipv6 = reinterpret_cast<const sockaddr_in6*>(one.address.get());
    return !one.is_up || (one.address.family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&ipv6->sin6_addr));
  });
  return all;
}

/// The address that the kernel would send to `host` from.
std::optional<SocketAddress> source_towards_host(const std::string& host) {
  if (host.empty()) return std::nullopt;
  for (const SocketAddress& target : resolve(host, 9).addresses)
    if (const auto source = source_towards(target)) return source;
  return std::nullopt;
}

// One address gets this long before the next one has its turn: a firewall that says nothing must not use up all.
constexpr auto kOneAttempt = std::chrono::milliseconds(2000);
// Before all of a rank's addresses are tried again.
constexpr auto kPause = std::chrono::milliseconds(50);
// How long a rank that has been called may take to answer: it may not have reached the rendezvous yet.
constexpr auto kAnswerWithin = std::chrono::seconds(5);
// And where it is called for sends and receives: it takes calls while it has a transfer of its own, and perhaps only
// now and then. That long a caller has, too. After an answer a caller waits longer than its call can be accepted: a
// listener that accepts an abandoned call would take it for the caller's end.
constexpr auto kPairAnswersWithin = std::chrono::seconds(30);
constexpr auto kWelcomedWithin = 2 * kPairAnswersWithin;
constexpr auto kCallNap = std::chrono::milliseconds(50);

// Size of the kernel's buffer for each direction: the traffic of a 10 Gbit/s link in 3 ms, so that bytes flow while
// this rank computes.
constexpr int kBufferBytes = 4 << 20;

/// Where the system allows sizes worth having: a socket whose size has been set grows no more by itself.
void set_buffer(const UniqueFd& socket, int force, int name, const char* limit) {
  int most = 0;
  if (::setsockopt(socket.get(), SOL_SOCKET, force, &kBufferBytes, sizeof kBufferBytes) == 0) return;
  if (std::ifstream(limit) >> most && most >= kBufferBytes / 2)
    ::setsockopt(socket.get(), SOL_SOCKET, name, &kBufferBytes, sizeof kBufferBytes);
}

/// What a rank says of itself when it calls.
std::string identity_text(int from, int to, PeerConnector::Purpose purpose) {
  return Packer()(from, to, static_cast<std::uint32_t>(purpose)).bytes();
}

}  // namespace

std::vector<NetworkInterface> usable_addresses(const EnvLookup& lookup, const std::string& target) {
  std::vector<NetworkInterface> all = usable_interfaces();
  std::vector<NetworkInterface> chosen;
  if (const auto filter = lookup(kVariable); filter && !filter->empty()) {
    std::string names;
    for (const NetworkInterface& one : all) {
      if (has_interface(*filter, one.name)) chosen.push_back(one);
      if (names.find(one.name) == std::string::npos) names += (names.empty() ? "" : ", ") + one.name;
    }
    if (chosen.empty())
      throw UsageError(
          fmt::format("{}=\"{}\" names no interface of this host that is up and has an address", kVariable, *filter),
          names.empty() ? "look at this host's network" : fmt::format("here are {}", names));
    return chosen;
  }
  const auto source = source_towards_host(target);
  const auto rank = [&](const NetworkInterface& one) {
    if (source && source->has_host_of(one.address)) return 0;
    if (one.is_loopback) return 3;
    return is_inner(one.name) ? 2 : 1;
  };
  std::ranges::stable_sort(all, {}, rank);
  for (const NetworkInterface& one : all)
    if (rank(one) < 3 || chosen.empty()) chosen.push_back(one);
  if (chosen.empty()) throw DeviceError("this host has no network address", "look at its network");
  return chosen;
}

/// Another rank, and how far the way to it has got.
struct PeerConnector::Connection {
  int rank = -1;
  int host = -1;
  std::string name;
  Purpose purpose = Purpose::kChannel;
  std::vector<ListenAddress> addresses;
  bool calls = false;  // this rank calls, where one is wanted
  bool wanted = false;
  bool there = false;
  bool taken = false;
  UniqueFd socket;
  std::optional<SessionCiphers> ciphers;

  // Of calls:
  enum class State : std::uint8_t { kPausing, kConnecting, kShakingHands } state = State::kPausing;
  std::size_t next = 0;       // of addresses
  Clock::time_point until{};  // of this state
  std::optional<Handshake> handshake;
  std::string complaint;  // of the last attempt

  bool is_calling() const { return calls && wanted && !there && state != State::kPausing; }
};

PeerConnector::PeerConnector(int rank, Clock::duration patience) : rank_(rank), patience_(patience) {}
PeerConnector::~PeerConnector() = default;

void PeerConnector::set_up(const UniqueFd& socket) const {
  // Six intervals make up the patience. What is on its way is looked after by HostEngine::check_connections().
  const int interval =
      std::max(1, static_cast<int>(std::chrono::duration_cast<std::chrono::seconds>(patience_).count() / 6));
  set_up_connection(socket, 2 * interval, interval, 4);
  set_buffer(socket, SO_SNDBUFFORCE, SO_SNDBUF, "/proc/sys/net/core/wmem_max");
  set_buffer(socket, SO_RCVBUFFORCE, SO_RCVBUF, "/proc/sys/net/core/rmem_max");
}

std::vector<ListenAddress> PeerConnector::listen(const std::vector<NetworkInterface>& interfaces) {
  constexpr std::size_t kMostAddresses = 8;
  std::vector<ListenAddress> where;
  std::string complaint = "it has none";
  for (const NetworkInterface& one : interfaces) {
    const SocketAddress& address = one.address;
    if (where.size() == kMostAddresses) break;
    UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket) set_up(socket);  // before connections come: the window that TCP offers is fixed then
    if (!socket || ::bind(socket.get(), address.get(), address.length) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
      complaint = fmt::format("{}: {}", address.host_text(), errno_text(errno));
      continue;
    }
    where.push_back({address.host_text(), own_address(socket).value_or(SocketAddress()).port()});
    listens_at_ += (listens_at_.empty() ? "" : ", ") + host_port_text(where.back().host, where.back().port);
    sockets_.push_back(std::move(socket));
  }
  if (where.empty())
    throw DeviceError(fmt::format("this host has no address to listen at: {}", complaint), "look at its network");
  return where;
}

void PeerConnector::expect(const Peers& peers, int rank, std::vector<ListenAddress> addresses, Purpose purpose) {
  Connection& connection = connections_.emplace_back();
  connection.rank = rank;
  connection.host = peers.host_of(rank);
  connection.name = peers.name_of(rank);
  connection.purpose = purpose;
  connection.addresses = std::move(addresses);
  connection.calls = rank < rank_;
  connection.wanted = purpose == Purpose::kChannel;
}

std::vector<Link> PeerConnector::connect(const JobSecret& secret, bool encrypts, Deadline deadline) {
  secret_ = secret;
  encrypts_ = encrypts;
  listener_.emplace(
      std::move(sockets_),
      AuthenticatedListener::Settings{
          .port = Handshake::Port::kData, .secret = secret, .encrypts = encrypts, .expected = connections_.size()});
  const auto begin = Clock::now();
  const auto of_channel = [](const Connection& one) { return one.purpose == Purpose::kChannel; };
  const auto all_there = [&] {
    return std::ranges::all_of(connections_, [&](const Connection& one) { return one.there || !of_channel(one); });
  };
  while (!all_there()) {
    throw_if_stopped("connecting to the other hosts");
    if (deadline.expired()) give_up(seconds_between(begin, Clock::now()));
    look(std::min<Clock::duration>(kCallNap, deadline.remaining()));
  }
  if (const auto summary = listener_->summary()) log_warn("{}", *summary);
  listener_->give_callers(kPairAnswersWithin);
  if (std::ranges::all_of(connections_, of_channel)) listener_.reset();
  std::vector<Link> links;
  for (Connection& connection : connections_)
    if (of_channel(connection))
      links.emplace_back(std::move(connection.socket), connection.host, connection.rank, std::move(connection.ciphers));
  std::erase_if(connections_, of_channel);
  return links;
}

void PeerConnector::look(Clock::duration at_most) {
  const auto now = Clock::now();
  auto until = now + at_most;
  std::vector<pollfd> entries = {{listener_ ? listener_->fd() : -1, POLLIN, 0}};
  for (Connection& connection : connections_) {
    const bool missing = connection.calls && connection.wanted && !connection.there;
    if (missing && connection.state == Connection::State::kPausing && now >= connection.until)
      start_connecting(connection);
    entries.push_back({connection.is_calling() ? connection.socket.get() : -1,
                       static_cast<short>(connection.state == Connection::State::kConnecting ? POLLOUT : POLLIN), 0});
    if (missing) until = std::min(until, std::max(connection.until, now));
  }
  const auto nap = std::chrono::duration_cast<Millis>(until - now).count();
  if (::poll(entries.data(), entries.size(), static_cast<int>(nap) + (at_most > Clock::duration::zero() ? 1 : 0)) < 0)
    return;

  for (std::size_t i = 0; i < connections_.size(); ++i) {
    Connection& connection = connections_[i];
    if (entries[1 + i].revents != 0)
      continue_connecting(connection);
    else if (connection.is_calling() && Clock::now() >= connection.until)
      disconnect(connection, errno_text(ETIMEDOUT));
  }
  if (entries[0].revents != 0) take_callers();
}

// ---- Pairs ----

PeerConnector::Connection* PeerConnector::pair_with(int rank) {
  const auto found = std::ranges::find_if(
      connections_, [&](const Connection& one) { return one.rank == rank && one.purpose == Purpose::kPair; });
  LOCKSTEP_ASSERT(found != connections_.end(), "no connection with rank {} is expected", rank);
  return &*found;
}

void PeerConnector::want(int rank) { pair_with(rank)->wanted = true; }

std::optional<Link> PeerConnector::take(int rank) {
  Connection& connection = *pair_with(rank);
  if (!connection.there || std::exchange(connection.taken, true)) return std::nullopt;
  return Link(std::move(connection.socket), connection.host, connection.rank, std::move(connection.ciphers));
}

std::string PeerConnector::trouble_with(int rank) const {
  for (const Connection& one : connections_)
    if (one.rank == rank && one.purpose == Purpose::kPair && !one.there)
      return one.calls ? one.complaint
                       : fmt::format("it has not connected to this rank, which listens at {}", listens_at_);
  return {};
}

void PeerConnector::listen_to(std::vector<pollfd>& entries) const {
  if (listener_) entries.push_back({listener_->fd(), POLLIN, 0});
  for (const Connection& one : connections_)
    if (one.is_calling())
      entries.push_back(
          {one.socket.get(), static_cast<short>(one.state == Connection::State::kConnecting ? POLLOUT : POLLIN), 0});
}

// ---- Calling ----

void PeerConnector::start_connecting(Connection& connection) {
  const ListenAddress& address = connection.addresses[connection.next];
  const auto target = parse_address(address.host, address.port);
  if (!target) return disconnect(connection, "it is no address");
  connection.socket.reset(::socket(target->family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!connection.socket) return disconnect(connection, errno_text(errno));
  set_up(connection.socket);
  connection.state = Connection::State::kConnecting;
  connection.until = Clock::now() + kOneAttempt;
  if (::connect(connection.socket.get(), target->get(), target->length) != 0 && errno != EINPROGRESS)
    disconnect(connection, errno_text(errno));
}

void PeerConnector::continue_connecting(Connection& connection) {
  if (connection.state == Connection::State::kConnecting) {
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return disconnect(connection, errno_text(error));
    connection.handshake = Handshake::call(Handshake::Port::kData, secret_,
                                           identity_text(rank_, connection.rank, connection.purpose), encrypts_);
    connection.state = Connection::State::kShakingHands;
    connection.until = Clock::now() + (connection.purpose == Purpose::kPair ? kPairAnswersWithin : kAnswerWithin);
  }
  const auto state = connection.handshake->advance(connection.socket.get());
  if (connection.handshake->has_heard()) connection.until = Clock::now() + kWelcomedWithin;
  switch (state) {
    case Handshake::State::kDone:
      if (encrypts_) connection.ciphers.emplace(connection.handshake->take_ciphers());
      connection.there = true;
      return;
    case Handshake::State::kFailed: return disconnect(connection, connection.handshake->why());
    default: return;
  }
}

void PeerConnector::disconnect(Connection& connection, const std::string& why) {
  const ListenAddress& address = connection.addresses[connection.next];
  connection.complaint = fmt::format("{}: {}", host_port_text(address.host, address.port), why);
  connection.socket.reset();
  connection.next = (connection.next + 1) % connection.addresses.size();
  connection.state = Connection::State::kPausing;
  connection.until = Clock::now();
  if (connection.next == 0) connection.until += kPause;
}

// ---- Being called ----

void PeerConnector::take_callers() {
  while (auto caller = listener_->next()) take(*caller);
  while (const auto complaint = listener_->next_complaint()) log_warn("{}", *complaint);
}

void PeerConnector::take(AuthenticatedListener::Caller& caller) {
  auto& [socket, handshake, until] = caller;
  const auto connection = std::ranges::find_if(connections_, [&](const Connection& one) {
    return !one.calls && !one.taken && handshake.identity() == identity_text(one.rank, rank_, one.purpose);
  });
  const bool late = Clock::now() >= until;  // it may have given this call up
  if (late || connection == connections_.end()) {
    handshake.refuse(late ? "it takes too long" : "it is no rank that this one waits for");
    handshake.flush(socket.get());
    return listener_->complain(socket, handshake.why());
  }
  set_up(socket);
  handshake.accept({});
  handshake.flush(socket.get());
  LOCKSTEP_ASSERT(!handshake.has_unsent(), "a connection in which nothing has been sent takes no answer");
  // One that calls again has given its first call up.
  connection->socket = std::move(socket);
  if (encrypts_) connection->ciphers.emplace(handshake.take_ciphers());
  connection->there = true;
}

void PeerConnector::give_up(double waited_seconds) const {
  constexpr const char* kRemedy =
      "let the hosts reach each other over TCP (firewalls!), or name the network with LOCKSTEP_SOCKET_IFNAME";
  for (const Connection& connection : connections_)
    if (connection.wanted && connection.calls && !connection.there)
      throw DeviceError(fmt::format("{} cannot be reached within {:.3g} s: {}", connection.name, waited_seconds,
                                    connection.complaint),
                        kRemedy);
  for (const Connection& connection : connections_)
    if (connection.wanted && !connection.there)
      throw DeviceError(fmt::format("{} has not connected within {:.3g} s to this rank, which listens at {}",
                                    connection.name, waited_seconds, listens_at_),
                        kRemedy);
  LOCKSTEP_ASSERT(false, "all are there");
}

}  // namespace lockstep::comm
