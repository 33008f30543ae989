// lockstep checkpoint show|verify PATH
#pragma once

#include <string>
#include <vector>

#include "cli/option_sources.h"
#include "cli/option_table.h"

namespace lockstep::cli {

OptionTable checkpoint_options(std::string& action, std::string& path);

int checkpoint_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
