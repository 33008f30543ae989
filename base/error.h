// Errors (lockstep/base/error.h), and what lockstep's own code makes their texts of.
#pragma once

#include <fmt/format.h>

#include <source_location>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {

[[noreturn]] void fail_assertion(const char* condition, const std::string& detail, std::source_location where);

/// Throws InternalError: for states that only a bug in lockstep can produce.
#define LOCKSTEP_ASSERT(condition, ...)                                                                       \
  do {                                                                                                        \
    if (!(condition)) [[unlikely]]                                                                            \
      ::lockstep::fail_assertion(#condition, ::fmt::format("" __VA_ARGS__), std::source_location::current()); \
  } while (false)

/// "No such file or directory" for an errno value.
std::string errno_text(int error_number);

}  // namespace lockstep
