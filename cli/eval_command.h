// lockstep eval
#pragma once

#include "cli/option_sources.h"
#include "cli/option_table.h"
#include "trainer/config.h"

namespace lockstep::cli {

/// Its flags; they fill `config`, which must outlive the table.
OptionTable eval_options(trainer::TrainConfig& config);

int eval_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
