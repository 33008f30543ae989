// Settings that families declare (base/settings.h), as options: of models, data sets, optimizers and schedules.
#include <algorithm>
#include <functional>
#include <iterator>

#include "base/text.h"
#include "data/open.h"
#include "nn/models/models.h"
#include "nn/optim/optimizers.h"
#include "options/values.h"
#include "trainer/options.h"

namespace lockstep::trainer {
namespace {

using options::choice_of_names;
using options::integer;
using options::kMost;
using options::number;
using options::OptionKind;
using options::text;
using Role = SettingSpec::Role;

/// Who declares a setting, in a registry: a family under one of its names.
struct Declared {
  std::string label;  // in help: "gpt", for gpt2 too
  std::string title;  // for people: "ResNets", or the name
  std::string name;
  SettingSpec spec;
};

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

template <class Family>
std::vector<Declared> declared_by(const std::vector<const Family*>& families, bool (*wanted)(const SettingSpec& spec)) {
  std::vector<Declared> all;
  for (const auto* family : families)
    for (const auto& spec : family->settings)
      if (wanted(spec))
        all.push_back({.label = family->name, .title = family->name, .name = family->name, .spec = spec});
  return all;
}

/// What `text_of` says of each, once.
template <class TextOf>
std::vector<std::string> texts_of(const std::vector<Declared>& all, const TextOf& text_of) {
  std::vector<std::string> texts;
  for (const auto& each : all)
    if (const std::string& text = std::invoke(text_of, each); std::ranges::find(texts, text) == texts.end())
      texts.push_back(text);
  return texts;
}

std::vector<Declared> those_with(const std::vector<Declared>& all, const std::string SettingSpec::*member,
                                 const std::string& text) {
  std::vector<Declared> those;
  std::ranges::copy_if(all, std::back_inserter(those), [&](const auto& each) { return each.spec.*member == text; });
  return those;
}

const std::string& name_of_setting(const Declared& declared) { return declared.spec.name; }
const std::string& help_of_setting(const Declared& declared) { return declared.spec.help; }

/// "gpt: blocks; lstm: layers", or "gpt, lstm: features".
std::string help_of(const std::vector<Declared>& same) {
  std::vector<std::string> parts;
  for (const auto& help : texts_of(same, help_of_setting))
    parts.push_back(fmt::format(
        "{}: {}", join(texts_of(those_with(same, &SettingSpec::help, help), &Declared::label), ", "), help));
  return join(parts, "; ");
}

/// "4, of gpt2 12, of lstm 2".
std::string default_of(const std::vector<Declared>& same) {
  const SettingSpec& first = same.front().spec;
  if (!first.default_text.empty()) return first.default_text;
  if (std::holds_alternative<bool>(first.fallback.any())) return {};
  std::string text = to_string(first.fallback);
  for (const auto& each : same)
    if (each.spec.fallback != first.fallback)
      text += fmt::format(", of {} {}", each.name, to_string(each.spec.fallback));
  return text;
}

OptionKind kind_of(const SettingSpec& spec) {
  const auto& any = spec.fallback.any();
  if (spec.fallback == SettingValue(false)) return OptionKind::kFlag;
  const bool list =
      std::holds_alternative<std::vector<std::int64_t>>(any) || std::holds_alternative<std::vector<double>>(any);
  return list ? OptionKind::kList : OptionKind::kValue;
}

/// Adds an option for each setting of `declared`, held in `target`. `unless` says of one, with those who declare it,
/// why this run has no use for it.
template <class Unless>
void add_settings(OptionTable& table, Settings& target, const std::vector<Declared>& declared,
                  const std::string& default_text, const Unless& unless, const std::string& flag = {}) {
  for (const auto& name : texts_of(declared, name_of_setting)) {
    const auto same = those_with(declared, &SettingSpec::name, name);
    const SettingSpec& spec = same.front().spec;
    const OptionKind kind = kind_of(spec);
    std::string to = flag + listed(texts_of(same, &Declared::title));
    if (spec.need.what != nullptr) to += fmt::format(" with {}", spec.need.what);
    table.add({.name = name,
               .synonyms = spec.synonyms,
               .kind = kind,
               .placeholder = kind == OptionKind::kFlag ? std::string() : spec.placeholder,
               .help = help_of(same),
               .default_text = default_text.empty() ? default_of(same) : default_text,
               .value = options::setting(target, spec),
               .applies = {.to = std::move(to), .unless = [same, unless] { return unless(same); }},
               .agree = spec.role == Role::kTolerance ? Agree::kNo : Agree::kValue,
               .may_change = spec.role == Role::kTraining});
  }
}

bool declares(const std::vector<Declared>& same, const std::string& name) {
  return std::ranges::find(same, name, &Declared::name) != same.end();
}

/// Of an unknown model nobody can say what it takes: others complain of it.
bool is_known(const ModelConfig& model) { return nn::find_model_family(model.name) != nullptr; }

std::optional<std::string> other_model(const std::vector<Declared>& same, const ModelConfig& model) {
  if (!is_known(model) || declares(same, model.name)) return std::nullopt;
  return "the model is " + model.name;
}

void add_data_settings(OptionTable& table, TrainConfig& config, bool (*wanted)(const SettingSpec& spec)) {
  add_settings(table, config.data_settings, declared_by(data::dataset_families(), wanted), "",
               [&config](const std::vector<Declared>& same) -> std::optional<std::string> {
                 const auto* family = data::find_dataset_family(config.data);
                 if (family == nullptr || declares(same, family->name)) return std::nullopt;
                 return "the data is " + family->name;
               });
}

}  // namespace

void add_model_name(OptionTable& table, ModelConfig& model) {
  table.positional({"MODEL", listed(nn::model_names(), "or"), text(model.name)});
}

void add_model_structure(OptionTable& table, ModelConfig& model, const std::string& default_text) {
  const auto declared = declared_by_models([](const SettingSpec& spec) { return spec.role == Role::kStructure; });
  add_settings(table, model.settings, declared, default_text,
               [&model](const std::vector<Declared>& same) { return other_model(same, model); });
}

void add_model_options(OptionTable& table, TrainConfig& config) {
  add_model_name(table, config.model);
  table.group("Model and data");
  table.add({.name = "data",
             .placeholder = "DATA[:PATH]",
             .help = data::dataset_help(),
             .value = text(config.data),
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "classes",
             .placeholder = "K",
             .help = "classes of the last layer",
             .default_text = "what the data has",
             .value = integer(config.classes, 1, 1 << 24),
             .agree = Agree::kValue});
  add_data_settings(table, config, [](const SettingSpec& spec) { return spec.name != data::kAugment; });
  const auto declared = declared_by_models(
      [](const SettingSpec& spec) { return spec.role != Role::kTraining && spec.role != Role::kInitialValues; });
  add_settings(table, config.model.settings, declared, "",
               [&config](const std::vector<Declared>& same) -> std::optional<std::string> {
                 if (auto other = other_model(same, config.model)) return other;
                 // Before data are chosen (lockstep bench has synthetic ones) they may be anything.
                 const bool of_tokens = is_known(config.model) &&
                                        nn::model_family(config.model.name).tokens_setting == same.front().spec.name;
                 return when(of_tokens && !config.data.empty() && !data::may_have_tokens(config.data),
                             "the data is " + config.data);
               });
}

void add_training_options(OptionTable& table, TrainConfig& config) {
  add_data_settings(table, config, [](const SettingSpec& spec) { return spec.name == data::kAugment; });
  const auto declared = declared_by_models(
      [](const SettingSpec& spec) { return spec.role == Role::kTraining || spec.role == Role::kInitialValues; });
  add_settings(table, config.model.settings, declared, "",
               [&config](const std::vector<Declared>& same) -> std::optional<std::string> {
                 if (auto other = other_model(same, config.model)) return other;
                 return when(
                     same.front().spec.role == Role::kInitialValues && !config.weights.empty() && !config.non_strict,
                     "this one starts from --weights " + config.weights);
               });
}

namespace {

std::string trained_with_default() {
  const std::string usual = nn::TrainingDefaults().optimizer;
  std::string text = usual;
  for (const auto* family : nn::model_families())
    if (family->training.optimizer != usual)
      text += fmt::format(", for {} {}", family->title.empty() ? family->names().front() : family->title,
                          family->training.optimizer);
  return text;
}

/// What models that are trained with something of their own have: "0.0001 for ResNets".
template <class Told>
std::string of_models(const Told& told) {
  std::string text;
  for (const auto* family : nn::model_families())
    if (const std::string value = told(family->training); !value.empty())
      text += fmt::format(", {} for {}", value, family->title.empty() ? family->names().front() : family->title);
  return text;
}

void add_optimizer_settings(OptionTable& table, TrainConfig& config) {
  const auto declared = declared_by(nn::optimizer_families(), [](const SettingSpec&) { return true; });
  add_settings(
      table, config.optimizer_settings, declared, "",
      [&config](const std::vector<Declared>& same) -> std::optional<std::string> {
        if (!is_known(config.model)) return std::nullopt;
        const std::string name = optimizer_of(config);
        if (!declares(same, name)) return "the optimizer is " + name;
        const SettingNeed& need = same.front().spec.need;
        return when(need.holds != nullptr && !need.holds(optimizer_settings_of(config)),
                    need.what != nullptr ? need.otherwise : "");
      },
      "--optimizer ");
}

}  // namespace

void add_update_options(OptionTable& table, TrainConfig& config) {
  table.group("Optimisation");
  options::Binding optimizer = choice_of_names(config.optimizer, nn::optimizer_names());
  optimizer.text = [&config] { return optimizer_of(config); };
  table.add({.name = "optimizer",
             .synonyms = {"opt"},
             .placeholder = join(nn::optimizer_names(), "|"),
             .help = "update rule",
             .default_text = trained_with_default(),
             .value = std::move(optimizer),
             .agree = Agree::kValue});
  table.add({.name = "lr",
             .placeholder = "X",
             .help = "learning rate",
             .default_text = fmt::format("{}{}", nn::OptimizerFamily().lr, of_models([](const auto& training) {
                                           return training.lr_per_256
                                                      ? fmt::format("{} * global batch / 256", *training.lr_per_256)
                                                      : std::string();
                                         })),
             .value = number(config.lr, {}),
             .agree = Agree::kValue});
  add_optimizer_settings(table, config);
  std::vector<std::string> decays;
  for (const auto* family : nn::optimizer_families())
    decays.push_back(fmt::format("{} for {}", family->weight_decay, family->name));
  table.add({.name = "weight-decay",
             .placeholder = "X",
             .help = "weight decay",
             .default_text = join(decays, ", ") + of_models([](const auto& training) {
                               return training.weight_decay ? fmt::to_string(*training.weight_decay) : std::string();
                             }),
             .value = number(config.weight_decay, {}),
             .agree = Agree::kValue});
  table.add({.name = "clip-norm",
             .placeholder = "X",
             .help = "largest L2 norm of all gradients together; 0: no clipping",
             .default_text = fmt::to_string(config.clip_norm),
             .value = number(config.clip_norm, {}),
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "seed",
             .placeholder = "N",
             .help = "of initial parameters and sample order",
             .default_text = fmt::to_string(config.seed),
             .value = integer(config.seed, 0, kMost),
             .agree = Agree::kValue,
             .identity = "seed"});
}

/// The learning rate's schedule.
void add_schedule_options(OptionTable& table, TrainConfig& config) {
  const auto declared = declared_by(nn::schedule_families(), [](const SettingSpec&) { return true; });
  add_settings(
      table, config.schedule_settings, declared, "",
      [&config](const std::vector<Declared>& same) {
        return when(!declares(same, config.schedule), "the schedule is " + config.schedule);
      },
      "--schedule ");
  table.add({.name = "schedule",
             .placeholder = join(nn::schedule_names(), "|"),
             .help = "course of the learning rate",
             .default_text = config.schedule,
             .value = choice_of_names(config.schedule, nn::schedule_names()),
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "warmup",
             .placeholder = "STEPS",
             .help = "steps over which the learning rate rises from 0",
             .default_text = fmt::to_string(config.warmup),
             .value = integer(config.warmup, 0, kMost),
             .agree = Agree::kValue,
             .may_change = true});
}

}  // namespace lockstep::trainer
