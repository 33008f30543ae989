// Ranks joined by MPI.
#pragma once

#include <memory>

#include "comm/make_group.h"
#include "comm/process_group.h"
#include "comm/world.h"

namespace lockstep::comm {

/// Starts MPI and joins its world, which must have the rank and size of `world`. A build without MPI throws
/// DeviceError.
std::unique_ptr<ProcessGroup> make_mpi_group(const World& world, const GroupOptions& options);

}  // namespace lockstep::comm
