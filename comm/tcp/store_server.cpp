#include "comm/tcp/store_server.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "comm/store.h"
#include "comm/tcp/socket.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kMostHelloBytes = 1024;
constexpr std::size_t kMostNameBytes = 256;  // of hosts and jobs
constexpr std::size_t kMostTableBytes = std::size_t{1} << 30;
// How long somebody who is turned away, or all of them at the end, may take to read why.
constexpr auto kFarewell = std::chrono::milliseconds(500);
constexpr auto kAcceptPause = std::chrono::milliseconds(200);
constexpr int kMostWarnings = 10;

}  // namespace

StoreServer::StoreServer(std::vector<UniqueFd> listeners, UniqueFd own, Job job)
    : job_(std::move(job)),
      listeners_(std::move(listeners)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ranks_(static_cast<std::size_t>(job_.size)) {
  if (!stop_) throw DeviceError(fmt::format("making an event descriptor: {}", errno_text(errno)), "raise ulimit -n");
  clients_.push_back(std::make_unique<Client>(std::move(own)));
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
  const auto strangers = static_cast<std::size_t>(
      std::count_if(clients_.begin(), clients_.end(), [](const auto& client) { return client->rank < 0; }));
  const bool accepts = strangers < kMostStrangers && now >= accept_again_;
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
    if ((events & POLLOUT) != 0) client.wire.flush();
    if (client.leaving ? (events & (POLLHUP | POLLERR)) != 0 : (events & ~POLLOUT) != 0) read(client);
    if (client.leaving && !client.wire.has_unsent()) client.gone = true;
    if (Clock::now() >= client.until) {
      if (client.rank < 0 && !client.leaving) warn_of_stranger(client, "it says nothing");
      client.gone = true;
    }
  }
  for (std::size_t i = 0; i < listeners_.size(); ++i)
    if (entries[1 + i].revents != 0) accept_all(listeners_[i]);
  remove_closed();
}

void StoreServer::accept_all(const UniqueFd& listener) {
  try {
    for (int i = 0; i < static_cast<int>(kMostStrangers); ++i) {
      UniqueFd socket = accept_from(listener);
      if (!socket) return;
      clients_.push_back(std::make_unique<Client>(std::move(socket)));
      clients_.back()->until = Clock::now() + kHelloWithin;
    }
  } catch (const DeviceError& error) {
    log_warn("{} → {}", error.what(), error.remedy());
    accept_again_ = Clock::now() + kAcceptPause;
  }
}

void StoreServer::read(Client& client) {
  if (client.leaving || client.gone) {
    client.gone = true;
    return;
  }
  try {
    const auto received = client.wire.receive();
    while (!client.leaving && !client.gone)
      if (const auto frame = client.wire.next(most_frame_bytes(client)))
        obey(client, *frame);
      else
        break;
    if (received != Wire::Received::kGone || client.leaving || client.gone) return;
    if (client.rank < 0)
      client.gone = true;  // somebody who only looked whether the port is open
    else
      end_rank(client, "has ended");
  } catch (const Malformed& error) {
    if (client.rank < 0) {
      warn_of_stranger(client, error.what());
      client.gone = true;
    } else {
      end_rank(client, fmt::format("is no longer understood: {}", error.what()));
    }
  }
}

void StoreServer::obey(Client& client, const Frame& frame) {
  if (client.rank < 0) {
    if (frame.kind != FrameKind::kHello) throw Malformed("it does not say hello");
    greet(client, frame);
    return;
  }
  Unpacker body(frame.body);
  switch (frame.kind) {
    case FrameKind::kSet: {
      const std::string key = body.text(Store::kMostKeyBytes);
      std::string value = body.text(Store::kMostValueBytes);
      body.end();
      set(key, std::move(value));
      return;
    }
    case FrameKind::kAwait: await(client, frame); return;
    case FrameKind::kRollCall: take_attendance(client); return;
    case FrameKind::kGiveUp: {
      const std::uint32_t code = body.number();
      const std::string why = body.text(Store::kMostValueBytes);
      body.end();
      Rank& rank = ranks_[static_cast<std::size_t>(client.rank)];
      rank.state = Rank::State::kEnded;
      rank.client = nullptr;
      // Of several that give up at the same time the first speaks; the others have heard of it, or soon will.
      if (!verdict_) client.wire.send(FrameKind::kGoodbye);
      announce(FrameKind::kPeerGaveUp, Packer().number(code).text(fmt::format("rank {}: {}", client.rank, why)));
      close_after_sending(client);
      say_goodbye();
      return;
    }
    case FrameKind::kLeave: leave(client); return;
    default: throw Malformed(fmt::format("a frame of kind {}", static_cast<int>(frame.kind)));
  }
}

