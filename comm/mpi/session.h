// MPI from its start to its end.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/world.h"

namespace lockstep::comm {

/// MPI in this process: started by the constructor, ended by finalize(), both and everything between on one thread.
/// The destructor calls nothing of MPI: a rank that ends because of an error must not wait for the others, which
/// MPI_Finalize does. A process can have one session in its life.
class Session {
 public:
  /// Throws UsageError when MPI sees another rank or size than `world`, TimeoutError when a rank does not answer.
  Session(const World& world, Deadline deadline);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const { return world_.rank; }
  int size() const { return world_.size; }
  /// For the collectives' data, and for what ranks tell each other when something is amiss.
  MPI_Comm data() const { return data_; }
  MPI_Comm notices() const { return notices_; }
  int tag_upper_bound() const { return tag_upper_bound_; }

  const std::string& host_of_rank(int rank) const { return hosts_[static_cast<std::size_t>(rank)]; }
  /// "rank 1 (host b)".
  std::string name_of_rank(int rank) const;
  /// Whether this host has fewer cores than ranks, counting only cores that the ranks may run on.
  bool oversubscribed() const { return oversubscribed_; }

  /// Collective. All requests must be complete.
  void finalize();

 private:
  void exchange_hosts(Deadline deadline);

  World world_;
  MPI_Comm data_ = MPI_COMM_NULL;
  MPI_Comm notices_ = MPI_COMM_NULL;
  int tag_upper_bound_ = 0;
  std::vector<std::string> hosts_;  // by rank
  bool oversubscribed_ = false;
};

/// MPI's text for an error code.
std::string mpi_error_text(int code);

/// Throws MpiError("<doing>: <MPI's text>") unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* doing);

}  // namespace lockstep::comm
