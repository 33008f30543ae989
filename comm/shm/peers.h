// The other processes of a job on this host.
#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "comm/store.h"

namespace lockstep::comm {

/// Who the ranks of `store` are, and whether they live. Not thread-safe.
class Peers {
 public:
  /// Collective; the store is not kept.
  Peers(Store& store, Deadline deadline);

  /// The first rank that is on another host than rank 0; -1 if all are on one.
  int elsewhere() const { return elsewhere_; }
  /// Whether the ranks may run on fewer cores than they are.
  bool oversubscribed() const { return oversubscribed_; }

  /// "rank 1 (host b)".
  std::string name_of(int rank) const;
  /// "rank 1 (host b, pid 4711)".
  std::string full_name_of(int rank) const;

  /// Starts to watch the others' processes: once it is known that they are on this host.
  void watch(int own_rank);
  /// Whether the process of `rank` has ended, though it may not have been waited for.
  bool has_ended(int rank) const;

 private:
  struct Peer {
    std::string host;
    int pid = 0;
    UniqueFd process;  // a pidfd; none where the kernel has none
  };
  std::vector<Peer> peers_;
  int elsewhere_ = -1;
  bool oversubscribed_ = false;
};

}  // namespace lockstep::comm
