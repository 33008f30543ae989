#include "comm/store.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/network.h"
#include "base/signals.h"
#include "comm/stall.h"
#include "comm/tcp/socket.h"
#include "comm/tcp/store_server.h"
#include "comm/tcp/wire.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {
namespace {

// Between two looks at stop requests and the clock.
constexpr auto kNap = std::chrono::milliseconds(50);
// Extra time after a deadline for an immediate answer of the server, on a busy machine.
constexpr auto kGrace = std::chrono::seconds(1);
// Before this rank connects anew, at first and at most, and how often it does after its connection was closed without a
// word.
constexpr auto kFirstRejoinPause = std::chrono::milliseconds(20);
constexpr auto kLongestRejoinPause = std::chrono::milliseconds(200);
constexpr int kMostClosed = 50;
constexpr const char* kSameRendezvous =
    "give all ranks of a job the same MASTER_ADDR, MASTER_PORT, WORLD_SIZE, LOCKSTEP_JOB_SECRET (or none) and "
    "--encrypt "
    "(or not), each its own RANK, and other jobs another MASTER_PORT";
constexpr const char* kOtherPort = "set MASTER_PORT to a free port on all ranks";

/// The servers of this process, by where they listen: the groups of a job share one.
class Servers {
 public:
  /// Opens a table for `own` at the server of `rendezvous`, which `listen` makes if there is none.
  static std::shared_ptr<StoreServer> open(const Rendezvous& rendezvous, const StoreServer::Job& job, UniqueFd own,
                                           FunctionRef<std::vector<UniqueFd>()> listen) {
    const std::lock_guard lock(mutex());
    std::weak_ptr<StoreServer>& known = all()[fmt::format("{} {}", text_of(rendezvous), rendezvous.listen)];
    if (auto server = known.lock()) {
      if (server->job() != job)
        throw UsageError(fmt::format("this process has another group at {}, of another job, size, secret or encryption",
                                     text_of(rendezvous)),
                         "make groups of one job alike, or shut the first one down before");
      if (server->open(own)) return server;
    }
    auto server = std::make_shared<StoreServer>(listen(), job, std::move(own));
    known = server;
    return server;
  }
  /// The last one to close a server waits for its end here, so that open() finds its port free.
  static void close(std::shared_ptr<StoreServer>& server) {
    if (server == nullptr) return;
    const std::lock_guard lock(mutex());
    server.reset();
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::map<std::string, std::weak_ptr<StoreServer>>& all() {
    static auto& all = *new std::map<std::string, std::weak_ptr<StoreServer>>();  // guarded by mutex()
    return all;
  }
};

class TcpStore final : public Store {
 public:
  TcpStore(const World& world, Deadline deadline);
  ~TcpStore() override { close(); }

  void leave(Deadline deadline) override;

 private:
  void do_set(const std::string& key, std::string_view value) override;
  std::vector<std::optional<std::string>> do_get(std::span<const std::string> keys, Deadline deadline) override;
  std::vector<Attendance> attendance() override;
  void give_up(const TimeoutError& error) override;

  std::vector<Attendance> ask_who_is_here();
  void close();
  void serve_here();
  /// False where the job that is there has ended for this rank.
  bool join(Deadline deadline);
  /// False when `deadline` passes first.
  bool shake_hands(Deadline deadline);
  Handshake make_handshake() const;

  enum class Passes : std::uint8_t { kNothing, kFailuresOfPeers };
  /// Takes frames until `take`, which sees all but announcements, returns true; false when `deadline` passes first.
  /// Announcements are thrown unless `passes` says otherwise, and the end of the connection always is.
  template <class Take>
  bool listen_until(Take&& take, Deadline deadline, Passes passes = Passes::kNothing);
  /// One or two of a host, for what all of them would say: its first rank may be the one that is waited for.
  bool one_of_the_first() const { return world_.local_rank <= 1; }
  void wait_for_server(Deadline deadline);
  [[noreturn]] void throw_announced(const Frame& frame) const;
  /// Runs `action` unless the store is broken. What it throws breaks the store, and the others are notified of this
  /// rank's own errors.
  template <class Action>
  auto guarded(Action&& action);
  void tell_the_others(const Error& error);
  std::size_t most_frame_bytes() const;

