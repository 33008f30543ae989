#include "cli/eval_command.h"

#include <optional>

#include "base/error.h"
#include "cli/rank_options.h"
#include "trainer/evaluation.h"

namespace lockstep::cli {

OptionTable eval_options(trainer::TrainConfig& config) {
  OptionTable table("eval",
                    "Evaluates MODEL with the weights of a file on DATA's test part, shared out among the ranks of the "
                    "world that mpirun, srun or lockstep launch has started, or alone.");
  add_model_options(table, config);
  add_weight_file(table, config);
  add_eval_batch_options(table, config);
  add_device_options(table, config);
  add_eval_report_options(table, config);
  refuse_inapplicable(table, config);
  return table;
}

int eval_command(const Sources& sources, const ForeignFlags& foreign) {
  trainer::TrainConfig config;
  const OptionTable table = eval_options(config);
  std::optional<UsageError> refusal;
  if (parse_or_refuse(table, sources, foreign, refusal)) return 0;
  return trainer::evaluate(config, refusal);
}

}  // namespace lockstep::cli
