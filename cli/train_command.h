// lockstep train: flags → trainer::TrainConfig.
#pragma once

#include "cli/option_sources.h"
#include "cli/option_table.h"
#include "trainer/config.h"

namespace lockstep::cli {

/// The flags of lockstep train, which fill `config`; their defaults in the help text are those that it holds now.
/// `config` must outlive the table.
OptionTable train_options(trainer::TrainConfig& config);

/// Reads the flags and trains. Returns the exit code.
int train_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
