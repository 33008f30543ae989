// A machine as JSON for programs. Pure.
#pragma once

#include <string>

#include "devices/machine.h"

namespace lockstep::devices {

/// One JSON object, a line without its newline. Units are in the names: bytes, percent, W, °C. Unknown values are null.
std::string json_of(const Machine& machine);

}  // namespace lockstep::devices
