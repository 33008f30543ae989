// How ranks exchange data before they have collectives: values under keys.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::comm {

/// Note [Ranks of subgroups]
/// Launchers, logs and readers of messages know the ranks of the job. So messages and status reports of a subgroup name
/// these, with its own numbers beside them; descriptors and roots of operations have its own.
class JobRanks {
 public:
  /// Of a group of the whole job.
  JobRanks() = default;
  /// Of a subgroup, by its ranks.
  explicit JobRanks(std::vector<int> ranks) : ranks_(std::move(ranks)) {}

  bool are_all() const { return ranks_.empty(); }
  int of(int rank) const { return are_all() ? rank : ranks_[static_cast<std::size_t>(rank)]; }
  std::vector<int> of(std::vector<int> ranks) const;
  /// "rank 1 (<details>)"; of a subgroup "rank 5 (<details>, rank 1 of its subgroup)".
  std::string text(int rank, const std::string& details) const;

 private:
  std::vector<int> ranks_;  // empty: the same numbers
};

/// The ranks of a job, and a table of values that all of them see. It serves the rendezvous: small values, set once,
/// read by whoever waits for them. Sets do not wait for anybody; waits take a deadline and look at stop requests.
///
/// A key is set once in a store's life, by one rank; what others read of one that is set twice is unspecified.
///
/// Errors: a TimeoutError names the ranks that are missing. After an error the store is broken: every later call throws
/// the same one. Over TCP, a rank that fails in a store reports it to all others, whose waits then throw PeerError with
/// its code; the death of a rank is a DeviceError in everybody's waits.
///
/// One thread uses a store. The destructor waits for nobody; a normal end calls leave() on every rank.
class Store {
 public:
  static constexpr std::size_t kMostKeyBytes = 256;
  static constexpr std::size_t kMostValueBytes = 1 << 20;
  static constexpr std::size_t kMostKeys = 1 << 16;  // of one wait

  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const JobRanks& job_ranks() const { return job_ranks_; }
  /// Whether groups keep it until their end. A store over another group's operations serves the rendezvous alone.
  virtual bool lasts() const { return true; }

  /// Returns at once. Throws UsageError for a key that is empty or longer than kMostKeyBytes, or a value longer than
  /// kMostValueBytes.
  void set(const std::string& key, std::string_view value);
  /// Waits until the key is set.
  std::string get(const std::string& key, Deadline deadline);
  /// Waits until all of them are set.
  void wait(std::span<const std::string> keys, Deadline deadline);
  /// The values of `keys`, waited for until `deadline`; nothing for those that nobody has set by then. An expired
  /// deadline only looks. Throws UsageError for more than kMostKeys.
  std::vector<std::optional<std::string>> try_get(std::span<const std::string> keys, Deadline deadline);

  // Collective: every rank calls it with the same name, which is used once in a store's life.

  /// Returns when every rank has come to it.
  void barrier(const std::string& name, Deadline deadline);
  /// Every rank's text on every rank, in rank order.
  std::vector<std::string> all_gather_text(const std::string& name, std::string_view mine, Deadline deadline);
  /// Rank `root`'s text on every rank.
  std::string broadcast_text(const std::string& name, std::string_view mine, int root, Deadline deadline);

  /// Collective, blocking: nobody needs the store any more. Ends what carried it (MPI; the TCP server, which rank 0
  /// keeps until all have left). The store cannot be used afterwards.
  virtual void leave(Deadline deadline) = 0;

 protected:
  Store(int rank, int size, JobRanks job_ranks = {}) : rank_(rank), size_(size), job_ranks_(std::move(job_ranks)) {}

  virtual void do_set(const std::string& key, std::string_view value) = 0;
  virtual std::vector<std::optional<std::string>> do_get(std::span<const std::string> keys, Deadline deadline) = 0;

  struct Attendance {
    bool joined = false;
    bool left = false;
    std::string host;  // of those that have joined; kUnknownHost where whoever keeps the store has not answered
  };
  static constexpr const char* kUnknownHost = "?";
  /// As far as is known, by rank; waits at most briefly.
  virtual std::vector<Attendance> attendance() = 0;
  /// This rank gives up with `error`: it notifies the others where it can, and the store is broken. Throws PeerError
  /// where another rank has done so before.
  virtual void give_up(const TimeoutError& error) = 0;
  /// What a rank that has not joined has to be given as all others have it.
  virtual std::string joined_by() const { return "MASTER_ADDR, MASTER_PORT and WORLD_SIZE"; }

  /// As warn_of_stall(); without `missing` it names the ranks that have not joined. Asks only for what it needs.
  void maybe_warn_of_stall(const std::string& doing, double waited_seconds, std::vector<int> missing);
  /// Gives up with a TimeoutError: "<doing> timed out after … s waiting for rank 1 (host b)"; without `missing` those
  /// who have not joined.
  [[noreturn]] void time_out(const std::string& doing, double waited_seconds, std::vector<int> missing);

 private:
  using Values = std::vector<std::optional<std::string>>;
  /// Their values, when all are there; at `deadline` time_out() of what `doing(values)` says. Until then, if
  /// `speaks(values)`, which sees the values so far, logs that this stalls, and names the ranks of `missing`.
  std::vector<std::string> await(std::span<const std::string> keys, Deadline deadline,
                                 FunctionRef<std::string(const Values&)> doing, FunctionRef<bool(const Values&)> speaks,
                                 FunctionRef<std::vector<int>(const Values&)> missing);
  std::vector<std::string> await(std::span<const std::string> keys, Deadline deadline);
  /// Those of `missing` as texts; also who is first, and whether that one has never joined.
  struct Absent {
    std::vector<int> ranks;
    std::string names;
    int first = -1;
    bool never_joined = false;
  };
  Absent describe_absent(std::vector<int> missing);

  int rank_;
  int size_;
  JobRanks job_ranks_;
};

struct World;

/// A store over TCP. Joins the ranks of `world` at world.rendezvous, in whatever order they start: rank 0 serves there
/// (Note [Rendezvous]), the others connect until `deadline`. Returns when this rank has joined; the others may not
/// have.
///
/// Throws UsageError when the rendezvous' name has no address, when its port is taken (on rank 0), when something else
/// than lockstep's rank 0 answers there, and when rank 0 turns this process away (another job, another world size, a
/// rank that has joined already); TimeoutError when rank 0 does not come.
std::unique_ptr<Store> make_tcp_store(const World& world, Deadline deadline);
/// The same over TCP or MPI, whichever introduces the ranks of `world` to each other.
std::unique_ptr<Store> make_store(const World& world, Deadline deadline);

}  // namespace lockstep::comm
