#include "comm/hosts/host_engine.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "comm/backends.h"
#include "comm/engine.h"
#include "comm/shm/shm_engine.h"

namespace lockstep::comm {
namespace {

/// How long bytes that this end has sent have been on their way, in all; zero where the kernel does not say.
Clock::duration sending_time_of(int fd) {
  // tcpi_busy_time, in µs: of the kernel's tcp_info, of which the C library's has the first part alone.
  constexpr std::size_t kAt = 168;
  std::array<std::byte, kAt + sizeof(std::uint64_t)> info{};
  auto length = static_cast<socklen_t>(info.size());
  std::uint64_t us = 0;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info.data(), &length) == 0 && length == info.size())
    std::memcpy(&us, info.data() + kAt, sizeof us);
  return std::chrono::microseconds(us);
}

}  // namespace

HostEngine::HostEngine(HostConnections connections, Clock::duration timeout)
    : Engine(connections.rank, connections.ranks, {.at_least = 2 * patience_for(timeout)}),
      connections_(std::move(connections)),
      here_(connections_.peers.hosts()[static_cast<std::size_t>(connections_.host)]),
      timeout_(timeout),
      sync_(connections_.local, static_cast<int>(here_.size()), connections_.channels, connections_.board,
            std::move(connections_.pipes)),
      rings_(connections_.local, static_cast<int>(here_.size()), connections_.board, connections_.layout.rings),
      links_(std::move(connections_.connector), connections_.peers) {
  const std::size_t links = connections_.links.size();
  if (sync_.drives())
    channel_.emplace(connections_.local, connections_.host, connections_.peers, sync_, connections_.tuning,
                     std::move(connections_.links));
  for (std::size_t i = 0; channel_ && i < channel_->links(); ++i)
    sockets_.emplace_back(channel_->link(i).rank(), channel_->link(i).fd());
  put_texts(connections_.board.part(connections_.local) + connections_.layout.texts, connections_.board.part_bytes());
  entries_to_poll_.reserve(links + 1);
  states_.resize(static_cast<std::size_t>(size()));
  missing_.reserve(64);
}

std::vector<int> HostEngine::ranks_by_host() const {
  std::vector<int> all;
  for (const auto& ranks : connections_.peers.hosts()) all.insert(all.end(), ranks.begin(), ranks.end());
  return all;
}

// ---- Operations ----

bool HostEngine::advance_operations() {
  if (idle()) return false;
  bool moved = post_all();
  if (channel_) moved |= channel_->advance();
  moved |= finish_all();
  moved |= retire();
  return moved;
}

bool HostEngine::post_all() {
  const std::uint64_t posted = posted_;
  while (posted_ < submitted() && posted_ - completed() < Channel::kWindow && sync_.may_post(posted_ + 1)) {
    const Op& op = op_at(++posted_);
    sync_.post(op, {text_of(rank()), op.within_host ? kTextBytes : 0});
    if (channel_) channel_->open(op);
  }
  if (posted_ != posted) sync_.wake_sleepers();
  return posted_ != posted;
}

bool HostEngine::finish_all() {
  const std::uint64_t finished = finished_;
  while (finished_ < posted_) {
    const Op& op = op_at(finished_ + 1);
    if (!sync_.all_posted(op) || (channel_ && !channel_->is_done(op.op_index))) break;
    for (int i = 0; op.within_host && i < sync_.size(); ++i)
      std::memcpy(text_of(rank_of_local(i)), sync_.bytes_of(i, op.op_index), kTextBytes);
    if (channel_) channel_->close(op.op_index);
    finished_ = op.op_index;
    sync_.finish(finished_);
  }
  if (finished_ != finished) sync_.wake_sleepers();
  return finished_ != finished;
}

bool HostEngine::retire() {
  const std::uint64_t before = completed();
  while (completed() < finished_ && sync_.drivers_have_finished(completed() + 1)) complete_first();
  return completed() != before;
}

WaitPolicy HostEngine::wait_policy(bool by_thread) const {
  // A look at sockets is a system call each, one at memory is not. Where ranks outnumber cores another process is let
  // have the core a few times before a wait sleeps.
  constexpr int kSpinsOverSockets = 50, kSpinsOverMemory = 2000, kYields = 20;
  if (oversubscribed()) return by_thread ? WaitPolicy{} : WaitPolicy{.yields = kYields, .recovered = kYields / 2};
  const int spins = by_thread || channel_ ? kSpinsOverSockets : kSpinsOverMemory;
  return {.spins = spins, .recovered = spins / 2};
}

void HostEngine::sleep(Clock::duration at_most, Clock::duration, FunctionRef<bool()> awake) {
  sync_.announce_sleep();
  if (!has_no_transfers()) links_.read_ahead();
  if (!advance() && !awake()) {
    entries_to_poll_.clear();
    // What comes for later operations can wait until this rank has come to them.
    if (channel_ && !idle()) channel_->listen_to(entries_to_poll_);
    const std::size_t links = entries_to_poll_.size();
    if (!has_no_transfers()) links_.listen_to(entries_to_poll_);
    entries_to_poll_.push_back({sync_.wakeup_fd(), POLLIN, 0});
    const timespec nap = timespec_of(at_most);
    if (::ppoll(entries_to_poll_.data(), entries_to_poll_.size(), &nap, nullptr) > 0 && links > 0)
      channel_->found(entries_to_poll_.data());
  }
  sync_.end_sleep();
}