  const World world_;
  std::string first_host_;               // of rank 0
  std::shared_ptr<StoreServer> server_;  // on rank 0; ends after wire_
  std::unique_ptr<Wire> wire_;           // to the server
  int closed_ = 0;                       // connections, without an answer
  Clock::duration pause_ = kFirstRejoinPause;
  std::uint32_t awaits_ = 0;
  Failure failure_;
};

template <class Action>
auto TcpStore::guarded(Action&& action) {
  return failure_.guard([&] {
    try {
      return action();
    } catch (const Malformed& error) {
      throw DeviceError(fmt::format("rank 0 (host {}) is no longer understood: {}", first_host_, error.what()),
                        "start every rank with the same binary");
    } catch (const InterruptedError& error) {
      tell_the_others(error);
      throw;
    }
  });
}

namespace {

/// Nobody would ever come.
void check_loopback(const Rendezvous& rendezvous) {
  if (const auto problem = loopback_problem(rendezvous.host))
    throw DeviceError(
        fmt::format("MASTER_ADDR=\"{}\": this host's loopback network is not there: {}", rendezvous.host, *problem),
        "bring it up: ip link set lo up; or give another address of rank 0's host");
}

}  // namespace

TcpStore::TcpStore(const World& world, Deadline deadline) : Store(world.rank, world.size), world_(world) {
  if (world.size > 1) check_loopback(world.rendezvous);
  try {
    if (world.rank == 0) serve_here();
    while (!join(deadline)) {
    }
  } catch (...) {
    close();
    throw;
  }
}

void TcpStore::close() {
  wire_.reset();
  Servers::close(server_);
}

void TcpStore::serve_here() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    throw DeviceError(fmt::format("making a pair of sockets: {}", errno_text(errno)), "raise ulimit -n");
  wire_ = std::make_unique<Wire>(UniqueFd(ends[0]), make_handshake());
  UniqueFd own(ends[1]);
  const auto& rendezvous = world_.rendezvous;
  const auto listen = [&] {
    auto listeners = listen_at(rendezvous, world_.local_size != world_.size);
    if (rendezvous.secret.empty() && !are_loopback(listeners))
      log_warn(
          "this job has no secret: whoever reaches port {} of this host can join it in the place of a rank, and end or "
          "alter it → set {} to the same random text on all ranks (openssl rand -hex 16), or use lockstep launch",
          rendezvous.port, kJobSecretVariable);
    return listeners;
  };
  server_ = Servers::open(rendezvous, {world_.size, rendezvous.job, rendezvous.secret, rendezvous.encrypts},
                          std::move(own), listen);
}

Handshake TcpStore::make_handshake() const {
  const StoreIdentity who{static_cast<std::uint32_t>(size()), static_cast<std::uint32_t>(rank()),
                          static_cast<std::uint32_t>(::getpid()), host_name(), world_.rendezvous.job};
  return Handshake::call(Handshake::Port::kStore, world_.rendezvous.secret, pack(who), world_.rendezvous.encrypts);
}

bool TcpStore::join(Deadline deadline) {
  if (rank() != 0)
    wire_ = std::make_unique<Wire>(connect_to(world_.rendezvous, deadline, one_of_the_first()), make_handshake());
  const std::string where = text_of(world_.rendezvous);
  const auto begin = Clock::now();
  if (!shake_hands(deadline))
    throw TimeoutError(fmt::format("what listens at {} (MASTER_ADDR:MASTER_PORT) has not answered within {:.3g} s",
                                   where, seconds_between(begin, Clock::now())),
                       kSameRendezvous);
  const Handshake& handshake = wire_->handshake();
  switch (handshake.failure()) {
    case Handshake::Failure::kNone: {
      const auto answer = unpack<StoreAnswer>(handshake.answer());
      first_host_ = answer.host;
      if (!answer.come_again) return true;
      break;
    }
    case Handshake::Failure::kRefused:
      throw UsageError(fmt::format("rank 0 at {} has refused this process: {}", where, handshake.why()),
                       kSameRendezvous);
    case Handshake::Failure::kSecret:
      throw UsageError(fmt::format("what listens at {} (MASTER_ADDR:MASTER_PORT) is not this job's rank 0: {}", where,
                                   handshake.why()),
                       kSameRendezvous);
    case Handshake::Failure::kGone:
      // Closed without a word: a rank 0 that was just ending, if it happens once.
      if (++closed_ >= kMostClosed)
        throw UsageError(
            fmt::format("what listens at {} (MASTER_ADDR:MASTER_PORT) closes the connection without an answer", where),
            kOtherPort);
      break;
    case Handshake::Failure::kMalformed:
    case Handshake::Failure::kVersion:
      throw UsageError(fmt::format("what listens at {} (MASTER_ADDR:MASTER_PORT) is no rank 0 of lockstep: {}", where,
                                   handshake.why()),
                       kOtherPort);
  }
  if (deadline.expired())
    throw TimeoutError(
        fmt::format("rank 0 at {} (MASTER_ADDR:MASTER_PORT) has not come to this group: it is still in another one",
                    where),
        "make the same groups in the same order on all ranks, and give other jobs another MASTER_PORT");
  throw_if_stopped("joining the other ranks");
  std::this_thread::sleep_for(std::min<Clock::duration>(pause_, deadline.remaining()));
  pause_ = std::min<Clock::duration>(2 * pause_, kLongestRejoinPause);
  return false;
}

bool TcpStore::shake_hands(Deadline deadline) {
  StallNotice stall;
  while (wire_->advance() == Handshake::State::kInProgress) {
    throw_if_stopped("joining the other ranks");
    if (deadline.expired()) return false;
    if (stall.is_due(0, Clock::now()) && one_of_the_first())
      warn_of_stall("joining the other ranks", stall.waited_seconds(), "rank 0 at " + text_of(world_.rendezvous));
    const auto nap = std::min<Clock::duration>(kNap, deadline.remaining());
    const short events = static_cast<short>(POLLIN | (wire_->has_unsent() ? POLLOUT : 0));
    pollfd look{wire_->fd(), events, 0};
    ::poll(&look, 1, static_cast<int>(std::chrono::duration_cast<Millis>(nap).count()) + 1);
  }
  return true;
}

void TcpStore::do_set(const std::string& key, std::string_view value) {
  guarded([&] { wire_->send(SetValue{key, std::string(value)}); });
}

std::vector<std::optional<std::string>> TcpStore::do_get(std::span<const std::string> keys, Deadline deadline) {
  return guarded([&] {
    const std::uint32_t number = ++awaits_;
    wire_->send(AwaitValues{number, {keys.begin(), keys.end()}});

    std::vector<std::optional<std::string>> values(keys.size());
    std::size_t unset = keys.size();
    bool answered = false;
    const auto take = [&](const Frame& frame) {
      if (frame.kind == FrameKind::kAnswered && frame.as<Answered>().number == number) answered = true;
      if (frame.kind == FrameKind::kValue)
        if (auto found = frame.as<FoundValue>(); found.number == number) {
          if (found.index >= values.size() || values[found.index]) throw Malformed("a value that nobody has asked for");
          values[found.index] = std::move(found.value);
          --unset;
        }
      return unset == 0 || (answered && deadline.expired());
    };
    if (!listen_until(take, deadline) && !answered) listen_until(take, Deadline::after(kGrace));
    return values;
  });
}

std::vector<Store::Attendance> TcpStore::attendance() {
  return guarded([&] { return ask_who_is_here(); });
}

std::vector<Store::Attendance> TcpStore::ask_who_is_here() {
  std::vector<Attendance> all(static_cast<std::size_t>(size()), Attendance{true, false, kUnknownHost});
  wire_->send(FrameKind::kAskAttendance);
  listen_until(
      [&](const Frame& frame) {
        if (frame.kind != FrameKind::kAttendance) return false;
        const auto ranks = frame.as<Attendances>().ranks;
        if (ranks.size() != all.size()) throw Malformed("the attendance of another world");
        using State = RankAttendance::State;
        std::ranges::transform(ranks, all.begin(), [](const RankAttendance& one) {
          return Attendance{one.state != State::kAbsent, one.state == State::kGone, one.host};
        });
        return true;
      },
      Deadline::after(kGrace));
  return all;
}

void TcpStore::give_up(const TimeoutError& error) {
  failure_.guard([&] {
    tell_the_others(error);
    listen_until([](const Frame& frame) { return frame.kind == FrameKind::kGoodbye; }, Deadline::after(kGrace));
  });
  failure_.set(std::make_exception_ptr(error));
}

void TcpStore::tell_the_others(const Error& error) {
  wire_->send(FrameKind::kGiveUp,
              pack(GivenUp{static_cast<std::uint32_t>(error.code()), error.line().substr(0, kMostValueBytes)}));
}

void TcpStore::leave(Deadline deadline) {
  guarded([&] {
    const auto begin = Clock::now();
    wire_->send(FrameKind::kLeave);
    // Whoever fails or ends now has left, as far as this rank is concerned.
    const bool gone = listen_until([](const Frame& frame) { return frame.kind == FrameKind::kGoodbye; }, deadline,
                                   Passes::kFailuresOfPeers);
    if (gone) return;
    std::vector<int> missing;
    const auto present = attendance();
    for (int r = 0; r < size(); ++r)
      if (r != rank() && !present[static_cast<std::size_t>(r)].left) missing.push_back(r);
    time_out("leaving", seconds_between(begin, Clock::now()), missing);
  });
  failure_.set(std::make_exception_ptr(
      UsageError("the ranks have shut this group down", "issue nothing after shutdown(), or make another group")));
  close();
}

template <class Take>
bool TcpStore::listen_until(Take&& take, Deadline deadline, Passes passes) {
  for (;;) {
    while (const auto frame = wire_->next(most_frame_bytes())) {
      const bool announced = frame->kind == FrameKind::kPeerGaveUp || frame->kind == FrameKind::kPeerGone;
      if (announced && passes == Passes::kNothing) throw_announced(*frame);
      if (!announced && take(*frame)) return true;
    }
    throw_if_stopped("waiting for the other ranks");
    if (deadline.expired()) return false;
    wait_for_server(deadline);
  }
}

void TcpStore::wait_for_server(Deadline deadline) {
  const auto nap = std::min<Clock::duration>(kNap, deadline.remaining());
  const short events = static_cast<short>(POLLIN | (wire_->has_unsent() ? POLLOUT : 0));
  pollfd look{wire_->fd(), events, 0};
  if (::poll(&look, 1, static_cast<int>(std::chrono::duration_cast<Millis>(nap).count()) + 1) <= 0) return;
  if ((look.revents & POLLOUT) != 0) wire_->flush();
  if ((look.revents & ~POLLOUT) == 0 || wire_->receive() != Wire::Received::kGone) return;
  throw_if_stopped("waiting for the other ranks");
  throw DeviceError(fmt::format("rank 0 (host {}) has ended: the connection to {} is closed",
                                first_host_.empty() ? world_.rendezvous.host : first_host_, text_of(world_.rendezvous)),
                    "look at the log of rank 0");
}

void TcpStore::throw_announced(const Frame& frame) const {
  if (frame.kind == FrameKind::kPeerGaveUp) {
    const auto [code, why] = frame.as<GivenUp>();
    if (!is_failure(code))
      throw DeviceError(
          fmt::format("rank 0 (host {}) says that a rank has given up with exit code {}", first_host_, code),
          "start every rank with the same binary");
    throw PeerError(static_cast<int>(code), why);
  }
  throw_if_stopped("waiting for the other ranks");  // as that one has been, most likely
  throw DeviceError(fmt::format("{} during the rendezvous of the ranks", frame.as<PeerGone>().what),
                    "look at its log, and at dmesg if it has none");
}

std::size_t TcpStore::most_frame_bytes() const {
  return kMostValueBytes + 4 * kMostKeyBytes + static_cast<std::size_t>(size()) * (kMostKeyBytes + 8);
}

}  // namespace

std::unique_ptr<Store> make_tcp_store(const World& world, Deadline deadline) {
  return std::make_unique<TcpStore>(world, deadline);
}

}  // namespace lockstep::comm
