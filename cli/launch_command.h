// lockstep launch: flags → launcher::LaunchOptions.
#pragma once

#include <span>
#include <string>

#include "base/env.h"
#include "cli/option_sources.h"
#include "cli/option_table.h"
#include "devices/machine.h"
#include "launcher/options.h"

namespace lockstep::cli {

/// The flags of lockstep launch, which fill `options`; `options` must outlive the table.
OptionTable launch_options(launcher::LaunchOptions& options);

/// `lockstep _host`, the launcher's helper on another host.
int host_command();

/// How many ranks -n auto starts for these GPUs: as many as CUDA will show a process, which is one where they are split
/// into MIG devices. 0, for as many as there are cores, where there are none, or the program is told `--device cpu`, by
/// flag or environment: what else it may be told (a config file), a launcher cannot know. Pure.
int ranks_for_gpus(const devices::Gpus& gpus, std::span<const std::string> program, const EnvLookup& lookup);

/// Reads the flags and runs the job. Returns its exit code.
int launch_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
