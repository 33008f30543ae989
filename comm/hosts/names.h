// What messages of a group on several hosts say.
#pragma once

#include <string>

#include "comm/op.h"

namespace lockstep::comm {

inline constexpr const char* kSameProgram = "start every rank with the same binary, options and data";

/// "an allocation" for the group's own exchanges, which have no sequence number.
inline std::string name_of_op(const Op& op) { return op.sequence == 0 ? std::string("an allocation") : describe(op); }

}  // namespace lockstep::comm
