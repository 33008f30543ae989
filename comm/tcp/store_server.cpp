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
#include "lockstep/comm/failure.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kMostFrameBytes =
    std::max(Store::kMostValueBytes + 2 * Store::kMostKeyBytes, Store::kMostKeys*(Store::kMostKeyBytes + 4) + 16);
constexpr std::size_t kMostTableBytes = std::size_t{1} << 30;
// How long a rejected peer, or all of them at the end, may take to read the reason.
constexpr auto kFarewell = std::chrono::milliseconds(500);
constexpr auto kAcceptPause = std::chrono::milliseconds(200);

AuthenticatedListener::Settings settings_of(const StoreServer::Job& job) {
  return {Handshake::Port::kStore, job.secret, job.encrypts, static_cast<std::size_t>(job.size),
          " to MASTER_PORT",       10,         true};
}

std::string not_understood(const Malformed& error) { return fmt::format("is no longer understood: {}", error.what()); }

}  // namespace

bool StoreServer::Table::any_is(Rank::State state) const {
  return std::ranges::any_of(ranks, [&](const Rank& rank) { return rank.state == state; });
}

StoreServer::StoreServer(std::vector<UniqueFd> listeners, Job job, UniqueFd own)
    : job_(std::move(job)),
      listener_(std::move(listeners), settings_of(job_)),
      wakeup_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wakeup_) throw DeviceError(fmt::format("making an event descriptor: {}", errno_text(errno)), "raise ulimit -n");
  // Before it serves: whoever finds the port open finds the group too.
  open(own);
  thread_ = start_thread([this] { run(); });
}

StoreServer::~StoreServer() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
}

bool StoreServer::open(UniqueFd& own) {
  {
    const std::lock_guard lock(mutex_);
    if (!listens_) return false;
    opened_.push_back(std::move(own));
  }
  wake();
  return true;
}

void StoreServer::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wakeup_.get(), &one, sizeof one);
}

void StoreServer::take_opened() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(wakeup_.get(), &count, sizeof count);
  std::vector<UniqueFd> opened;
  {
    const std::lock_guard lock(mutex_);
    opened.swap(opened_);
    stopping_ = stop_;
  }
  for (UniqueFd& own : opened) {
    tables_.push_back(std::make_unique<Table>(job_.size));
    clients_.push_back(std::make_unique<Client>(
        std::move(own), Handshake::listen(Handshake::Port::kStore, job_.secret, job_.encrypts)));
    clients_.back()->own = true;
    clients_.back()->table = tables_.back().get();
  }
}

void StoreServer::run() {
  try {
    while (!stopping_) wait_and_serve();
    listener_.stop_listening();
    report_strangers();
    const auto end = Deadline::after(kFarewell);
    // What rank 0 has said before it closed its end, and its way to the others.
    const auto first_is_here = [](const auto& table) { return table->ranks[0].client != nullptr; };
    while ((std::ranges::any_of(tables_, first_is_here) || has_unsent()) && !end.expired()) wait_and_serve();
  } catch (const std::exception& error) {
    // Out of memory, most likely. All ranks, rank 0 too, notice that nobody serves them.
    log_error("the ranks' store has failed: {}", error.what());
    const std::lock_guard lock(mutex_);
    opened_.clear();
    clients_.clear();
    listens_ = false;
    listener_.close();
  }
}

void StoreServer::wait_and_serve() {
  std::vector<pollfd> entries;
  const auto now = Clock::now();
  Clock::time_point until = stopping_ ? now + std::chrono::milliseconds(20) : Clock::time_point::max();
  const bool accepts = now >= accept_again_;
  if (now < accept_again_) until = std::min(until, accept_again_);
  entries.push_back({stopping_ ? -1 : wakeup_.get(), POLLIN, 0});
  entries.push_back({accepts ? listener_.fd() : -1, POLLIN, 0});
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

  if (entries[0].revents != 0) take_opened();
  // Those who are here first: whoever has just left may be the one whose place a newcomer asks for.
  for (std::size_t i = 0; i < count; ++i) {
    Client& client = *clients_[i];
    const short events = entries[first_client + i].revents;
    if (client.gone) continue;
    if ((events & POLLOUT) != 0) client.wire.flush();
    if (client.leaving ? (events & (POLLHUP | POLLERR)) != 0 : (events & ~POLLOUT) != 0) read(client);
    if (client.leaving && !client.wire.has_unsent()) client.gone = true;
    if (Clock::now() >= client.until) client.gone = true;
  }
  answer_all();
  if (entries[1].revents != 0) take_callers();
  remove_closed();
}

