// This machine.
#pragma once

#include <string>

namespace lockstep {

/// This machine's name, without its domain; "unknown" if it has none.
std::string host_name();

}  // namespace lockstep
