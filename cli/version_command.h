// lockstep version: what this build is made of.
#pragma once

#include <string>

#include "cli/option_sources.h"
#include "cli/option_table.h"

namespace lockstep::cli {

OptionTable version_options();

/// The text that lockstep version prints: one "name  value" a line. Starts no MPI.
std::string version_text();

int version_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
