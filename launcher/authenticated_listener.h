// The launcher's socket, and a helper's, at which only processes of the job get in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "base/handshake.h"
#include "base/scope.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// Accepts connections and has each of them prove the job's secret (Note [Handshake]) before a byte of it is handed
/// out. Strangers have kHandshakeWithin; past the limit, the one that has been silent for longest is closed. Never
/// blocks. Not thread-safe.
class AuthenticatedListener {
 public:
  /// `expected`: how many connections of the job may come at the same time.
  AuthenticatedListener(UniqueFd listener, JobSecret secret, int expected);

  /// Readable when accept() has something to do.
  int fd() const { return epoll_.get(); }
  /// The next connection of the job's; none where none is ready.
  UniqueFd accept();
  /// What is to be said of strangers, a line at a time: the first ones each, then how many they were.
  std::optional<std::string> next_complaint();

 private:
  struct Pending {
    UniqueFd socket;
    Handshake handshake;
    Clock::time_point until;
  };

  void watch(int fd, std::uint64_t id);
  void serve();
  void accept_all();
  void advance(std::uint64_t id);
  /// `why` may be of the connection itself.
  void drop(std::uint64_t id, std::string why);
  void drop_expired();

  JobSecret secret_;
  std::size_t room_;
  UniqueFd listener_, epoll_, timer_;
  std::map<std::uint64_t, Pending> pending_;  // in the order in which they came
  std::uint64_t last_id_ = 1;
  std::deque<UniqueFd> ready_;
  std::deque<std::string> complaints_;
  int strangers_ = 0;
};

}  // namespace lockstep::launcher
