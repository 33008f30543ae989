#include "checkpoint/model_options.h"

#include "base/text.h"
#include "options/values.h"

namespace lockstep::checkpoint {

using options::Applies;
using options::boolean;
using options::Declared;
using options::OptionKind;
using options::OptionTable;
using options::text;
using options::when;

void add_model_name(OptionTable& table, nn::ModelConfig& model) {
  table.positional({"MODEL", listed(nn::model_names(), "or"), text(model.name)});
}

std::vector<Declared> declared_by_models(bool (*wanted)(const SettingSpec& spec)) {
  std::vector<Declared> all;
  for (const auto* family : nn::model_families())
    for (const auto& variant : family->variants)
      for (const auto& spec : family->settings_of(variant.name))
        if (spec.is_flag && wanted(spec))
          all.push_back({.label = family->title.empty() ? family->variants[0].name : family->title,
                         .title = family->title.empty() ? variant.name : family->title,
                         .name = variant.name,
                         .spec = spec});
  return all;
}

std::optional<std::string> other_model(const std::vector<Declared>& same, const nn::ModelConfig& model) {
  if (nn::find_model_family(model.name) == nullptr || declares(same, model.name)) return std::nullopt;
  return "the model is " + model.name;
}

void add_model_structure(OptionTable& table, nn::ModelConfig& model, const std::string& default_text) {
  const auto declared =
      declared_by_models([](const SettingSpec& spec) { return spec.role == SettingSpec::Role::kStructure; });
  add_settings(
      table, model.settings, declared, default_text,
      [&model](const std::vector<Declared>& same) { return other_model(same, model); }, "", &model.name);
}

Applies to_weights(const std::string& file) {
  return {.to = "a file of weights",
          .unless = [&file] { return when(file.empty(), "there is none"); },
          .remedy = "add --weights FILE, or leave it out"};
}

void add_weight_file(OptionTable& table, WeightsOptions& config, const std::string& help) {
  table.add({.name = "weights",
             .placeholder = "FILE",
             .help = help + ": safetensors, an index of several, or a file of torch.save()",
             .value = text(config.weights)});
  table.add({.name = "weights-key",
             .placeholder = "KEY",
             .help = "key of the dictionary of tensors to load, if a file of torch.save() holds several: model or "
                     "ema.state_dict, for example",
             .default_text = "the model's, if only one is possible",
             .value = text(config.weights_key),
             .applies = to_weights(config.weights)});
  table.add({.name = "non-strict",
             .kind = OptionKind::kFlag,
             .help = "initialize weights that the file lacks, and ignore weights that the model lacks",
             .value = boolean(config.non_strict),
             .applies = to_weights(config.weights)});
  table.add({.name = "keep-prefix",
             .kind = OptionKind::kFlag,
             .help = "use names in the file as they are: a leading \"module.\" is not removed",
             .value = boolean(config.keep_prefix),
             .applies = to_weights(config.weights)});
}

nn::LoadOptions load_options_of(const WeightsOptions& config) {
  return {.strict = !config.non_strict, .keep_prefix = config.keep_prefix, .match_other_names = true};
}

}  // namespace lockstep::checkpoint
