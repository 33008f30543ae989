#include "cli/train_command.h"

#include <optional>

#include "base/error.h"
#include "cli/rank_options.h"
#include "trainer/train.h"

namespace lockstep::cli {

OptionTable train_options(trainer::TrainConfig& config) {
  OptionTable table("train",
                    "Trains MODEL on DATA, as one rank of the world that mpirun, srun or lockstep launch has "
                    "started, or alone.");
  add_model_options(table, config);
  add_training_options(table, config);
  add_weight_file(table, config);
  add_tuning_options(table, config);
  add_batch_options(table, config);
  add_accumulate_option(table, config);
  add_length_options(table, config);
  add_update_options(table, config);
  add_schedule_options(table, config);
  add_device_options(table, config);
  add_graphs_option(table, config);
  add_parallel_option(table, config);
  add_bucket_options(table, config);
  add_ddp_options(table, config);
  add_check_options(table, config);
  add_checkpoint_options(table, config);
  add_report_options(table, config);
  refuse_inapplicable(table, config);
  return table;
}

int train_command(const Sources& sources, const ForeignFlags& foreign) {
  trainer::TrainConfig config;
  const OptionTable table = train_options(config);
  std::optional<UsageError> refusal;
  if (parse_or_refuse(table, sources, foreign, refusal)) return 0;
  return trainer::train(config, refusal);
}

}  // namespace lockstep::cli
