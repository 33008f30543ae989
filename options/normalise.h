// One spelling for everything that people may type as a flag. Pure functions.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "options/table.h"

namespace lockstep::options {

/// "batch_size" → "batch-size".
std::string with_dashes(std::string_view name);

/// "global-batch" → "LOCKSTEP_GLOBAL_BATCH".
std::string environment_name(std::string_view name);

struct NormalisedArgs {
  std::vector<std::string> words;    // "--batch=64", "--quiet", "cnn": a flag and its value are one word
  std::vector<std::string> program;  // everything after the first "--", untouched
  bool has_program = false;          // there was a "--"
};

/// Flags, typed with one dash or two, get two, '-' for '_' and their canonical name; the value of a flag that takes one
/// is joined to it by '=', also when it is a negative number or "-". A flag whose value is missing stays alone. Flags
/// that `table` does not know are passed on for the parser to complain about.
NormalisedArgs normalise(const OptionTable& table, std::span<const std::string> args);

}  // namespace lockstep::options
