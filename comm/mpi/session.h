// MPI from its start to its end.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "comm/store.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

/// Note [Whose MPI]
/// MPI starts and ends once in a process. Where the program has started it, sessions use it on communicators of their
/// own, leave MPI_COMM_WORLD's error handler as it is, and do not end it. Otherwise the first session starts it, and
/// the last one of those that are there at a time ends it; a session after that cannot be had. MPI allows one thread,
/// the one that has started it, unless the program has asked for MPI_THREAD_MULTIPLE.
///
/// Which ranks a session is of, where they are not those of MPI_COMM_WORLD.
struct MpiRanks {
  MPI_Comm comm = MPI_COMM_NULL;  // an intracommunicator; MPI_COMM_NULL: MPI_COMM_WORLD, of an MPI that may not run yet
  bool owned = false;             // the session frees it
  JobRanks job_ranks = {};
  bool oversubscribed = false;  // as far as a group that they are a part of knows
};

/// MPI from the constructor to finalize(), both and everything between on one thread. The destructor calls nothing of
/// MPI: a rank that ends because of an error must not wait for the others, which MPI_Finalize does. Several sessions
/// may be there at a time, made and finalised in the same order on all ranks.
class Session {
 public:
  /// Throws UsageError when MPI has been ended already, when it may not be called by this thread, and when it sees
  /// another rank or size than `world`; TimeoutError when a rank does not answer.
  Session(const World& world, Deadline deadline, MpiRanks ranks = {});
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const { return world_.rank; }
  int size() const { return world_.size; }
  const JobRanks& job_ranks() const { return ranks_.job_ranks; }
  /// For the collectives' data, for notices when something is amiss, and for sends and receives.
  MPI_Comm data() const { return data_; }
  MPI_Comm notices() const { return notices_; }
  MPI_Comm pairs() const { return pairs_; }
  int tag_upper_bound() const { return tag_upper_bound_; }

  const std::string& host_of_rank(int rank) const { return hosts_[static_cast<std::size_t>(rank)]; }
  /// "rank 1 (host b)"; of a subgroup "rank 5 (host b, rank 1 of its subgroup)".
  std::string name_of_rank(int rank) const;
  /// Whether this host has fewer cores than ranks, counting only cores that the ranks may run on.
  bool oversubscribed() const { return oversubscribed_; }

  /// Collective: another communicator of all ranks, which finalize() frees.
  MPI_Comm duplicate();
  /// Collective among `ranks`, this one included: a communicator of them in this order, which the caller frees.
  MPI_Comm make_comm_of(const std::vector<int>& ranks) const;

  /// Collective. All requests must be complete, or have been freed.
  void finalize();

  /// Whether a thread that is not the calling one may have a session.
  static bool allows_threads();

 private:
  void start_or_join();
  void exchange_hosts(Deadline deadline);

  World world_;
  MpiRanks ranks_;
  MPI_Comm data_ = MPI_COMM_NULL;
  MPI_Comm notices_ = MPI_COMM_NULL;
  MPI_Comm pairs_ = MPI_COMM_NULL;
  std::vector<MPI_Comm> comms_;  // all of them
  int tag_upper_bound_ = 0;
  std::vector<std::string> hosts_;  // by rank
  bool oversubscribed_ = false;
};

/// Throws UsageError where MPI, which runs, does not allow this thread to call it.
void check_mpi_thread();

/// MPI's text for an error code.
std::string mpi_error_text(int code);

/// Throws MpiError("<doing>: <MPI's text>") unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* doing);

}  // namespace lockstep::comm
