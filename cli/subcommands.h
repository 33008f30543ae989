// The subcommands of lockstep, by name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

/// What lockstep --help prints.
std::string overview();

/// Whether the subcommand of that name computes with OpenMP's threads, for long.
bool computes(std::string_view subcommand);

/// Runs `lockstep ARGS…`. Returns the exit code; throws lockstep::Error.
int run(std::span<const std::string> args);

}  // namespace lockstep::cli
