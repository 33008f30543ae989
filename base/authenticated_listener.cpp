#include "base/authenticated_listener.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/network.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostStrangers = 64;
// What epoll says of the others is the number of a connection.
constexpr std::uint64_t kTimer = 0;
constexpr std::uint64_t kListener = 1;
constexpr std::uint64_t kFirstConnection = 2;

/// Before `fd` is closed: a child that a program has forked may keep it open, and epoll would report it still.
void unwatch(const UniqueFd& epoll, const UniqueFd& fd) { ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, fd.get(), nullptr); }

}  // namespace

AuthenticatedListener::AuthenticatedListener(std::vector<UniqueFd> listeners, Settings settings)
    : settings_(std::move(settings)),
      listeners_(std::move(listeners)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      next_id_(kFirstConnection) {
  watch(timer_.get(), kTimer);
  for (const UniqueFd& listener : listeners_) watch(listener.get(), kListener);
}

void AuthenticatedListener::watch(int fd, std::uint64_t id) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw DeviceError(fmt::format("watching for connections: {}", errno_text(errno)), "raise ulimit -n");
}

std::optional<AuthenticatedListener::Caller> AuthenticatedListener::next() {
  if (ready_.empty()) serve();
  if (ready_.empty()) return std::nullopt;
  Caller caller = std::move(ready_.front());
  ready_.pop_front();
  return caller;
}

void AuthenticatedListener::serve() {
  std::array<epoll_event, 64> events;
  int count = 0;
  do {
    count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    bool expired = false, accepts = false;
    // Those who are here first: what they have said counts, though their time may be over.
    for (int i = 0; i < count; ++i) {
      const std::uint64_t id = events[static_cast<std::size_t>(i)].data.u64;
      if (id >= kFirstConnection)
        advance(id);
      else
        (id == kTimer ? expired : accepts) = true;
    }
    if (expired) drop_expired();
    if (accepts)
      for (const UniqueFd& listener : listeners_) accept_all(listener);
  } while (count == static_cast<int>(events.size()));
}

void AuthenticatedListener::accept_all(const UniqueFd& listener) {
  for (std::size_t i = 0; i < kMostStrangers; ++i) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
      if (pending_.empty())
        throw DeviceError(fmt::format("cannot accept a connection{}: {}", settings_.to, errno_text(errno)),
                          "raise ulimit -n");
      make_room();  // strangers have them, most likely
      continue;
    }
    const auto until = Clock::now() + patience_;
    const std::uint64_t id = next_id_++;
    watch(socket.get(), id);
    pending_.emplace(
        id, Caller{std::move(socket), Handshake::listen(settings_.port, settings_.secret, settings_.encrypts), until});
    if (pending_.size() == 1) drop_expired();  // which also sets the timer
    if (pending_.size() > kMostStrangers + settings_.expected) make_room();
  }
}

/// The one that has been silent for longest goes; where none is silent, the oldest.
void AuthenticatedListener::make_room() {
  const auto silent = std::ranges::find_if(
      pending_, [](const auto& one) { return !one.second.handshake.has_heard() && !has_bytes(one.second.socket); });
  drop((silent != pending_.end() ? silent : pending_.begin())->first, "it sends nothing while others wait");
}

void AuthenticatedListener::advance(std::uint64_t id) {
  const auto found = pending_.find(id);
  if (found == pending_.end()) return;
  Caller& caller = found->second;
  const auto state = caller.handshake.advance(caller.socket.get());
  if (state == Handshake::State::kInProgress) return;
  unwatch(epoll_, caller.socket);
  if (state == Handshake::State::kAsked)
    ready_.push_back(std::move(caller));
  else if (caller.handshake.failure() != Handshake::Failure::kGone)
    complain(caller.socket, caller.handshake.why());
  else if (settings_.counts_gone)
    ++strangers_;  // somebody who only looked whether the port is open, or who has been ended: not worth a line
  pending_.erase(found);
}

void AuthenticatedListener::drop(std::uint64_t id, const char* why) {
  const auto found = pending_.find(id);
  complain(found->second.socket, why);
  unwatch(epoll_, found->second.socket);
  pending_.erase(found);
}

void AuthenticatedListener::stop_listening() {
  for (const UniqueFd& listener : listeners_) unwatch(epoll_, listener);
  listeners_.clear();
}

void AuthenticatedListener::close() {
  stop_listening();
  for (const auto& [id, caller] : pending_) unwatch(epoll_, caller.socket);
  pending_.clear();
  ready_.clear();
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

void AuthenticatedListener::complain(const UniqueFd& socket, const std::string& why) {
  if (++strangers_ > settings_.most_complaints) return;
  reported_ = strangers_;
  const auto peer = peer_address(socket);
  complaints_.push_back(
      fmt::format("a connection{}{}{} was refused: {}{}", peer && peer->port() > 0 ? " from " : "",
                  peer && peer->port() > 0 ? peer->text() : "", settings_.to, why,
                  strangers_ == settings_.most_complaints ? "; further ones are counted, not reported" : ""));
}

std::optional<std::string> AuthenticatedListener::summary() {
  if (reported_ == strangers_) return std::nullopt;
  reported_ = strangers_;
  return fmt::format("refused {} connection{}{} from outside this job so far", strangers_, strangers_ == 1 ? "" : "s",
                     settings_.to);
}

std::optional<std::string> AuthenticatedListener::next_complaint() {
  if (complaints_.empty()) return std::nullopt;
  std::string line = std::move(complaints_.front());
  complaints_.pop_front();
  return line;
}

}  // namespace lockstep
