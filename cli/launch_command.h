// lockstep launch: flags → launcher::LaunchOptions.
#pragma once

#include "cli/option_sources.h"
#include "cli/option_table.h"
#include "launcher/options.h"

namespace lockstep::cli {

/// The flags of lockstep launch, which fill `options`; `options` must outlive the table.
OptionTable launch_options(launcher::LaunchOptions& options);

/// Reads the flags and runs the job. Returns its exit code.
int launch_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
