#include "launcher/authenticated_listener.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/network.h"
#include "launcher/process.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kMostStrangers = 64;
constexpr int kMostComplaints = 5;
// What epoll says of the others is the number of a connection.
constexpr std::uint64_t kListener = 0;
constexpr std::uint64_t kTimer = 1;

}  // namespace

AuthenticatedListener::AuthenticatedListener(UniqueFd listener, JobSecret secret, int expected)
    : secret_(std::move(secret)),
      room_(kMostStrangers + static_cast<std::size_t>(expected)),
      listener_(std::move(listener)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  check_system(epoll_ && timer_, "watching the launcher's socket");
  watch(listener_.get(), kListener);
  watch(timer_.get(), kTimer);
}

void AuthenticatedListener::watch(int fd, std::uint64_t id) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = id;
  check_system(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0, "watching the launcher's socket");
}

UniqueFd AuthenticatedListener::accept() {
  if (ready_.empty()) serve();
  if (ready_.empty()) return {};
  UniqueFd socket = std::move(ready_.front());
  ready_.pop_front();
  return socket;
}

void AuthenticatedListener::serve() {
  std::array<epoll_event, 64> events;
  int count = 0;
  do {
    count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      const std::uint64_t id = events[static_cast<std::size_t>(i)].data.u64;
      if (id == kListener)
        accept_all();
      else if (id == kTimer)
        drop_expired();
      else
        advance(id);
    }
  } while (count == static_cast<int>(events.size()));
}

void AuthenticatedListener::accept_all() {
  for (std::size_t i = 0; i < kMostStrangers; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == EMFILE || errno == ENFILE) && !pending_.empty()) {
      drop(pending_.begin()->first, "others wait");
      continue;
    }
    if (!socket) {
      check_system(errno == EAGAIN || errno == EINTR || errno == ECONNABORTED, "accepting a rank's connection");
      return;
    }
    const auto until = Clock::now() + kHandshakeWithin;
    const std::uint64_t id = ++last_id_;
    watch(socket.get(), id);
    pending_.emplace(id, Pending{std::move(socket), Handshake::listen(Handshake::Port::kLauncher, secret_), until});
    if (pending_.size() == 1) drop_expired();  // which also sets the timer
    if (pending_.size() <= room_) continue;
    const auto silent = std::ranges::find_if(
        pending_, [](const auto& one) { return !one.second.handshake.has_heard() && !has_bytes(one.second.socket); });
    drop((silent != pending_.end() ? silent : pending_.begin())->first, "it sends nothing while others wait");
  }
}

void AuthenticatedListener::advance(std::uint64_t id) {
  const auto found = pending_.find(id);
  if (found == pending_.end()) return;
  Pending& pending = found->second;
  switch (pending.handshake.advance(pending.socket.get())) {
    case Handshake::State::kInProgress: return;
    case Handshake::State::kAsked: break;
    default: return drop(id, pending.handshake.why());
  }
  pending.handshake.accept({});
  pending.handshake.flush(pending.socket.get());
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pending.socket.get(), nullptr);
  ready_.push_back(std::move(pending.socket));
  pending_.erase(found);
}

void AuthenticatedListener::drop(std::uint64_t id, std::string why) {
  pending_.erase(id);
  if (++strangers_ > kMostComplaints) return;
  complaints_.push_back(fmt::format("warning: a connection to the launcher's socket was refused: {}{}", why,
                                    strangers_ == kMostComplaints ? "; further ones are not reported" : ""));
}

void AuthenticatedListener::drop_expired() {
  std::uint64_t times = 0;
  [[maybe_unused]] const auto read = ::read(timer_.get(), &times, sizeof times);
  while (!pending_.empty() && Clock::now() >= pending_.begin()->second.until)
    drop(pending_.begin()->first,
         pending_.begin()->second.handshake.has_heard() ? "it takes too long" : "it says nothing");
  itimerspec next = {};
  if (!pending_.empty()) {
    const auto at = pending_.begin()->second.until.time_since_epoch();
    next.it_value.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(at).count();
    next.it_value.tv_nsec = static_cast<long>((at % std::chrono::seconds(1)).count()) + 1;
  }
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &next, nullptr);
}

std::optional<std::string> AuthenticatedListener::next_complaint() {
  if (complaints_.empty()) return std::nullopt;
  std::string line = std::move(complaints_.front());
  complaints_.pop_front();
  return line;
}

}  // namespace lockstep::launcher
