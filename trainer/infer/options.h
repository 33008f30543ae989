// The settings of lockstep infer, as trainer/options.h has those of a run.
#pragma once

#include "options/table.h"
#include "trainer/infer/config.h"

namespace lockstep::trainer {

/// `config` must outlive the table.
options::OptionTable infer_options(InferConfig& config);

}  // namespace lockstep::trainer
