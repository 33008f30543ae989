// The flight records of a job's ranks (Note [Flight record]) after something went wrong: gathered, kept, and reported.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/flight_snapshot.h"
#include "launcher/root_cause.h"

namespace lockstep::launcher {

/// One rank's, as it was when its program had ended, or was asked to.
struct RankFlight {
  std::string bytes = {};                         // of the file; empty: there is none
  std::int64_t at_ns = 0;                         // when that was, on the clock of the rank's host
  std::optional<flight::Snapshot> snapshot = {};  // nothing: `bytes` are no record
};

/// Reads the records that wrappers have sent into `flights`, one for each rank of `ranks`. Missing ones, of ranks whose
/// wrapper was killed or that ended with 0, come from `directory` on this host. A file that is no flight record counts
/// as none.
void gather_flights(std::span<const RankReport> ranks, const std::string& directory, std::vector<RankFlight>& flights);

/// Writes them to LOG_DIR/flight/rank-N, which must not hold those of an earlier attempt then. Returns an error for the
/// user, or nothing.
std::string keep_flights(const std::vector<RankFlight>& flights, const std::string& log_dir);
/// Removes the records that an earlier job has left there.
void remove_flights(const std::string& log_dir);

/// A few lines that the records add to the root cause: the culprit's phase and last operation, who waited for whom, and
/// the backtrace of a crash unless the culprit's `last_lines` show it. Empty if nothing failed by itself. Pure.
std::vector<std::string> describe_flights(const JobReport& job, const RootCause& root_cause,
                                          const std::vector<RankFlight>& flights,
                                          const std::vector<std::string>& last_lines);

}  // namespace lockstep::launcher
