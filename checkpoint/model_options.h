// A model and its weights file, as options of every command that takes them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/options.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "options/declared_settings.h"
#include "options/table.h"

namespace lockstep::checkpoint {

/// MODEL.
void add_model_name(options::OptionTable& table, nn::ModelConfig& model);

/// Settings that models declare.
std::vector<options::Declared> declared_by_models(bool (*wanted)(const SettingSpec& spec));
/// Why `model` has no use for a setting that `same` declare, if it is another one. Of an unknown model nobody can say
/// what it takes: others complain of it.
std::optional<std::string> other_model(const std::vector<options::Declared>& same, const nn::ModelConfig& model);
/// Settings that a weights file has: those of a model's structure. `default_text`: where they come from if nobody
/// gives them.
void add_model_structure(options::OptionTable& table, nn::ModelConfig& model, const std::string& default_text);

/// --weights, and how its names are read. `help` goes before the formats.
void add_weight_file(options::OptionTable& table, WeightsOptions& config, const std::string& help);
/// For models of the command line, whose files may have other names.
nn::LoadOptions load_options_of(const WeightsOptions& config);
/// For settings that have no effect without such a file.
options::Applies to_weights(const std::string& file);

}  // namespace lockstep::checkpoint
