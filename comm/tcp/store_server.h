// Rank 0's side of a store over TCP.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/authenticated_listener.h"
#include "base/scope.h"
#include "comm/tcp/wire.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// Note [Rendezvous]
/// The server keeps the table; every rank, rank 0 too, has one connection to it and asks for what it wants. All of it
/// is a poll loop on one thread, which sleeps unless somebody speaks: training does not notice it.
///
/// A connection belongs to no rank until it has proven that it knows the job's secret (Note [Handshake]) and its
/// identity has been checked (job, world size, a rank that has not joined). Others get the reason and are closed: a
/// stranger cannot do more than that (AuthenticatedListener). Rank 0's log names the first ones and counts all.
///
/// A rank that gives up, or whose connection ends before it has left, is the end of its group: all others of the group
/// hear of it at once.
///
/// A process may make several groups at the same rendezvous, one after the other; all ranks make them in the same
/// order. Each has a table and connections of its own, so they end in any order. A connecting process belongs to the
/// first table in which its rank has not joined yet. If rank 0 has not opened that table, the process is asked to
/// connect again.
class StoreServer {
 public:
  struct Job {
    int size = 1;
    std::string name;  // what hellos must bring along
    JobSecret secret = {};
    bool encrypts = false;
    friend bool operator==(const Job&, const Job&) = default;
  };

  /// Serves `listeners`, and a first group as open() does. The thread is running when the constructor returns.
  StoreServer(std::vector<UniqueFd> listeners, Job job, UniqueFd own);
  /// Close rank 0's ends of all open() first: what they have said is still passed on, then the thread ends, within a
  /// second.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Begins a table for another group, whose rank 0 is at the other end of the socket `own`. False, and `own` is left
  /// as it was, if the server ends: rank 0 has left all its groups, and nobody listens any more. From any thread.
  bool open(UniqueFd& own);
  const Job& job() const { return job_; }

 private:
  struct Table;

  /// One connection.
  struct Client {
    Client(UniqueFd socket, Handshake handshake) : wire(std::move(socket), std::move(handshake)) {}
    Wire wire;
    bool own = false;        // rank 0's
    Table* table = nullptr;  // of its group; nullptr: not known yet
    int rank = -1;           // -1: not known yet
    std::uint32_t await = 0;
    bool leaving = false;  // to be closed when all has been sent
    bool gone = false;
    Clock::time_point until = Clock::time_point::max();  // closed then: it does not take what it was sent last
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
  /// What the ranks of one group have joined, said and asked for.
  struct Table {
    explicit Table(int size) : ranks(static_cast<std::size_t>(size)) {}
    bool any_is(Rank::State state) const;

    std::vector<Rank> ranks;
    std::unordered_map<std::string, std::string> values;
    std::unordered_map<std::string, std::vector<Waiting>> waiting;  // by key
    std::size_t value_bytes = 0;
    std::optional<std::pair<FrameKind, std::string>> announcement;  // the first announcement
  };

  void run();
  void take_opened();
  void wake();
  void wait_and_serve();
  void take_callers();
  void read(Client& client);
  void shake_hands_with_own(Client& client);
  void obey(Client& client, Frame frame);
  void answer_all();
  void greet(Client& client);
  void refuse(Client& client, const std::string& why);
  void close_after_sending(Client& client);
  /// The first table without rank `rank`, for a process that claims to be it; nullptr: none. Throws Malformed if
  /// another process has that rank.
  Table* table_for(std::size_t rank, const std::string& host, std::uint32_t pid);
  static void set(Table& table, SetValue given);
  static void await(Client& client, const Frame& frame);
  static void take_attendance(Client& client);
  void end_rank(Client& client, const std::string& how);
  /// Sends the reason for the group's end to its ranks that have not ended, and to those that still join.
  static void announce(Table& table, FrameKind kind, const std::string& body);
  void leave(Client& client);
  void say_goodbye(Table& table);
  void stop_listening();
  void report_strangers();
  void remove_closed();
  bool has_unsent() const;

  const Job job_;
  AuthenticatedListener listener_;
  UniqueFd wakeup_;  // an eventfd
  std::mutex mutex_;
  std::vector<UniqueFd> opened_;  // not taken by the thread yet; guarded by mutex_
  bool stop_ = false;             // guarded by mutex_
  bool listens_ = true;           // guarded by mutex_

  std::vector<std::unique_ptr<Table>> tables_;  // in the order in which they were opened
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<std::pair<Client*, Frame>> asked_;  // kAwait and kAskAttendance, to be answered
  bool stopping_ = false;
  Clock::time_point accept_again_{};  // after running out of descriptors

  std::thread thread_;
};

}  // namespace lockstep::comm
