// What messages of a group on several hosts say.
#pragma once

#include <string>

#include "comm/op.h"

namespace lockstep::comm {

inline constexpr const char* kSameProgram = "start every rank with the same binary, options and data";

}  // namespace lockstep::comm
