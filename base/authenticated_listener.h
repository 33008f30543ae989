// Sockets at which only processes of the job get in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/handshake.h"
#include "base/scope.h"
#include "lockstep/base/deadline.h"

namespace lockstep {

/// Accepts connections and has each of them prove the job's secret (Note [Handshake]) before a byte of it is handed
/// out. Callers have a limited time; past the number that is possible, the one that has been silent for longest is
/// closed, so silent strangers keep nobody out. Never blocks. Not thread-safe.
class AuthenticatedListener {
 public:
  struct Settings {
    Handshake::Port port = Handshake::Port::kStore;
    JobSecret secret = {};
    bool encrypts = false;
    std::size_t expected = 1;  // connections of the job at the same time
    std::string to = {};       // " to MASTER_PORT": in complaints
    int most_complaints = 5;   // of a line each
    bool counts_gone = false;  // who closes the connection is a stranger too, not a process that tries another way
  };
  /// Whose proof is right: accept() or refuse() is to follow, and flush().
  struct Caller {
    UniqueFd socket;
    Handshake handshake;
    Clock::time_point until;  // it may have given up since
  };

  /// Listens at sockets that do not block.
  AuthenticatedListener(std::vector<UniqueFd> listeners, Settings settings);

  /// Readable when next() has something to do.
  int fd() const { return epoll_.get(); }
  /// None where none is ready. Throws DeviceError when this process is out of descriptors and no stranger has any.
  std::optional<Caller> next();
  /// Nobody can call any more; those who have are heard.
  void stop_listening();
  /// As if nobody had called.
  void close();
  /// For a handshake, of those who call from now on.
  void give_callers(Clock::duration patience) { patience_ = patience; }

  /// Counts `socket` among the strangers: its proof was right, but not what it says of itself.
  void complain(const UniqueFd& socket, const std::string& why);
  /// What is to be said of strangers, a line at a time.
  std::optional<std::string> next_complaint();
  /// "refused 17 connections to MASTER_PORT from outside this job so far", if some were in no complaint or summary yet.
  std::optional<std::string> summary();

 private:
  void watch(int fd, std::uint64_t id);
  void serve();
  void accept_all(const UniqueFd& listener);
  void advance(std::uint64_t id);
  void make_room();
  void drop(std::uint64_t id, const char* why);
  void drop_expired();

  Settings settings_;
  Clock::duration patience_ = kHandshakeWithin;
  std::vector<UniqueFd> listeners_;
  UniqueFd epoll_, timer_;
  std::map<std::uint64_t, Caller> pending_;  // in the order in which they came
  std::uint64_t next_id_;
  std::deque<Caller> ready_;
  std::deque<std::string> complaints_;
  int strangers_ = 0, reported_ = 0;
};

}  // namespace lockstep
