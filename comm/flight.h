// Groups and this process's flight record (Note [Flight record]): what they write to it, and what those of others say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// The number of a group, or of what serves it, among those of this process, from 1.
std::uint16_t next_flight_group();

/// `op` is issued; the number for flight::complete().
std::uint64_t record_issue(const OpDescriptor& op, std::uint16_t group);

/// ", in the forward pass of step 12 for 9.8 s", to follow the name of rank `job_rank` of the job, which is named as
/// number `nth` (from 0). For a process that is stopped or reads data it has the kernel's view too. Empty for ranks
/// that first_names() leaves out. Also empty if this process keeps no record in a directory (LOCKSTEP_FLIGHT_DIR), or
/// the rank has none there or is on another host. It reads a file: only for messages.
std::string where_is(int job_rank, std::size_t nth = 0);

/// This rank is about to throw because it has waited for these ranks of the job in vain: its flight record says so, and
/// the launcher hears it.
void give_up_on(std::span<const int> job_ranks) noexcept;

}  // namespace lockstep::comm
