// This machine.
#pragma once

#include <string>

namespace lockstep {

/// LOCKSTEP_HOST_NAME in the environment; else this machine's name, without its domain; "unknown" if it has none.
std::string host_name();

}  // namespace lockstep
