// How much memory this process uses.
#pragma once

#include <cstdint>

namespace lockstep {

/// The most bytes that this process has had resident so far.
std::int64_t peak_resident_bytes();

}  // namespace lockstep
