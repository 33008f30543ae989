// The settings of a run: each is declared here once, and the command line, config files, the environment, help, ranges,
// the refusal of settings without effect, what ranks compare and what checkpoints say all follow from it. Settings that
// models, optimizers, schedules and data sets declare themselves (base/settings.h) are taken from their registries.
// Each function adds some to `table`; they fill what they are given, which must outlive the table, and their defaults
// in the help text are those that it holds now.
#pragma once

#include "comm/make_group.h"
#include "options/table.h"
#include "trainer/config.h"

namespace lockstep::trainer {

using options::Agree;
using options::OptionTable;

/// For Applies::unless: what this run is instead, where a setting has no effect.
inline std::optional<std::string> when(bool elsewhere, std::string instead) {
  return elsewhere ? std::optional(std::move(instead)) : std::nullopt;
}

/// All of lockstep train.
OptionTable train_options(TrainConfig& config);
/// All of lockstep eval.
OptionTable eval_options(TrainConfig& config);

/// MODEL.
void add_model_name(OptionTable& table, ModelConfig& model);
/// MODEL and the data; opens a group.
void add_model_options(OptionTable& table, TrainConfig& config);
/// What only training does with model and data.
void add_training_options(OptionTable& table, TrainConfig& config);
/// A rank's batch or the global one; opens a group.
void add_batch_options(OptionTable& table, TrainConfig& config);
/// The update rule; opens a group.
void add_update_options(OptionTable& table, TrainConfig& config);
/// The learning rate's schedule.
void add_schedule_options(OptionTable& table, TrainConfig& config);
/// For collectives of host memory.
void add_backend_option(OptionTable& table, comm::GroupOptions::Backend& backend);
void add_timeout_option(OptionTable& table, double& seconds);
void add_stall_option(OptionTable& table, double& seconds);
options::Option encrypt_option(bool& encrypt);
/// Device, backend, threads; opens a group.
void add_device_options(OptionTable& table, TrainConfig& config);
/// Whether GPUs record steps.
void add_graphs_option(OptionTable& table, TrainConfig& config);
void add_bucket_options(OptionTable& table, TrainConfig& config);

/// Where --weights and how its names are read go.
struct WeightFile {
  std::string& file;
  bool &non_strict, &keep_prefix;
};
/// `help` goes before the formats.
void add_weight_file(OptionTable& table, const WeightFile& weights, const std::string& help);
/// What files of weights say of a model: settings that training and inference share. `default_text`: where they come
/// from if nobody gives them.
void add_model_structure(OptionTable& table, ModelConfig& model, const std::string& default_text);
options::Option precision_option(Precision& precision, const char* help);
options::Option tf32_option(bool& tf32, const std::string& device);
options::Option log_level_option(std::string& level, const char* help);

}  // namespace lockstep::trainer
