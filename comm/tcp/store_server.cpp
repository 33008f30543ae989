#include "comm/tcp/store_server.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/stop.h"
#include "comm/store.h"
#include "comm/tcp/socket.h"
#include "lockstep/comm/failure.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kMostFrameBytes =
    std::max(Store::kMostValueBytes + 2 * Store::kMostKeyBytes, Store::kMostKeys*(Store::kMostKeyBytes + 4) + 16);
constexpr std::size_t kMostTableBytes = std::size_t{1} << 30;
// How long a rejected peer, or all of them at the end, may take to read the reason.
constexpr auto kFarewell = std::chrono::milliseconds(500);
constexpr auto kAcceptPause = std::chrono::milliseconds(200);
constexpr int kMostWarnings = 10;

std::string not_understood(const Malformed& error) { return fmt::format("is no longer understood: {}", error.what()); }

}  // namespace

StoreServer::StoreServer(std::vector<UniqueFd> listeners, UniqueFd own, Job job)
    : job_(std::move(job)),
      listeners_(std::move(listeners)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ranks_(static_cast<std::size_t>(job_.size)) {
  if (!stop_) throw DeviceError(fmt::format("making an event descriptor: {}", errno_text(errno)), "raise ulimit -n");
  clients_.push_back(
      std::make_unique<Client>(std::move(own), Handshake::listen(Handshake::Port::kStore, job_.secret, job_.encrypts)));
  clients_.back()->own = true;
  // Signals are for the threads that look at stop requests.
  const AllSignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

StoreServer::~StoreServer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void StoreServer::run() {
  try {
    while (!stopping_) wait_and_serve();
    listeners_.clear();
    report_strangers();
    const auto end = Deadline::after(kFarewell);
    // What rank 0 has said before it closed its end, and its way to the others.
    while ((ranks_[0].client != nullptr || has_unsent()) && !end.expired()) wait_and_serve();
  } catch (const std::exception& error) {
    // Out of memory, most likely. All ranks, rank 0 too, notice that nobody serves them.
    log_error("the ranks' store has failed: {}", error.what());
    listeners_.clear();
    clients_.clear();
  }
}

void StoreServer::wait_and_serve() {
  std::vector<pollfd> entries;
  const auto now = Clock::now();
  Clock::time_point until = stopping_ ? now + std::chrono::milliseconds(20) : Clock::time_point::max();
  const bool accepts = now >= accept_again_;
  if (now < accept_again_) until = std::min(until, accept_again_);
  entries.push_back({stopping_ ? -1 : stop_.get(), POLLIN, 0});
  for (const UniqueFd& listener : listeners_) entries.push_back({accepts ? listener.get() : -1, POLLIN, 0});
  const std::size_t first_client = entries.size(), count = clients_.size();
  for (const auto& client : clients_) {
    const int events = (client->leaving ? 0 : POLLIN) | (client->wire.has_unsent() ? POLLOUT : 0);
    entries.push_back({client->wire.fd(), static_cast<short>(events), 0});
    until = std::min(until, client->until);
  }
  int timeout_ms = -1;
  if (until != Clock::time_point::max())
    timeout_ms = static_cast<int>(
        std::chrono::duration_cast<Millis>(std::max<Clock::duration>(until - now, Clock::duration::zero())).count() +
        1);
  if (::poll(entries.data(), entries.size(), timeout_ms) < 0) return;

  if (entries[0].revents != 0) stopping_ = true;
  // Those who are here first: whoever has just left may be the one whose place a newcomer asks for.
  for (std::size_t i = 0; i < count; ++i) {
    Client& client = *clients_[i];
    const short events = entries[first_client + i].revents;
    if (client.gone) continue;
    if ((events & POLLOUT) != 0) client.wire.flush();
    if (client.leaving ? (events & (POLLHUP | POLLERR)) != 0 : (events & ~POLLOUT) != 0) read(client);
    if (client.leaving && !client.wire.has_unsent()) client.gone = true;
    if (Clock::now() >= client.until) {
      if (client.rank < 0 && !client.leaving)
        warn_of_stranger(client, client.wire.handshake().has_heard() ? "it takes too long" : "it says nothing");
      client.gone = true;
    }
  }
  answer_all();
  for (std::size_t i = 0; i < listeners_.size(); ++i)
    if (entries[1 + i].revents != 0) accept_all(listeners_[i]);
  remove_closed();
}

void StoreServer::accept_all(const UniqueFd& listener) {
  for (std::size_t i = 0; i < kMostStrangers; ++i) {
    try {
      UniqueFd socket = accept_from(listener);
      if (!socket) return;
      clients_.push_back(std::make_unique<Client>(
          std::move(socket), Handshake::listen(Handshake::Port::kStore, job_.secret, job_.encrypts)));
      clients_.back()->until = Clock::now() + kHandshakeWithin;
    } catch (const DeviceError& error) {
      // Out of descriptors: strangers have them, most likely.
      if (count_strangers() > 0) {
        make_room();
        continue;
      }
      log_warn("{} → {}", error.what(), error.remedy());
      accept_again_ = Clock::now() + kAcceptPause;
      return;
    }
    if (count_strangers() > kMostStrangers + ranks_.size()) make_room();
  }
}

/// Once all that had arrived has been read: of two who set something while this process was stopped, neither shall hear
/// that the other is missing.
void StoreServer::answer_all() {
  for (const auto& [client, frame] : std::exchange(asked_, {})) {
    if (client->leaving || client->gone) continue;
    try {
      frame.kind == FrameKind::kAwait ? await(*client, frame) : take_attendance(*client);
    } catch (const Malformed& error) {
      end_rank(*client, not_understood(error));
    }
  }
}

/// The one that has been silent for longest goes; where none is silent, the oldest.
void StoreServer::make_room() {
  Client* leaves = nullptr;
  bool any_silent = false;
  for (const auto& client : clients_) {  // in the order in which they came
    if (client->rank >= 0 || client->own || client->gone) continue;
    const bool silent = !client->wire.handshake().has_heard() && !has_bytes(client->wire.socket());
    if (leaves == nullptr || (silent && !any_silent)) leaves = client.get();
    any_silent = any_silent || silent;
  }
  if (leaves == nullptr) return;
  if (!leaves->leaving) warn_of_stranger(*leaves, "it says nothing, and others wait");
  leaves->gone = true;
  leaves->wire.close();
}

std::size_t StoreServer::count_strangers() const {
  return static_cast<std::size_t>(std::count_if(clients_.begin(), clients_.end(), [](const auto& client) {
    return client->rank < 0 && !client->own && !client->gone;
  }));
}

void StoreServer::read(Client& client) {
  if (client.leaving || client.gone) {
    client.gone = true;
    return;
  }
  if (client.rank < 0) return shake_hands(client);
  try {
    const auto received = client.wire.receive();
    while (!client.leaving && !client.gone)
      if (auto frame = client.wire.next(kMostFrameBytes))
        obey(client, *std::move(frame));
      else
        break;
    if (received == Wire::Received::kGone && !client.leaving && !client.gone) end_rank(client, "has ended");
  } catch (const Malformed& error) {
    end_rank(client, not_understood(error));
  }
}

void StoreServer::shake_hands(Client& client) {
  switch (client.wire.advance()) {
    case Handshake::State::kAsked: return greet(client);
    case Handshake::State::kFailed: break;
    default: return;
  }
  const Handshake& handshake = client.wire.handshake();
  if (handshake.failure() == Handshake::Failure::kGone) {
    // Somebody who only looked whether the port is open, or who has been ended: counted, but not worth a line.
    ++strangers_;
    client.gone = true;
    return;
  }
  warn_of_stranger(client, handshake.why());
  close_after_sending(client);
}

void StoreServer::obey(Client& client, Frame frame) {
  Unpacker body(frame.body);
  switch (frame.kind) {
    case FrameKind::kSet: {
      const std::string key = body.text(Store::kMostKeyBytes);
      std::string value = body.text(Store::kMostValueBytes);
      body.end();
      set(key, std::move(value));
      return;
    }
    case FrameKind::kAwait:
    case FrameKind::kAskAttendance: asked_.emplace_back(&client, std::move(frame)); return;
    case FrameKind::kGiveUp: {
      const std::uint32_t code = body.number();
      const std::string why = body.text(Store::kMostValueBytes);
      body.end();
      if (!is_failure(code)) throw Malformed(fmt::format("it gives up with exit code {}", code));
      Rank& rank = ranks_[static_cast<std::size_t>(client.rank)];
      rank.state = Rank::State::kEnded;
      rank.client = nullptr;
      // Of several that give up at the same time the first speaks; the others have heard of it, or soon will.
      if (!announcement_) client.wire.send(FrameKind::kGoodbye);
      announce(FrameKind::kPeerGaveUp, Packer().number(code).text(fmt::format("rank {}: {}", client.rank, why)));
      close_after_sending(client);
      say_goodbye();
      return;
    }
    case FrameKind::kLeave: leave(client); return;
    default: throw Malformed(fmt::format("a frame of kind {}", static_cast<int>(frame.kind)));
  }
}

void StoreServer::greet(Client& client) {
  StoreIdentity who;
  try {
    who = StoreIdentity::decode(client.wire.handshake().identity());
  } catch (const Malformed& error) {
    return refuse(client, error.what());
  }
  if (who.job != job_.name)
    return refuse(client, fmt::format("it is of job '{}', and rank 0 of '{}'", who.job, job_.name));
  if (who.size != static_cast<std::uint32_t>(job_.size))
    return refuse(client, fmt::format("it is rank {} of {} (WORLD_SIZE), and rank 0 is one of {}", who.rank, who.size,
                                      job_.size));
  if (who.rank >= who.size) return refuse(client, fmt::format("it says that it is rank {} of {}", who.rank, who.size));
  Rank& rank = ranks_[who.rank];
  if (rank.state == Rank::State::kJoined || (who.rank == 0 && !client.own))
    return refuse(client, fmt::format("rank {} has joined already (host {}, pid {}), and this is another process "
                                      "(host {}, pid {})",
                                      who.rank, rank.host, rank.pid, who.host, who.pid));
  const bool come_again = rank.state != Rank::State::kUnused;
  client.wire.handshake().accept(StoreAnswer{come_again, client.own ? who.host : ranks_[0].host}.encode());
  client.wire.flush();
  if (come_again) return close_after_sending(client);
  client.rank = static_cast<int>(who.rank);
  client.until = Clock::time_point::max();
  rank = {Rank::State::kJoined, who.host, who.pid, &client};
  if (std::ranges::none_of(ranks_, [](const Rank& one) { return one.state == Rank::State::kUnused; }))
    report_strangers();
  if (announcement_) client.wire.send(announcement_->first, announcement_->second);
  say_goodbye();
}

void StoreServer::refuse(Client& client, const std::string& why) {
  client.wire.handshake().refuse(why);
  client.wire.flush();
  warn_of_stranger(client, client.wire.handshake().why());  // what it has said of itself reaches no terminal as it is
  close_after_sending(client);
}

void StoreServer::close_after_sending(Client& client) {
  client.leaving = true;
  client.until = Clock::now() + kFarewell;
}

void StoreServer::set(const std::string& key, std::string value) {
  value_bytes_ += key.size() + value.size();
  if (value_bytes_ > kMostTableBytes) throw Malformed("more values than the table takes");
  const std::string& stored = values_.insert_or_assign(key, std::move(value)).first->second;
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  for (const Waiting& one : found->second) {
    Client* client = ranks_[static_cast<std::size_t>(one.rank)].client;
    if (client != nullptr && client->await == one.await)
      client->wire.send(FrameKind::kValue, Packer().number(one.await).number(one.index).text(stored));
  }
  waiting_.erase(found);
}

void StoreServer::await(Client& client, const Frame& frame) {
  Unpacker body(frame.body);
  client.await = body.number();
  const std::uint32_t count = body.number();
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::string key = body.text(Store::kMostKeyBytes);
    if (const auto found = values_.find(key); found != values_.end())
      client.wire.send(FrameKind::kValue, Packer().number(client.await).number(i).text(found->second));
    else
      add_waiting(waiting_[key], {client.rank, client.await, i});
  }
  body.end();
  client.wire.send(FrameKind::kAnswered, Packer().number(client.await));
}

void StoreServer::add_waiting(std::vector<Waiting>& list, const Waiting& one) {
  // Entries of those who have stopped waiting are dropped: a rank may ask again and again.
  std::erase_if(list, [&](const Waiting& other) {
    const Client* client = ranks_[static_cast<std::size_t>(other.rank)].client;
    return client == nullptr || client->await != other.await;
  });
  list.push_back(one);
}

void StoreServer::take_attendance(Client& client) {
  Packer body;
  body.number(static_cast<std::uint32_t>(ranks_.size()));
  for (const Rank& rank : ranks_) {
    const std::uint32_t here = rank.state == Rank::State::kJoined ? 1 : 2;
    body.number(rank.state == Rank::State::kUnused ? 0 : here).text(rank.host);
  }
  client.wire.send(FrameKind::kAttendance, body);
}

void StoreServer::end_rank(Client& client, const std::string& how) {
  Rank& rank = ranks_[static_cast<std::size_t>(client.rank)];
  rank.state = Rank::State::kEnded;
  rank.client = nullptr;
  client.gone = true;
  announce(FrameKind::kPeerGone,
           Packer().text(fmt::format("rank {} (host {}, pid {}) {}", client.rank, rank.host, rank.pid, how)));
  say_goodbye();
}

void StoreServer::announce(FrameKind kind, const Packer& body) {
  if (announcement_) return;
  announcement_ = {kind, body};
  for (const Rank& rank : ranks_)
    if (rank.client != nullptr) rank.client->wire.send(kind, body);
}

void StoreServer::leave(Client& client) {
  Rank& rank = ranks_[static_cast<std::size_t>(client.rank)];
  rank.state = Rank::State::kLeft;
  if (client.rank > 0) {
    rank.client = nullptr;
    client.wire.send(FrameKind::kGoodbye);
    close_after_sending(client);
  }
  say_goodbye();
}

void StoreServer::say_goodbye() {
  Rank& first = ranks_[0];
  if (first.state != Rank::State::kLeft || first.client == nullptr) return;
  const auto any_is = [&](Rank::State state) {
    return std::any_of(ranks_.begin() + 1, ranks_.end(), [&](const Rank& rank) { return rank.state == state; });
  };
  // A job that has come to its end early waits for nobody who has not come.
  if (any_is(Rank::State::kUnused) && !announcement_) return;
  // A rank of the next job that comes now shall wait for the next rank 0.
  listeners_.clear();
  if (any_is(Rank::State::kJoined)) return;
  first.client->wire.send(FrameKind::kGoodbye);
  close_after_sending(*first.client);
  first.client = nullptr;
}

void StoreServer::warn_of_stranger(const Client& client, const std::string& why) {
  if (++strangers_ > kMostWarnings) return;
  reported_ = strangers_;
  log_warn("a connection from {} to MASTER_PORT was refused: {}{}", peer_text(client.wire.socket()), why,
           strangers_ == kMostWarnings ? "; more of them are counted, and not mentioned" : "");
}

void StoreServer::report_strangers() {
  if (strangers_ == reported_) return;
  reported_ = strangers_;
  log_warn("{} connection{} to MASTER_PORT came from strangers so far, and had no part in this job", strangers_,
           strangers_ == 1 ? "" : "s");
}

void StoreServer::remove_closed() {
  std::erase_if(clients_, [](const auto& client) { return client->gone; });
}

bool StoreServer::has_unsent() const {
  return std::any_of(clients_.begin(), clients_.end(),
                     [](const auto& client) { return client->rank > 0 && client->wire.has_unsent(); });
}

}  // namespace lockstep::comm
