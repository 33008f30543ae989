// Sleeping until another process rings.
#pragma once

#include "base/deadline.h"
#include "comm/shm/board.h"

namespace lockstep::comm {

/// Wakes the rank of `control` if it sleeps. Call it after what it may be waiting for has been written.
void ring(RankControlBlock& control);

/// Announces that this rank is about to sleep; the ticket for sleep(). What it waits for must be looked at again
/// between the two: whoever writes it later will ring.
std::uint32_t lie_down(RankControlBlock& control);
/// Returns when the bell has rung since lie_down(), after `at_most`, or for no reason.
void sleep(RankControlBlock& control, std::uint32_t ticket, Clock::duration at_most);
void get_up(RankControlBlock& control);

}  // namespace lockstep::comm
