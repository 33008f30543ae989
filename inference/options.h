// The settings of lockstep infer, as trainer/options.h has those of a run.
#pragma once

#include "inference/config.h"
#include "options/table.h"

namespace lockstep::inference {

/// `config` must outlive the table.
options::OptionTable infer_options(InferConfig& config);

}  // namespace lockstep::inference
