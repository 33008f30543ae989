// Groups whose ranks find each other through a table that the program has already.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// Values under keys that all ranks see: a store of PyTorch's, etcd, files that all hosts mount. A program derives from
/// it. Each key is set once, by one rank; but ".../failure" by every rank that gives up, where any of the values may
/// stay. Values are any bytes, most of them below 1 KiB.
///
/// Every rank has one, ranks that are threads of one process too. The thread that makes or uses a group calls it; where
/// groups of several threads share one, it is thread-safe. It may throw: that ends the making of the group, with a
/// DeviceError of the same text. An Error passes through as it is.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  KeyValueStore(const KeyValueStore&) = delete;
  KeyValueStore& operator=(const KeyValueStore&) = delete;

  virtual void set(const std::string& key, const std::string& value) = 0;
  /// What `key` was set to; nothing if that has not happened within `wait`. It may return with nothing before: the
  /// caller asks again after a pause. A `wait` of zero only looks.
  virtual std::optional<std::string> get(const std::string& key, Clock::duration wait) = 0;

 protected:
  KeyValueStore() = default;

 private:
  friend std::unique_ptr<ProcessGroup> make_group(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                                  const GroupOptions& options, std::vector<int> job_ranks);
  std::atomic<unsigned> groups_{0};  // that have been made over it
};

/// Joins `size` ranks, of which this process is `rank`, through `store`; collective, blocking. There is no port but
/// those of data connections between hosts. Ranks may make several groups over one `store`, one after the other or at a
/// time, in the same order on all of them: each has keys of its own ("lockstep/0/…", "lockstep/1/…"). The table must
/// have no keys of earlier jobs. The store is used mostly here; a group of several ranks keeps it until shutdown()
/// returns or the group is destroyed.
///
/// `job_ranks`, where given, are the numbers in the job of the group's ranks, by which messages name them
/// (ProcessGroup::job_rank()). Without it the group is the job, and this process's log lines have `rank`.
///
/// MASTER_ADDR, where it is set, says which of a host's addresses to try first between hosts (LOCKSTEP_SOCKET_IFNAME
/// chooses some), LOCKSTEP_JOB_SECRET is the secret with which data connections prove themselves.
///
/// Throws UsageError for a rank outside of `size`, when another process has this rank, and when ranks have been given
/// different sizes; TimeoutError, naming the ranks that have not come; DeviceError when `store` throws; PeerError when
/// another rank has given up; otherwise what the other make_group() throws. MPI does not join these ranks:
/// GroupOptions::backend = "mpi" is a UsageError.
std::unique_ptr<ProcessGroup> make_group(int rank, int size, std::shared_ptr<KeyValueStore> store,
                                         const GroupOptions& options = {}, std::vector<int> job_ranks = {});

}  // namespace lockstep::comm
