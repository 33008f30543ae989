// Rank 0's side of a store over TCP.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "comm/tcp/wire.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// Note [Rendezvous]
/// The server keeps the table; every rank, rank 0 too, has one connection to it and asks for what it wants. All of it
/// is a poll loop on one thread, which sleeps unless somebody speaks: training does not notice it.
///
/// A connection belongs to no rank until it has proven that it knows the job's secret (Note [Handshake]) and its
/// identity has been checked (job, world size, a rank that has not joined). Others get the reason and are closed: a
/// stranger cannot do more than that. They have kHandshakeWithin. The server accepts kMostStrangers and one connection
/// of each rank at a time; past that, it closes the one that has been silent for longest, so silent strangers keep
/// nobody out. Rank 0's log names the first ones and counts all.
///
/// A rank that gives up, or whose connection ends before it has left, is the end of the job: all others hear of it at
/// once.
class StoreServer {
 public:
  struct Job {
    int size = 1;
    std::string name;  // what hellos must bring along
    JobSecret secret = {};
    bool encrypts = false;
  };

  /// Serves `listeners`, and rank 0 on the socket `own`. The thread is running when the constructor returns.
  StoreServer(std::vector<UniqueFd> listeners, UniqueFd own, Job job);
  /// Close rank 0's end of `own` first: what it has said is still passed on, then the thread ends, within a second.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  static constexpr std::size_t kMostStrangers = 64;

  /// One connection.
  struct Client {
    Client(UniqueFd socket, Handshake handshake) : wire(std::move(socket), std::move(handshake)) {}
    Wire wire;
    bool own = false;  // rank 0's
    int rank = -1;     // -1: a stranger so far
    std::uint32_t await = 0;
    bool leaving = false;  // to be closed when all has been sent
    bool gone = false;
    Clock::time_point until = Clock::time_point::max();  // closed then: no hello, or a refusal that is not taken
  };
  struct Rank {
    enum class State { kUnused, kJoined, kLeft, kEnded };
    State state = State::kUnused;
    std::string host;
    std::uint32_t pid = 0;
    Client* client = nullptr;  // while joined
  };
  struct Waiting {
    int rank = 0;
    std::uint32_t await = 0;
    std::uint32_t index = 0;
  };

  void run();
  void wait_and_serve();
  void accept_all(const UniqueFd& listener);
  void make_room();
  std::size_t count_strangers() const;
  void read(Client& client);
  void shake_hands(Client& client);
  void obey(Client& client, Frame frame);
  void answer_all();
  void greet(Client& client);
  void refuse(Client& client, const std::string& why);
  void close_after_sending(Client& client);
  void set(const std::string& key, std::string value);
  void await(Client& client, const Frame& frame);
  void add_waiting(std::vector<Waiting>& list, const Waiting& one);
  void take_attendance(Client& client);
  void end_rank(Client& client, const std::string& how);
  /// What has ended the job, to all ranks that it has not ended yet and to all that still join.
  void announce(FrameKind kind, const Packer& body);
  void leave(Client& client);
  void say_goodbye();
  void warn_of_stranger(const Client& client, const std::string& why);
  void report_strangers();
  void remove_closed();
  bool has_unsent() const;

  const Job job_;
  std::vector<UniqueFd> listeners_;
  UniqueFd stop_;  // an eventfd
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<std::pair<Client*, Frame>> asked_;  // kAwait and kAskAttendance, to be answered
  std::vector<Rank> ranks_;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::vector<Waiting>> waiting_;  // by key
  std::size_t value_bytes_ = 0;
  std::optional<std::pair<FrameKind, Packer>> announcement_;  // the first announcement
  bool stopping_ = false;
  Clock::time_point accept_again_{};  // after running out of descriptors
  int strangers_ = 0;                 // that were refused or gone, and how many of them have been reported
  int reported_ = 0;

  std::thread thread_;
};

}  // namespace lockstep::comm