std::vector<ProcessGroup::PeerTime> HostEngine::sending_times() const {
  std::vector<ProcessGroup::PeerTime> times;
  for (const auto& [rank, fd] : sockets_) times.push_back({rank, sending_time_of(fd)});
  return times;
}

// ---- Sends and receives ----

std::optional<int> HostEngine::local_of(int rank) const {
  const auto found = std::ranges::lower_bound(here_, rank);
  if (found == here_.end() || *found != rank) return std::nullopt;
  return static_cast<int>(found - here_.begin());
}

void HostEngine::open_stream(int peer) {
  if (!local_of(peer)) links_.open(peer);
}

std::size_t HostEngine::write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) {
  const auto local = local_of(to);
  return local ? rings_.write_some(*local, header, values) : links_.write_some(to, header, values);
}

std::size_t HostEngine::read_some(int from, std::span<std::byte> bytes) {
  const auto local = local_of(from);
  return local ? rings_.read_some(*local, bytes) : links_.read_some(from, bytes);
}

bool HostEngine::is_flushed(int to, std::uint64_t bytes) {
  const auto local = local_of(to);
  return local ? rings_.is_flushed(*local, bytes) : links_.is_flushed(to);
}

// ---- Arenas ----

std::unique_ptr<Arena> HostEngine::map_arena(std::size_t bytes, TextExchange exchange) {
  // The same sizes are too large on all hosts, however many ranks each has.
  constexpr std::size_t kPages = 1 << 16;
  if (bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) / static_cast<std::size_t>(size()) - kPages)
    throw std::bad_alloc();
  // Segment::map asks twice, but for a host that fails in between: all hosts take part in both.
  int rounds = 0;
  bool group_fails = false;
  const auto exchange_here = [&](const std::string& mine) {
    ++rounds;
    group_fails = true;
    const auto all = exchange(mine, true);
    group_fails = false;
    std::vector<std::string> ours;
    for (const int rank : here_) ours.push_back(all[static_cast<std::size_t>(rank)]);
    return ours;
  };
  std::optional<DeviceError> mine;
  Segment segment;
  try {
    segment = Segment::map(sync_.local(), sync_.size(), bytes, exchange_here);
  } catch (const DeviceError& error) {
    // A failure of the group itself, or of the memory. Only after the latter the ranks continue.
    if (group_fails) throw;
    mine = error;
  } catch (const PeerError&) {
    if (group_fails) throw;
  }
  while (rounds < 2) exchange_here("");

  const auto texts = exchange(mine ? std::string(utf8_prefix(mine->what(), Segment::kMostText)) : std::string(), false);
  for (int r = 0; r < size(); ++r) {
    const std::string& text = texts[static_cast<std::size_t>(r)];
    if (text.empty()) continue;
    if (r == rank()) throw *mine;
    throw PeerError(static_cast<int>(ExitCode::kDevice), fmt::format("rank {}: {}", r, text));
  }
  return std::make_unique<ShmArena>(std::move(segment), sync_.local(), bytes);
}

std::unique_ptr<ProcessGroup> make_hosts_group(std::unique_ptr<Store>&& store, Peers&& peers,
                                               const Rendezvous& rendezvous, Clock::duration timeout, bool threaded) {
  HostConnections connections = connect_hosts(*store, peers, rendezvous, timeout);
  return make_hosts_group(std::move(store), std::move(connections), timeout, threaded);
}

std::unique_ptr<ProcessGroup> make_hosts_group(std::unique_ptr<Store> store, HostConnections connections,
                                               Clock::duration timeout, bool threaded) {
  const int rank = store->rank(), size = store->size();
  auto engine = std::make_unique<HostEngine>(std::move(connections), timeout);
  if (!threaded) return make_inline_group(rank, size, std::move(engine), std::move(store), timeout);
  const auto shared = std::make_shared<std::unique_ptr<Engine>>(std::move(engine));
  return make_thread_group(
      rank, size, [shared] { return std::move(*shared); }, std::move(store), timeout);
}

const BackendFamily& hosts_backend() {
  static const BackendFamily family{
      .name = "hosts",
      .title = "sockets",
      .about = "sockets between hosts, memory inside them",
      .encrypts = true,
      .unsupported = [](const World& world, const GroupOptions&,
                        const Peers* peers) -> std::optional<UnsupportedReason> {
        const bool on_one = peers != nullptr ? peers->elsewhere() < 0 : world.local_size == world.size;
        if (!on_one) return std::nullopt;
        return UnsupportedReason{"all ranks are on one host", "leave --backend out"};
      },
      .make = [](JoinedRanks ranks) -> std::unique_ptr<ProcessGroup> {
        Rendezvous rendezvous = ranks.world.rendezvous;
        if (!ranks.world.over_tcp()) rendezvous.host.clear();
        return make_hosts_group(std::move(ranks.store), std::move(ranks.peers), rendezvous, ranks.timeout(),
                                ranks.options.wants_thread());
      },
  };
  return family;
}

}  // namespace lockstep::comm
