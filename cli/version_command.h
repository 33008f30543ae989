// lockstep version: what this build is made of.
#pragma once

#include <string>

#include "cli/option_sources.h"
#include "cli/option_table.h"

namespace lockstep::cli {

OptionTable version_options();

/// The text that lockstep version prints: one "name  value" a line. Starts no MPI, and makes no CUDA context; opens
/// NVIDIA's libraries, if they are there, to ask them for their versions.
std::string version_text();

int version_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
