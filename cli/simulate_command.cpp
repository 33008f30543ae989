// lockstep simulate and lockstep plan.
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

}  // namespace

int simulate_command(const Sources& sources, const ForeignFlags& foreign) {
  simulate::SimulateOptions options;
  return print_result(simulate::simulate_options(options), sources, foreign, [&] {
    return simulate::simulate(options, measured(options), as_typed("simulate", sources.args));
  });
}

int plan_command(const Sources& sources, const ForeignFlags& foreign) {
  simulate::SimulateOptions options;
  return print_result(simulate::plan_options(options), sources, foreign,
                      [&] { return simulate::plan(options, measured(options)); });
}

}  // namespace lockstep::cli