void StoreServer::greet(Client& client, const Frame& frame) {
  Unpacker body(frame.body);
  const std::uint32_t version = body.number();
  if (version != kProtocolVersion)
    return refuse(
        client, fmt::format("it speaks version {} of the protocol, and rank 0 version {}", version, kProtocolVersion));
  const std::uint32_t size = body.number(), number = body.number(), pid = body.number();
  const std::string host = body.text(kMostNameBytes);
  const std::string job = body.text(kMostNameBytes);
  body.end();
  if (job != job_.name) return refuse(client, fmt::format("it is of job '{}', and rank 0 of '{}'", job, job_.name));
  if (size != static_cast<std::uint32_t>(job_.size))
    return refuse(client,
                  fmt::format("it is rank {} of {} (WORLD_SIZE), and rank 0 is one of {}", number, size, job_.size));
  if (number >= size) return refuse(client, fmt::format("it says that it is rank {} of {}", number, size));
  Rank& rank = ranks_[number];
  if (rank.state == Rank::State::kJoined || (number == 0 && !client.own))
    return refuse(client, fmt::format("rank {} has joined already (host {}, pid {}), and this is another process "
                                      "(host {}, pid {})",
                                      number, rank.host, rank.pid, host, pid));
  if (rank.state != Rank::State::kAbsent) {
    client.wire.send(FrameKind::kComeAgain);
    return close_after_sending(client);
  }
  client.rank = static_cast<int>(number);
  client.until = Clock::time_point::max();
  rank = {Rank::State::kJoined, host, pid, &client};
  client.wire.send(FrameKind::kWelcome, Packer().number(kProtocolVersion).text(ranks_[0].host));
  if (verdict_) client.wire.send(verdict_->first, verdict_->second);
  say_goodbye();
}

void StoreServer::refuse(Client& client, const std::string& why) {
  warn_of_stranger(client, why);
  client.wire.send(FrameKind::kRefused, Packer().text(why));
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
  // Those who have stopped waiting make room: a rank may ask again and again.
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
    body.number(rank.state == Rank::State::kAbsent ? 0 : here).text(rank.host);
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
  if (verdict_) return;
  verdict_ = {kind, body};
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
  if (any_is(Rank::State::kAbsent) && !verdict_) return;
  // A rank of the next job that comes now shall wait for the next rank 0.
  listeners_.clear();
  if (any_is(Rank::State::kJoined)) return;
  first.client->wire.send(FrameKind::kGoodbye);
  close_after_sending(*first.client);
  first.client = nullptr;
}

void StoreServer::warn_of_stranger(const Client& client, const std::string& why) {
  if (++strangers_ > kMostWarnings) return;
  log_warn("a connection from {} to MASTER_PORT was refused: {}{}", peer_text(client.wire.socket()), why,
           strangers_ == kMostWarnings ? "; more of them are not mentioned" : "");
}

void StoreServer::remove_closed() {
  std::erase_if(clients_, [](const auto& client) { return client->gone; });
}

bool StoreServer::has_unsent() const {
  return std::any_of(clients_.begin(), clients_.end(),
                     [](const auto& client) { return client->rank > 0 && client->wire.has_unsent(); });
}

std::size_t StoreServer::most_frame_bytes(const Client& client) const {
  if (client.rank < 0) return kMostHelloBytes;
  return std::max(Store::kMostValueBytes + 2 * Store::kMostKeyBytes,
                  Store::kMostKeys * (Store::kMostKeyBytes + 4) + 16);
}

}  // namespace lockstep::comm
