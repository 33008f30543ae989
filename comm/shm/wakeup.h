// Sleeping until another process wakes this one.
#pragma once

#include "base/deadline.h"
#include "comm/shm/board.h"

namespace lockstep::comm {

/// Wakes the rank of `control` if it sleeps. Call it after what it may be waiting for has been written.
void wake(RankControlBlock& control);

/// Announces that this rank is about to sleep; the ticket for sleep(). What it waits for must be looked at again
/// between the two: whoever writes it later wakes this rank.
std::uint32_t announce_sleep(RankControlBlock& control);
/// Returns when it has been woken since announce_sleep(), after `at_most`, or for no reason.
void sleep(RankControlBlock& control, std::uint32_t ticket, Clock::duration at_most);
void end_sleep(RankControlBlock& control);

}  // namespace lockstep::comm
