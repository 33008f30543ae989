// Which of some names mean this machine, and which of its ports is free.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// For each name, whether it is this host: the host's name, localhost, or a name or address that belongs to one of its
/// interfaces. All names are looked up at the same time, in a process that is ended at `deadline`; what has not been
/// answered by then is another host. Call it from a process without other threads. Throws DeviceError.
std::vector<bool> local_addresses(std::span<const std::string> names, Deadline deadline);

/// This host's name as the system has it, with its domain if it has one there; "localhost" if it has none.
std::string system_name();

/// A TCP port that is free on this host now. It is below the kernel's ephemeral ports, so it is likely to stay free.
/// Throws DeviceError when all that are tried are taken.
int find_free_port();

}  // namespace lockstep::launcher
