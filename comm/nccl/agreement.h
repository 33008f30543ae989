// What the ranks of an NCCL group exchange through the CPU's group.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/nccl/communicator.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

/// How long ranks that have given up wait for each other's answers: they did not begin to wait at the same moment.
Clock::duration patience_of(Clock::duration timeout);

/// What a rank reports about itself.
struct RankProgress {
  std::uint64_t issued = 0;     // operations
  std::uint64_t completed = 0;  // of them
  std::int64_t failure = 0;     // exit code of what it has failed with, 0 for nothing
  std::uint64_t words = 0;      // a hash of its text
};

/// Note [Progress exchange]
/// A collective of NCCL that does not end does not name the missing ranks. The CPU's group of the same ranks does:
/// every rank that gives up reports its progress there, and waits a little for the others. The answers are compared;
/// the CPU's group names the ranks that do not answer. After that failure the CPU's group is broken too, which does no
/// harm: the job is.
class ProgressExchange {
 public:
  /// Collective. `control` must outlive it.
  explicit ProgressExchange(ProcessGroup& control);

  struct Answers {
    std::vector<RankProgress> all;  // by rank; empty where somebody has not answered
    std::exception_ptr silence;     // why `all` is empty: the error of the CPU's group, which names the ranks
  };
  /// For every rank that comes to it by the deadline. Throws InterruptedError alone.
  Answers ask(const RankProgress& mine, Deadline deadline);

 private:
  ProcessGroup& control_;
  std::unique_ptr<Arena> arena_;
};

/// The end of "allreduce #8 timed out after 60 s": " waiting for rank 1, which has issued 5 and completed 5 operations"
/// for each rank that has answered and not issued operation `sequence`; if there is none, that all have issued it.
std::string waiting_text(const ProgressExchange::Answers& answers, std::uint64_t sequence);

/// Whose log is to be looked at: the first rank that is late, -1 where none is known.
int first_late(const ProgressExchange::Answers& answers, std::uint64_t sequence);

/// Note [Histories]
/// NCCL sums whatever comes: a rank that has left out a step adds its gradients to those of other steps from then on.
/// So the ranks compare digests of all that they have issued, through the CPU's group: every hundred operations, which
/// all of them come to at the same number of operations whatever they have left out, and when somebody asks.
class HistoryCheck {
 public:
  /// Collective. `control` must outlive it.
  explicit HistoryCheck(ProcessGroup& control);

  /// Collective, blocking: throws OutOfStepError on every rank unless all have the same history, of which `last` is the
  /// end. One operation of 128 bytes per rank.
  void compare(const OpDescriptor& last);

 private:
  [[noreturn]] void fail() const;

  struct alignas(kArenaAlignment) Line {  // a rank's slice
    OpDescriptor last;
  };
  std::span<const Line> lines() const;

  ProcessGroup& control_;
  std::unique_ptr<Arena> arena_;
};

/// NCCL refuses two ranks on one GPU of one host. All but the first of them get a host id of their own (NCCL_HOSTID,
/// unless it is set), so that NCCL connects them like hosts: over sockets. Collective; before NCCL is asked for
/// anything, as it looks once. Whether ranks may share GPUs at all is for others to say.
void separate_sharing_ranks(ProcessGroup& control);

/// Rank 0's id for a communicator, on every rank. Collective. Throws NcclError, and PeerError on those that could not
/// receive it.
ncclUniqueId agree_on_id(ProcessGroup& control, const NcclApi& api);

/// Joins `communicator` on every rank. Collective: the ranks exchange the outcome through the control group, and one of
/// them speaks for all with the same error. `look` is called a few times a millisecond meanwhile, and ends the wait by
/// throwing. Throws NcclError, TimeoutError naming those who do not come, PeerError.
void join_ranks(Communicator& communicator, const ncclUniqueId& id, ProcessGroup& control,
                ProgressExchange& progress_exchange, Clock::duration timeout, FunctionRef<void()> look);

}  // namespace lockstep::comm
