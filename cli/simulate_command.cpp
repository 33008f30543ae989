// lockstep simulate and lockstep plan.
#include <cstdio>

#include "bench/step.h"
#include "cli/commands.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::cli {
namespace {

/// What has to be measured first.
std::vector<simulate::StepProfile> measured(const simulate::SimulateOptions& options) {
  if (simulate::names_a_file(options.subject)) return {};
  nn::model_family(options.subject);  // or there is no such model
  return {bench::measure_step_profile(options.subject)};
}

/// `run` returns what is printed.
template <class Run>
int predict(const OptionTable& table, const simulate::SimulateOptions& options, const Sources& sources,
            const ForeignFlags& foreign, Run&& run) {
  const bool help = parse_options(table, sources, foreign).help;
  std::fputs((help ? table.help() : run(measured(options))).c_str(), stdout);
  return 0;
}

}  // namespace

int simulate_command(const Sources& sources, const ForeignFlags& foreign) {
  simulate::SimulateOptions options;
  return predict(simulate::simulate_options(options), options, sources, foreign, [&](auto profiles) {
    return simulate::simulate(options, std::move(profiles), as_typed("simulate", sources.args));
  });
}

int plan_command(const Sources& sources, const ForeignFlags& foreign) {
  simulate::SimulateOptions options;
  return predict(simulate::plan_options(options), options, sources, foreign,
                 [&](auto profiles) { return simulate::plan(options, std::move(profiles)); });
}

}  // namespace lockstep::cli
