// Where every rank is, asked when something has gone wrong.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/process_group.h"

namespace lockstep::comm {

/// How long ranks that have given up wait for each other's answers: they did not begin to wait at the same moment.
Clock::duration patience_of(Clock::duration timeout);

/// What a rank tells the others of itself.
struct RankProgress {
  std::uint64_t issued = 0;     // operations
  std::uint64_t completed = 0;  // of them
  std::int64_t failure = 0;     // exit code of what it has failed with, 0 for nothing
  std::uint64_t words = 0;      // a hash of its text
};

/// Note [Progress exchange]
/// A collective of NCCL that does not end says nothing of who is missing. The CPU's group of the same ranks does: every
/// rank that gives up tells it where it is, and waits a little for the others. Those who answer can be compared; those
/// who do not are the ones that the CPU's group names. After it has failed to answer, that group is broken too, which
/// is as well: the job is.
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
/// for those who have answered and are behind operation `sequence`; where nobody is: that all have issued it.
std::string waiting_text(const ProgressExchange::Answers& answers, std::uint64_t sequence);

/// Whose log is to be looked at: the first rank that is behind, -1 where none is known.
int first_behind(const ProgressExchange::Answers& answers, std::uint64_t sequence);

}  // namespace lockstep::comm
