// The other processes of a job, and the hosts that they are on.
#pragma once

#include <string>
#include <vector>

#include "base/scope.h"
#include "comm/store.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// Who the ranks of `store` are, which of them are on one host, and whether those on this one live. Not thread-safe.
///
/// A host is where processes can share memory and need no network to talk: the same name (LOCKSTEP_HOST_NAME), the same
/// kernel since its start, and the same namespaces of processes and of networks. So containers and network namespaces
/// of one machine are hosts of their own.
class Peers {
 public:
  Peers() = default;
  /// Collective; the store is not kept. Of a subgroup, `oversubscribed` is what its parent knows of more ranks.
  Peers(Store& store, Deadline deadline, bool oversubscribed = false);

  /// The first rank that is on another host than rank 0; -1 if all are on one.
  int elsewhere() const { return elsewhere_; }
  /// The ranks of each host in ascending order, hosts in the order of their first ranks.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  /// Which of hosts() `rank` is on.
  int host_of(int rank) const { return peers_[static_cast<std::size_t>(rank)].host_index; }
  /// Of ranks that are all on one host: the socket of each (SocketSetting); empty where nothing asks for two levels, or
  /// a rank may run on several sockets.
  const std::vector<int>& sockets() const { return sockets_; }
  /// Whether the ranks of this machine may run on fewer cores than they are.
  bool oversubscribed() const { return oversubscribed_; }

  int pid_of(int rank) const { return peers_[static_cast<std::size_t>(rank)].pid; }
  /// Their numbers in the job (Note [Ranks of subgroups]).
  const JobRanks& job_ranks() const { return job_ranks_; }
  /// "rank 1 (host b)"; of a subgroup "rank 5 (host b, rank 1 of its subgroup)".
  std::string name_of(int rank) const;
  /// "rank 1 (host b, pid 4711)".
  std::string full_name_of(int rank) const;

  /// Starts to watch the other processes on this rank's host.
  void watch(int own_rank);
  /// Whether the process of `rank`, which is on this host, has ended, though it may not have been waited for.
  bool has_ended(int rank) const;
  /// The DeviceError of a rank whose process has ended; `waiting_in`, if any, is what this rank waits for it in.
  [[noreturn]] void throw_ended(int rank, const std::string& waiting_in) const;

 private:
  struct Peer {
    std::string host;
    int pid = 0;
    int host_index = 0;  // in hosts_
    UniqueFd process;    // a pidfd; none where the kernel has none
  };
  JobRanks job_ranks_;
  std::vector<Peer> peers_;
  std::vector<std::vector<int>> hosts_;
  std::vector<int> sockets_;
  int elsewhere_ = -1;
  bool oversubscribed_ = false;
};

}  // namespace lockstep::comm
