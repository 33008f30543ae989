// How far the ranks' clocks are apart.
#pragma once

#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::trainer {

/// What two ranks know of one exchange of clock readings, each on its own clock: both read their clock and send it,
/// then note when the other's reading has come.
struct ClockExchange {
  Clock::time_point sent_by_0, received_by_0;
  Clock::time_point sent, received;  // by the other rank
};

/// What must be added to the other rank's clock to get rank 0's lies within these bounds: nothing arrives before it was
/// sent (Cristian, "Probabilistic clock synchronization", 1989).
struct ClockBounds {
  Clock::duration least, most;
};
ClockBounds clock_bounds(const std::vector<ClockExchange>& exchanges);

/// Collective: `rounds` exchanges of every rank with rank 0; this rank's.
std::vector<ClockExchange> exchange_clocks(comm::ProcessGroup& group, int rounds);

/// Collective: what to add to this rank's clock to get rank 0's. Ranks under one kernel share a clock: exactly zero.
/// Otherwise the middle of clock_bounds, wrong by at most half of the fastest exchange.
Clock::duration ahead_of_this_clock(comm::ProcessGroup& group);

}  // namespace lockstep::trainer
