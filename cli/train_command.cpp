#include "cli/train_command.h"

#include <cstdio>
#include <optional>

#include "base/error.h"
#include "cli/train_options.h"
#include "trainer/train.h"

namespace lockstep::cli {

OptionTable train_options(trainer::TrainConfig& config) {
  OptionTable table("train",
                    "Trains MODEL on DATA, as one rank of the world that mpirun, srun or lockstep launch has "
                    "started, or alone.");
  add_model_options(table, config);
  add_weight_files(table, config);
  add_batch_options(table, config);
  add_length_options(table, config);
  add_update_options(table, config);
  add_schedule_options(table, config);
  add_rank_options(table, config);
  add_check_options(table, config);
  add_report_options(table, config);
  return table;
}

int train_command(const Sources& sources, const ForeignFlags& foreign) {
  trainer::TrainConfig config;
  const OptionTable table = train_options(config);
  std::optional<UsageError> refusal;
  try {
    if (parse_options(table, sources, foreign).help) {
      std::fputs(table.help().c_str(), stdout);
      return 0;
    }
  } catch (const UsageError& error) {
    refusal = error;  // thrown once the ranks have met: a flag that is wrong on all of them is one line
  }
  return trainer::train(config, refusal);
}

}  // namespace lockstep::cli