void StoreServer::take_callers() {
  try {
    while (auto caller = listener_.next()) {
      set_up(caller->socket);
      clients_.push_back(std::make_unique<Client>(std::move(caller->socket), std::move(caller->handshake)));
      greet(*clients_.back());
    }
  } catch (const DeviceError& error) {
    log_warn("{} → {}", error.what(), error.remedy());
    accept_again_ = Clock::now() + kAcceptPause;
  }
  while (const auto complaint = listener_.next_complaint()) log_warn("{}", *complaint);
}

/// After reading everything that had arrived: if two ranks set values while this process was stopped, neither must be
/// reported as missing to the other.
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

void StoreServer::read(Client& client) {
  if (client.leaving || client.gone) {
    client.gone = true;
    return;
  }
  if (client.rank < 0) return shake_hands_with_own(client);
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

void StoreServer::shake_hands_with_own(Client& client) {
  const auto state = client.wire.advance();
  if (state == Handshake::State::kAsked) greet(client);
  if (state == Handshake::State::kFailed) client.gone = true;
}

void StoreServer::obey(Client& client, Frame frame) {
  switch (frame.kind) {
    case FrameKind::kSet: return set(*client.table, frame.as<SetValue>());
    case FrameKind::kAwait:
    case FrameKind::kAskAttendance: asked_.emplace_back(&client, std::move(frame)); return;
    case FrameKind::kGiveUp: {
      const auto [code, why] = frame.as<GivenUp>();
      if (!is_failure(code)) throw Malformed(fmt::format("it gives up with exit code {}", code));
      Table& table = *client.table;
      Rank& rank = table.ranks[static_cast<std::size_t>(client.rank)];
      rank.state = Rank::State::kEnded;
      rank.client = nullptr;
      // Of several that give up at the same time the first speaks; the others have heard of it, or soon will.
      if (!table.announcement) client.wire.send(FrameKind::kGoodbye);
      announce(table, FrameKind::kPeerGaveUp, pack(GivenUp{code, fmt::format("rank {}: {}", client.rank, why)}));
      close_after_sending(client);
      say_goodbye(table);
      return;
    }
    case FrameKind::kLeave: leave(client); return;
    default: throw Malformed(fmt::format("a frame of kind {}", static_cast<int>(frame.kind)));
  }
}

void StoreServer::greet(Client& client) {
  StoreIdentity who;
  try {
    who = unpack<StoreIdentity>(client.wire.handshake().identity());
  } catch (const Malformed& error) {
    return refuse(client, error.what());
  }
  if (who.job != job_.name)
    return refuse(client, fmt::format("it is of job '{}', and rank 0 of '{}'", who.job, job_.name));
  if (who.size != static_cast<std::uint32_t>(job_.size))
    return refuse(client, fmt::format("it is rank {} of {} (WORLD_SIZE), and rank 0 is one of {}", who.rank, who.size,
                                      job_.size));
  if (who.rank >= who.size) return refuse(client, fmt::format("it says that it is rank {} of {}", who.rank, who.size));
  Table* table = client.table;
  try {
    if (!client.own) table = table_for(who.rank, who.host, who.pid);
  } catch (const Malformed& error) {
    return refuse(client, error.what());
  }
  const bool come_again = table == nullptr || table->ranks[who.rank].state != Rank::State::kUnused;
  const std::string first_host = client.own ? who.host : table == nullptr ? std::string() : table->ranks[0].host;
  client.wire.handshake().accept(pack(StoreAnswer{come_again, first_host}));
  client.wire.flush();
  if (come_again) return close_after_sending(client);
  client.table = table;
  client.rank = static_cast<int>(who.rank);
  client.until = Clock::time_point::max();
  table->ranks[who.rank] = {Rank::State::kJoined, who.host, who.pid, &client};
  if (!table->any_is(Rank::State::kUnused)) report_strangers();
  if (table->announcement) client.wire.send(table->announcement->first, table->announcement->second);
  say_goodbye(*table);
}

StoreServer::Table* StoreServer::table_for(std::size_t rank, const std::string& host, std::uint32_t pid) {
  for (const auto& table : tables_) {
    const Rank& there = table->ranks[rank];
    const bool same_process = there.host == host && there.pid == pid;
    if ((there.state == Rank::State::kJoined && !same_process) || rank == 0)
      throw Malformed(
          fmt::format("rank {} has joined already (host {}, pid {}), and this is another process (host {}, "
                      "pid {})",
                      rank, there.host, there.pid, host, pid));
  }
  const auto found = std::ranges::find_if(
      tables_, [&](const auto& table) { return table->ranks[rank].state == Rank::State::kUnused; });
  return found == tables_.end() ? nullptr : found->get();
}

void StoreServer::refuse(Client& client, const std::string& why) {
  client.wire.handshake().refuse(why);
  client.wire.flush();
  // What it has said of itself reaches no terminal as it is.
  listener_.complain(client.wire.socket(), client.wire.handshake().why());
  close_after_sending(client);
}

void StoreServer::close_after_sending(Client& client) {
  client.leaving = true;
  client.gone = !client.wire.has_unsent();
  client.until = Clock::now() + kFarewell;
}

void StoreServer::set(Table& table, SetValue given) {
  auto& [key, value] = given;
  table.value_bytes += key.size() + value.size();
  if (table.value_bytes > kMostTableBytes) throw Malformed("more values than the table takes");
  const std::string& stored = table.values.insert_or_assign(key, std::move(value)).first->second;
  const auto found = table.waiting.find(key);
  if (found == table.waiting.end()) return;
  for (const Waiting& one : found->second) {
    Client* client = table.ranks[static_cast<std::size_t>(one.rank)].client;
    if (client != nullptr && client->await == one.await) client->wire.send(FoundValue{one.await, one.index, stored});
  }
  table.waiting.erase(found);
}

void StoreServer::await(Client& client, const Frame& frame) {
  Table& table = *client.table;
  const auto asked = frame.as<AwaitValues>();
  client.await = asked.number;
  for (std::uint32_t i = 0; i < asked.keys.size(); ++i) {
    const std::string& key = asked.keys[i];
    if (const auto found = table.values.find(key); found != table.values.end()) {
      client.wire.send(FoundValue{client.await, i, found->second});
      continue;
    }
    auto& list = table.waiting[key];
    // Entries of those who have stopped waiting are dropped: a rank may ask again and again.
    std::erase_if(list, [&](const Waiting& other) {
      const Client* waiter = table.ranks[static_cast<std::size_t>(other.rank)].client;
      return waiter == nullptr || waiter->await != other.await;
    });
    list.push_back({client.rank, client.await, i});
  }
  client.wire.send(Answered{client.await});
}

void StoreServer::take_attendance(Client& client) {
  using State = RankAttendance::State;
  Attendances all;
  for (const Rank& rank : client.table->ranks) {
    const State here = rank.state == Rank::State::kJoined ? State::kHere : State::kGone;
    all.ranks.push_back({rank.state == Rank::State::kUnused ? State::kAbsent : here, rank.host});
  }
  client.wire.send(all);
}

void StoreServer::end_rank(Client& client, const std::string& how) {
  Table& table = *client.table;
  Rank& rank = table.ranks[static_cast<std::size_t>(client.rank)];
  rank.state = Rank::State::kEnded;
  rank.client = nullptr;
  client.gone = true;
  announce(table, FrameKind::kPeerGone,
           pack(PeerGone{fmt::format("rank {} (host {}, pid {}) {}", client.rank, rank.host, rank.pid, how)}));
  say_goodbye(table);
}

void StoreServer::announce(Table& table, FrameKind kind, const std::string& body) {
  if (table.announcement) return;
  table.announcement = {kind, body};
  for (const Rank& rank : table.ranks)
    if (rank.client != nullptr) rank.client->wire.send(kind, body);
}

void StoreServer::leave(Client& client) {
  Rank& rank = client.table->ranks[static_cast<std::size_t>(client.rank)];
  rank.state = Rank::State::kLeft;
  if (client.rank > 0) {
    rank.client = nullptr;
    client.wire.send(FrameKind::kGoodbye);
    close_after_sending(client);
  }
  say_goodbye(*client.table);
}

void StoreServer::say_goodbye(Table& table) {
  Rank& first = table.ranks[0];
  if (first.state != Rank::State::kLeft || first.client == nullptr) return;
  // A group that has come to its end early waits for nobody who has not come.
  if (table.any_is(Rank::State::kUnused) && !table.announcement) return;
  // A rank of the next job that comes now shall wait for the next rank 0; one of the next group, for its table.
  const auto needs_listeners = [](const auto& one) {
    return one->ranks[0].state == Rank::State::kUnused || one->ranks[0].state == Rank::State::kJoined;
  };
  if (std::ranges::none_of(tables_, needs_listeners)) stop_listening();
  if (table.any_is(Rank::State::kJoined)) return;
  first.client->wire.send(FrameKind::kGoodbye);
  close_after_sending(*first.client);
  first.client = nullptr;
}

void StoreServer::stop_listening() {
  const std::lock_guard lock(mutex_);
  if (!opened_.empty()) return;
  listens_ = false;
  listener_.stop_listening();
}

void StoreServer::report_strangers() {
  if (const auto summary = listener_.summary()) log_warn("{}", *summary);
}

void StoreServer::remove_closed() {
  if (std::erase_if(clients_, [](const auto& client) { return client->gone; }) == 0) return;
  std::erase_if(tables_, [&](const auto& table) {
    return std::ranges::none_of(clients_, [&](const auto& client) { return client->table == table.get(); });
  });
}

bool StoreServer::has_unsent() const {
  return std::any_of(clients_.begin(), clients_.end(),
                     [](const auto& client) { return client->rank > 0 && client->wire.has_unsent(); });
}

}  // namespace lockstep::comm
