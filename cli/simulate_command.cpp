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

}  // namespace

int simulate_command(const Sources& sources, const ForeignFlags& foreign) {
  simulate::SimulateOptions options;
  const OptionTable table = simulate::simulate_options(options);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  std::string command = "lockstep simulate";
  for (const auto& word : sources.args) command += " " + word;
  std::fputs(simulate::simulate(options, measured(options), command).c_str(), stdout);
  return 0;
}

int plan_command(const Sources& sources, const ForeignFlags& foreign) {
  simulate::SimulateOptions options;
  const OptionTable table = simulate::plan_options(options);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  std::fputs(simulate::plan(options, measured(options)).c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli
