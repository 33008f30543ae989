// Settings that families declare (lockstep/base/settings.h), as options: of models, data sets, optimizers and
// schedules.
#include <algorithm>

#include "base/text.h"
#include "checkpoint/model_options.h"
#include "lockstep/data/families.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/optim/optimizers.h"
#include "options/declared_settings.h"
#include "options/values.h"
#include "trainer/carried_state.h"
#include "trainer/options.h"

namespace lockstep::trainer {
namespace {

using checkpoint::declared_by_models;
using checkpoint::other_model;
using options::boolean;
using options::choice_of_names;
using options::Declared;
using options::declared_by;
using options::integer;
using options::kMost;
using options::number;
using options::text;
using options::when;
using Role = SettingSpec::Role;

void add_loss_scale_option(OptionTable& table, TrainConfig& config) {
  const auto complaint_of = [](const std::string& scale) -> std::optional<options::Complaint> {
    if (is_loss_scale(scale)) return std::nullopt;
    return options::Complaint{fmt::format("'{}' is no scale of losses", scale),
                              fmt::format("give {}, or a positive number: 1024", kDynamic)};
  };
  table.add(
      {.name = "loss-scale",
       .placeholder = "dynamic|N",
       .help = "factor for losses, so that f16 can hold their gradients; dynamic: starts at 65536, doubles after 2000 "
               "good steps, and halves after a step with non-finite gradients, which is skipped; or a fixed number",
       .default_text = kDynamic,
       .value = {[&config, complaint_of](const std::string& scale) {
                   auto complaint = complaint_of(scale);
                   if (!complaint) config.loss_scale = scale;
                   return complaint;
                 },
                 [&config] { return config.loss_scale.empty() ? std::string(kDynamic) : config.loss_scale; },
                 [&config, complaint_of] { return complaint_of(config.loss_scale); },
                 [&config] { return !config.loss_scale.empty(); }},
       .applies = {.to = "--precision fp16",
                   .unless = [&config]() -> std::optional<std::string> {
                     return when(config.precision != Precision::kFp16,
                                 fmt::format("this run has --precision {}", name_of(config.precision)));
                   }},
       .agree = Agree::kValue,
       .may_change = true});
}

/// Of an unknown model nobody can say what it takes: others complain of it.
bool is_known(const ModelConfig& model) { return nn::find_model_family(model.name) != nullptr; }

/// How training changes samples at random, which evaluations do not.
bool changes_samples(const SettingSpec& spec) {
  return spec.name == data::kAugment || spec.role == Role::kAugmentation;
}

void add_data_settings(OptionTable& table, TrainConfig& config, bool (*wanted)(const SettingSpec& spec)) {
  add_settings(table, config.data_settings, declared_by(data::dataset_families(), wanted), "",
               [&config](const std::vector<Declared>& same) -> std::optional<std::string> {
                 const auto* family = data::find_dataset_family(config.data);
                 if (family == nullptr) return std::nullopt;
                 if (!declares(same, family->name)) return "the data is " + family->name;
                 const SettingNeed& need = same.front().spec.need;
                 if (need.holds == nullptr) return std::nullopt;
                 return when(!need.holds(own_settings(family->settings, config.data_settings, "data " + family->name)),
                             need.otherwise);
               });
}

}  // namespace

namespace {

/// Texts, as word pieces or as byte pairs.
void add_vocabulary_options(OptionTable& table, TrainConfig& config) {
  const auto unless = [&config]() -> std::optional<std::string> {
    if (!is_known(config.model)) return std::nullopt;
    if (!nn::model_family(config.model.name).word_pieces) return "the model is " + config.model.name;
    const auto* family = data::find_dataset_family(config.data);
    return when(family != nullptr && !family->has_tokens, "the data is " + config.data);
  };
  const std::string to =
      fmt::format("texts that {} read", nn::models_that([](const auto& family) { return family.word_pieces; }));
  const auto no_text = [&config]() -> std::optional<std::string> {
    if (!is_known(config.model)) return std::nullopt;
    const auto& model = nn::model_family(config.model.name);
    const auto* family = data::find_dataset_family(config.data);
    if (model.word_pieces) return when(family != nullptr && !family->has_tokens, "the data is " + config.data);
    if (!model.takes_tokens) return "the model is " + config.model.name;
    return when(family != nullptr && !family->takes_vocabulary, "the data is " + config.data);
  };
  table.add({.name = "vocab",
             .placeholder = "FILE",
             .help = "word pieces, one per line: the vocab.txt of a BERT. For other models GPT-2's vocab.json, with "
                     "merges.txt beside it, or tokenizer.json",
             .default_text = "the weights', or learned from the text; without, a token is a character",
             .value = text(config.vocabulary),
             .applies = {.to = "texts", .unless = no_text}});
  table.add({.name = "merges",
             .placeholder = "FILE",
             .help = "GPT-2's merges.txt, if it lies elsewhere",
             .value = text(config.merges),
             .applies = {.to = "a vocab.json", .unless = [&config, no_text]() -> std::optional<std::string> {
                           if (config.vocabulary.empty()) return "there is no --vocab";
                           if (is_known(config.model) && nn::model_family(config.model.name).word_pieces)
                             return "the model is " + config.model.name;
                           return no_text();
                         }}});
  options::Binding cased = boolean(config.cased);
  cased.asked = [&config] { return config.cased.has_value(); };
  table.add({.name = "cased",
             .placeholder = "yes|no",
             .help = "whether texts keep capital letters and accents",
             .default_text = "as the vocabulary or a tokenizer_config.json beside it says; no if learned",
             .value = std::move(cased),
             .applies = {.to = to, .unless = unless},
             .agree = Agree::kValue});
  table.add({.name = "vocab-size",
             .placeholder = "N",
             .help = "most word pieces to learn",
             .default_text = fmt::to_string(data::WordPieceOptions().vocabulary_size),
             .value = integer(config.vocabulary_size, 32, 1 << 24),
             .applies = {.to = to + ", without --vocab",
                         .unless =
                             [&config, unless] {
                               return config.vocabulary.empty() ? unless()
                                                                : std::optional<std::string>("there is --vocab");
                             }},
             .agree = Agree::kValue});
}

}  // namespace

Settings own_settings(std::span<const SettingSpec> specs, const Settings& given, const std::string& whose) {
  Settings own;
  for (const auto& [name, value] : given)
    if (find_setting(specs, name) != nullptr) own.set(name, value);
  return resolve(specs, own, whose);
}

void add_model_options(OptionTable& table, TrainConfig& config) {
  checkpoint::add_model_name(table, config.model);
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
             .default_text = "the data's",
             .value = integer(config.classes, 1, 1 << 24),
             .agree = Agree::kValue});
  add_data_settings(table, config, [](const SettingSpec& spec) { return !changes_samples(spec); });
  add_vocabulary_options(table, config);
  const auto declared = declared_by_models(
      [](const SettingSpec& spec) { return spec.role != Role::kTraining && spec.role != Role::kInitialValues; });
  add_settings(
      table, config.model.settings, declared, "",
      [&config](const std::vector<Declared>& same) -> std::optional<std::string> {
        if (auto other = other_model(same, config.model)) return other;
        // Before data are chosen (lockstep bench has synthetic ones) they may be anything.
        const bool of_tokens =
            is_known(config.model) && nn::model_family(config.model.name).tokens_setting == same.front().spec.name;
        return when(of_tokens && !config.data.empty() && !data::may_have_tokens(config.data),
                    "the data is " + config.data);
      },
      "", &config.model.name);
}

