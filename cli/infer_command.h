// lockstep infer: flags → trainer::InferConfig.
#pragma once

#include "cli/option_sources.h"
#include "cli/option_table.h"
#include "trainer/infer/config.h"

namespace lockstep::cli {

/// Its flags; they fill `config`, which must outlive the table.
OptionTable infer_options(trainer::InferConfig& config);

/// Reads the flags and infers. Returns the exit code.
int infer_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
