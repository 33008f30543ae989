// One inference run of this process.
#pragma once

#include "inference/config.h"
#include "options/table.h"

namespace lockstep::inference {

/// The settings of lockstep infer, as trainer/options.h has those of a run; `config` must outlive the table.
options::OptionTable infer_options(InferConfig& config);

/// Opens the model and its inputs and runs them on streams of their own (run_streams); results go to stdout, a report
/// of times to stderr, or to stdout as JSON. Not for ranks: a process under a launcher of several is refused. Returns
/// the exit code 0; throws lockstep::Error otherwise, IoError also, once all others are done, where images were
/// corrupt.
int infer(const InferConfig& config);

}  // namespace lockstep::inference