void add_training_options(OptionTable& table, TrainConfig& config) {
  add_data_settings(table, config, changes_samples);
  const auto declared = declared_by_models(
      [](const SettingSpec& spec) { return spec.role == Role::kTraining || spec.role == Role::kInitialValues; });
  add_settings(
      table, config.model.settings, declared, "",
      [&config](const std::vector<Declared>& same) -> std::optional<std::string> {
        if (auto other = other_model(same, config.model)) return other;
        return when(same.front().spec.role == Role::kInitialValues && !config.weights.empty() && !config.non_strict,
                    "this one starts from --weights " + config.weights);
      },
      "", &config.model.name);
}

namespace {

/// ", 1 for lars": rates of optimizers that have another than most.
std::string rates_of_optimizers() {
  std::string text;
  for (const auto* family : nn::optimizer_families())
    if (family->lr != nn::OptimizerFamily().lr) text += fmt::format(", {} for {}", family->lr, family->name);
  return text;
}

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
template <class Given>
std::string of_models(const Given& given) {
  std::string text;
  for (const auto* family : nn::model_families())
    if (const std::string value = given(family->training); !value.empty())
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
      "--optimizer ", &config.optimizer);
}

std::string losses_help() {
  std::vector<std::string> all;
  for (const auto* family : nn::loss_families()) all.push_back(fmt::format("{} ({})", family->name, family->about));
  return listed(all, "or");
}

}  // namespace

