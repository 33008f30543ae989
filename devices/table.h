// A machine as a table for people. Pure.
#pragma once

#include <string>

#include "devices/machine.h"

namespace lockstep::devices {

inline constexpr int kTableColumns = 80;

/// GPUs, their processes and the CPU, in a frame of kTableColumns; ends with a newline. Values that a card does not
/// report are "N/A"; sizes are in MiB.
std::string table_of(const Machine& machine);

}  // namespace lockstep::devices
