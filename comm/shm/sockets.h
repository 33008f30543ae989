// Which ranks of a host share a processor socket, and reductions in two levels over those.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/shm/slot_board.h"
#include "devices/cpus.h"
#include "lockstep/base/env.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// The value of LOCKSTEP_SHM_SOCKETS: "none" (default); "auto": the socket of the processors that a rank may run on; or
/// a number of sockets, each with an equal run of a host's ranks.
struct SocketSetting {
  bool by_processors = false;
  int parts = 1;

  /// Throws UsageError for another value.
  static SocketSetting from(const EnvLookup& lookup);
  friend bool operator==(const SocketSetting&, const SocketSetting&) = default;
};

/// The socket on which all of `cpus` lie; -1: there are several, or the machine does not say.
int socket_of(const devices::CpuMask& cpus);

/// Note [Two levels]
/// In one level each rank reads its slice of all ranks' regions and writes it into all of them: of R ranks on S sockets
/// with as many ranks each, R n (S - 1) / S bytes are read from other sockets, and as many written there. In two levels
/// (1) each rank reduces its slice of the regions on its own socket, in place in its own region; (2) the sums of the
/// sockets, one region each, are reduced and written back as in one level, each rank doing its part of them; (3) each
/// rank copies its slice of the result to the regions on its socket. Then n (S - 1) bytes are read from other sockets,
/// and as many written there, whatever R is. Before (2), (3) and the end, each rank waits for what others have written.
///
/// The order is that of the ranks inside a socket, then that of the sockets: other bits than in one level, but the same
/// in every run and on every rank.
class SocketLevels {
 public:
  /// `socket_of_rank`: by rank, any numbers.
  explicit SocketLevels(const std::vector<int>& socket_of_rank, int rank);

  std::size_t sockets() const { return ranks_.size(); }
  /// Whether two levels move fewer bytes between sockets than one.
  bool help() const;

  /// Where a rank's region is.
  using CopyOf = FunctionRef<std::byte*(int rank)>;
  void reduce_inside(const Op& op, CopyOf copy_of);
  void reduce_between(const Op& op, CopyOf copy_of);
  void spread_inside(const Op& op, CopyOf copy_of) const;

 private:
  const std::vector<int>& own() const { return ranks_[own_socket_]; }
  Slice own_slice(const Op& op) const;

  const int rank_, size_;
  std::vector<std::vector<int>> ranks_;  // by socket, in the order of their first ranks
  std::size_t own_socket_ = 0;
  int own_place_ = 0;                      // this rank's among own()
  std::vector<const std::byte*> sources_;  // scratch
  std::vector<std::byte*> copies_;         // scratch
};

}  // namespace lockstep::comm
