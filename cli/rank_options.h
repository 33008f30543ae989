// The flags that subcommands which ranks run have in common, by what they are about. Each function adds some to
// `table`; they fill what they are given, which must outlive the table, and their defaults in the help text are those
// that it holds now.
#pragma once

#include <optional>

#include "cli/option_sources.h"
#include "cli/option_table.h"
#include "comm/make_group.h"
#include "trainer/config.h"

namespace lockstep::cli {

/// MODEL and the data; opens a group.
void add_model_options(OptionTable& table, trainer::TrainConfig& config);
/// What only training does with model and data.
void add_training_options(OptionTable& table, trainer::TrainConfig& config);
/// --weights, and how they are loaded.
void add_weight_file(OptionTable& table, trainer::TrainConfig& config);
/// --save, and what is trained of the weights.
void add_tuning_options(OptionTable& table, trainer::TrainConfig& config);
/// A rank's batch or the global one; opens a group.
void add_batch_options(OptionTable& table, trainer::TrainConfig& config);
/// How long, and how the data is walked through.
void add_length_options(OptionTable& table, trainer::TrainConfig& config);
/// The update rule; opens a group.
void add_update_options(OptionTable& table, trainer::TrainConfig& config);
/// The course of the learning rate.
void add_schedule_options(OptionTable& table, trainer::TrainConfig& config);
/// For collectives of host memory.
void add_backend_option(OptionTable& table, comm::GroupOptions::Backend& backend);
void add_timeout_option(OptionTable& table, double& seconds);
void add_stall_option(OptionTable& table, double& seconds);
void add_encrypt_option(OptionTable& table, bool& encrypt);
/// Device, backend, threads; opens a group.
void add_device_options(OptionTable& table, trainer::TrainConfig& config);
/// Whether GPUs record steps.
void add_graphs_option(OptionTable& table, trainer::TrainConfig& config);
/// One process for each device, or one for all.
void add_parallel_option(OptionTable& table, trainer::TrainConfig& config);
void add_bucket_options(OptionTable& table, trainer::TrainConfig& config);
void add_accumulate_option(OptionTable& table, trainer::TrainConfig& config);
void add_ddp_options(OptionTable& table, trainer::TrainConfig& config);
void add_check_options(OptionTable& table, trainer::TrainConfig& config);
/// Where and how often training is saved, and whether it goes on; opens a group.
void add_checkpoint_options(OptionTable& table, trainer::TrainConfig& config);
/// A rank's batch and its loader, where nothing is trained; opens a group.
void add_eval_batch_options(OptionTable& table, trainer::TrainConfig& config);
/// Metrics and logs there; opens a group. Adds --config.
void add_eval_report_options(OptionTable& table, trainer::TrainConfig& config);
/// Metrics, trace, logs; opens a group. Adds --config.
void add_report_options(OptionTable& table, trainer::TrainConfig& config);

/// What was given and has no effect on `config` is refused (trainer/applicability.h).
void refuse_inapplicable(OptionTable& table, const trainer::TrainConfig& config);

/// parse_options for a subcommand that ranks of a job run: prints the help if that was asked for and returns true;
/// keeps what is wrong in `refusal`, to be thrown once the ranks have met, so that a flag that is wrong on all of them
/// is one line.
bool parse_or_refuse(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign,
                     std::optional<UsageError>& refusal);

}  // namespace lockstep::cli
