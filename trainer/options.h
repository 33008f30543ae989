// The settings of a run: each is declared here once, and the command line, config files, the environment, help, ranges,
// the refusal of settings without effect, what ranks compare and what checkpoints say all follow from it. Settings that
// models, optimizers, schedules and data sets declare themselves (lockstep/base/settings.h) are taken from their
// registries. Each function adds some to `table`; they fill what they are given, which must outlive the table, and
// their defaults in the help text are those that it holds now.
#pragma once

#include <span>
#include <string>

#include "lockstep/base/settings.h"
#include "lockstep/trainer/config.h"
#include "options/table.h"

namespace lockstep::trainer {

using options::Agree;
using options::OptionTable;

/// All of lockstep train.
OptionTable train_options(TrainConfig& config);
/// Those of a program that trains what `config` names already: without MODEL, --data and settings of other models and
/// data sets.
OptionTable own_training_options(TrainConfig& config, const std::string& program);
/// All of lockstep eval.
OptionTable eval_options(TrainConfig& config);
/// The same for such a program, called with eval as its first word.
OptionTable own_evaluation_options(TrainConfig& config, const std::string& program);

/// MODEL and the data; opens a group.
void add_model_options(OptionTable& table, TrainConfig& config);
/// What only training does with model and data.
void add_training_options(OptionTable& table, TrainConfig& config);
/// A rank's batch or the global one; opens a group.
void add_batch_options(OptionTable& table, TrainConfig& config);
/// The update rule; opens a group.
void add_update_options(OptionTable& table, TrainConfig& config);
/// --loss, and of the losses' settings those that evaluations have, or also those of training alone.
void add_loss_options(OptionTable& table, TrainConfig& config, bool training);
/// Those of `given` that `specs` have, and the fallbacks of the others: what a family is opened or made with. Settings
/// that it does not have are refused by themselves.
Settings own_settings(std::span<const SettingSpec> specs, const Settings& given, const std::string& whose);
/// The learning rate's schedule.
void add_schedule_options(OptionTable& table, TrainConfig& config);
/// Whether GPUs' kernels give the same bits each time.
void add_deterministic_option(OptionTable& table, TrainConfig& config);
/// Whether GPUs' kernels are timed.
void add_autotune_option(OptionTable& table, TrainConfig& config);
/// Whether GPUs capture steps as graphs.
void add_graphs_option(OptionTable& table, TrainConfig& config);
/// Parts of a step, and which rank computes how many of them.
void add_shards_option(OptionTable& table, TrainConfig& config);
void add_balance_option(OptionTable& table, TrainConfig& config);
void add_audit_option(OptionTable& table, TrainConfig& config);
void add_bad_batch_option(OptionTable& table, TrainConfig& config);
void add_divergence_option(OptionTable& table, TrainConfig& config);
void add_bucket_options(OptionTable& table, TrainConfig& config);
/// What carries gradients between the ranks.
void add_comm_hook_option(OptionTable& table, TrainConfig& config);
/// TensorBoard and the status server.
void add_follower_options(OptionTable& table, TrainConfig& config);
/// --zero.
void add_zero_option(OptionTable& table, TrainConfig& config);
/// One process for each device, or one for all; what ranks do with gradients and statistics.
void add_ddp_options(OptionTable& table, TrainConfig& config);

/// For settings of models of which `does` is true.
options::Applies to_models_that(const ModelConfig& model, bool (*does)(const nn::ModelFamily& family),
                                const char* kind);

}  // namespace lockstep::trainer
