// The subcommands of lockstep, by name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

/// What lockstep --help prints.
std::string overview();

/// Runs `lockstep ARGS…`. Returns the exit code; throws lockstep::Error.
int run(std::span<const std::string> args);

}  // namespace lockstep::cli
