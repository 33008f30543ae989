// What the machine's processors and memory are.
#pragma once

#include "devices/machine.h"

namespace lockstep::devices {

/// As hwloc and CPUID see them, all of the machine whatever part of it this process may use. Never throws over what
/// the system hides: that is absent.
Cpu read_cpu();

}  // namespace lockstep::devices
