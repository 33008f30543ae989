// The flags that subcommands which train have in common, by what they are about. Each function adds some to `table`;
// they fill `config`, which must outlive the table, and their defaults in the help text are those that it holds now.
#pragma once

#include "cli/option_table.h"
#include "trainer/config.h"

namespace lockstep::cli {

/// MODEL and the data; opens a group.
void add_model_options(OptionTable& table, trainer::TrainConfig& config);
/// --weights and --save.
void add_weight_files(OptionTable& table, trainer::TrainConfig& config);
/// A rank's batch or the global one; opens a group.
void add_batch_options(OptionTable& table, trainer::TrainConfig& config);
/// How long, and how the data is walked through.
void add_length_options(OptionTable& table, trainer::TrainConfig& config);
/// The update rule; opens a group.
void add_update_options(OptionTable& table, trainer::TrainConfig& config);
/// The course of the learning rate.
void add_schedule_options(OptionTable& table, trainer::TrainConfig& config);
/// Device, backend, threads, buckets; opens a group.
void add_rank_options(OptionTable& table, trainer::TrainConfig& config);
void add_check_options(OptionTable& table, trainer::TrainConfig& config);
/// Metrics, trace, logs; opens a group. Adds --config.
void add_report_options(OptionTable& table, trainer::TrainConfig& config);

}  // namespace lockstep::cli
