// lockstep bench: what the ranks can do, measured.
#pragma once

#include <string>
#include <vector>

#include "bench/allreduce.h"
#include "bench/dp_vs_ddp.h"
#include "bench/step.h"
#include "cli/option_sources.h"
#include "cli/option_table.h"

namespace lockstep::cli {

/// The flags of its kinds; their targets must outlive the tables.
OptionTable bench_allreduce_options(bench::AllReduceOptions& options);
OptionTable bench_step_options(bench::StepOptions& options);
OptionTable bench_dp_vs_ddp_options(bench::DpVsDdpOptions& options);

/// All flags of them.
std::vector<std::string> bench_flags();

/// `lockstep bench allreduce …`, `lockstep bench step MODEL …` or `lockstep bench dp-vs-ddp MODEL …`. Returns the exit
/// code.
int bench_command(const Sources& sources, const ForeignFlags& foreign);

}  // namespace lockstep::cli