void add_loss_options(OptionTable& table, TrainConfig& config, bool training) {
  options::Binding loss = choice_of_names(config.loss, nn::loss_names());
  loss.text = [&config] { return loss_of(config); };
  loss.set = [set = loss.set](const std::string& name) {
    for (const auto* family : nn::loss_families())
      if (std::ranges::find(family->synonyms, name) != family->synonyms.end()) return set(family->name);
    return set(name);
  };
  table.add({.name = "loss",
             .placeholder = join(nn::loss_names(), "|"),
             .help = "loss function: " + losses_help(),
             .default_text = nn::usual_loss().name,
             .value = std::move(loss),
             .agree = Agree::kValue,
             .identity = "loss",
             .not_in_identity = nn::usual_loss().name});
  const auto declared =
      training ? declared_by(nn::loss_families(), [](const SettingSpec&) { return true; })
               : declared_by(nn::loss_families(), [](const SettingSpec& spec) { return spec.role != Role::kTraining; });
  add_settings(
      table, config.loss_settings, declared, "",
      [&config](const std::vector<Declared>& same) {
        return when(!declares(same, loss_of(config)), "the loss is " + loss_of(config));
      },
      "--loss ");
}

void add_update_options(OptionTable& table, TrainConfig& config) {
  table.group("Optimisation");
  add_loss_options(table, config, /*training=*/true);
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
             .synonyms = {"learning-rate"},
             .placeholder = "X",
             .help = "learning rate",
             .default_text = config.lr
                                 ? fmt::to_string(*config.lr)  // a program's own
                                 : fmt::format("{}{}{}", nn::OptimizerFamily().lr, rates_of_optimizers(),
                                               of_models([](const auto& training) {
                                                 if (training.lr_per_256)
                                                   return fmt::format("{} * global batch / 256", *training.lr_per_256);
                                                 return training.lr ? fmt::to_string(*training.lr) : std::string();
                                               })),
             .value = number(config.lr, {}),
             .agree = Agree::kValue});
  add_optimizer_settings(table, config);
  std::vector<std::string> decays;
  for (const auto* family : nn::optimizer_families())
    decays.push_back(fmt::format("{} for {}", family->weight_decay, family->name));
  table.add({.name = "weight-decay",
             .synonyms = {"wd"},
             .placeholder = "X",
             .help = "weight decay",
             .default_text = join(decays, ", ") + of_models([](const auto& training) {
                               return training.weight_decay ? fmt::to_string(*training.weight_decay) : std::string();
                             }),
             .value = number(config.weight_decay, {}),
             .agree = Agree::kValue});
  table.add({.name = "no-decay",
             .kind = options::OptionKind::kList,
             .placeholder = "PATTERN,…",
             .help = "parameters without weight decay, by their names; * stands for any characters: '*.bias'",
             .value = text(config.no_decay),
             .applies = {.to = "runs with weight decay",
                         .unless = [&config]() -> std::optional<std::string> {
                           return when(is_known(config.model) && weight_decay_of(config) == 0, "it is 0 here");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "clip-norm",
             .placeholder = "X",
             .help = "largest L2 norm of all gradients together; 0: no clipping",
             .default_text = fmt::to_string(config.clip_norm),
             .value = number(config.clip_norm, {}),
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "clip-value",
             .placeholder = "X",
             .help = "largest magnitude of each element of the gradients; 0: no clipping",
             .default_text = fmt::to_string(config.clip_value),
             .value = number(config.clip_value, {}),
             .applies = {.to = "gradients in f32 or bf16, without --clip-norm",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.clip_value == 0) return std::nullopt;
                           if (config.clip_norm > 0) return "there is --clip-norm";
                           return when(config.precision == Precision::kFp16, "those of fp16 are scaled");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
  add_loss_scale_option(table, config);
  table.add({.name = "seed",
             .placeholder = "N",
             .help = "seed of initial parameters and sample order",
             .default_text = fmt::to_string(config.seed),
             .value = integer(config.seed, 0, kMost),
             .agree = Agree::kValue,
             .identity = "seed"});
}

std::string schedules_help() {
  std::vector<std::string> all;
  for (const auto* family : nn::schedule_families()) all.push_back(fmt::format("{} ({})", family->name, family->about));
  return listed(all, "or");
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
             .help = "learning-rate schedule: " + schedules_help(),
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
