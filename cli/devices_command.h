// lockstep devices: what this machine has to compute with.
#pragma once

#include "cli/option_sources.h"
#include "cli/option_table.h"

namespace lockstep::cli {

/// Its flags; `json` must outlive the table.
OptionTable devices_options(bool& json);

/// Prints the table or the JSON object. Returns the exit code, which is 0 also where there is no GPU or it fails: that
/// is an answer.
int devices_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
