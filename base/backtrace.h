// Names of functions for the addresses of a backtrace.
#pragma once

#include <span>
#include <string>

namespace lockstep {

/// As C++ writes it; `name` itself where it is none of C++'s.
std::string demangled(const char* name);

/// A line for each of them, "    FUNCTION+0x1f at FILE:LINE in BINARY(+0x1234)", with as much of it as symbol tables
/// and debug information say; BINARY(+OFFSET) is what addr2line takes. The first address is where a thread stopped, the
/// others are those to which calls return. Takes memory and reads files: not for signal handlers.
std::string named_frames(std::span<void* const> addresses);

}  // namespace lockstep
