// What ranks that wait say to each other.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/mpi/session.h"
#include "comm/mpi/tag.h"
#include "comm/stall.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// Note [Wait notices]
/// A rank that has waited for a while sends all others a notice of the operation that it is in, once per operation, and
/// reads their notices. It is an OutOfStepError at once if two ranks are in different operations under the same number,
/// or if one has finished the operation in which the other waits for it. A rank that is merely late reports nothing,
/// and the others wait for it until the deadline.
///
/// Used by the thread that owns MPI, when an operation has stood still; costs nothing before.
class WaitNotices {
 public:
  /// `patience`: how long a rank whose message is another operation's has to say which, as it finds out later than this
  /// one.
  WaitNotices(const Session& session, const TagLayout& tags, Clock::duration patience);
  ~WaitNotices();
  WaitNotices(const WaitNotices&) = delete;
  WaitNotices& operator=(const WaitNotices&) = delete;

  /// `op` is the first operation that is not complete, `missing` the ranks whose messages it waits for, `completed`
  /// how many operations are. Throws OutOfStepError if another rank can never complete it together with this one.
  void check(const Op& op, std::uint64_t completed, const std::vector<int>& missing);

  /// What the ranks of `missing` have reported, and the others.
  void find_states(const Op& op, const std::vector<int>& missing, std::span<PeerState> states);
  /// Whether this rank is the lowest one that has reported waiting in `op`.
  bool is_first_to_wait(const Op& op) const;

  /// Lets go of notices that nobody has taken; before the session is finalised.
  void abandon_notices();

 private:
  /// What a rank is in, and how far it has come.
  struct Notice {
    OpDescriptor op;  // its op_index 0: none yet
    std::uint64_t completed = 0;
  };

  void notify(const Op& op, std::uint64_t completed);
  void listen();
  void compare_notices(const Op& op, const std::vector<int>& missing) const;
  void probe_messages(const Op& op);
  [[noreturn]] void out_of_step(int peer, const std::string& theirs, const Op& ours) const;

  const Session& session_;
  const TagLayout& tags_;
  const Clock::duration patience_;
  std::shared_ptr<Notice> mine_ = std::make_shared<Notice>();
  std::vector<MPI_Request> sending_;  // of mine_
  std::vector<Notice> heard_;         // the latest of each rank
  // A message of something else under the number of an operation, since when: its sender's notice says more.
  std::uint64_t suspected_index_ = 0;
  RunningClock::time_point suspected_since_{};
};

}  // namespace lockstep::comm
