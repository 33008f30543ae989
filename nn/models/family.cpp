// What families have in common: nothing here builds a model.
#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {

std::vector<std::string> ModelFamily::names() const {
  std::vector<std::string> all;
  for (const auto& one : variants) all.push_back(one.name);
  return all;
}

const ModelVariant& ModelFamily::variant(const std::string& name) const {
  const auto found = std::ranges::find(variants, name, &ModelVariant::name);
  LOCKSTEP_ASSERT(found != variants.end(), "'{}' is no model of {}", name, join(names(), ", "));
  return *found;
}

std::vector<SettingSpec> ModelFamily::settings_of(const std::string& name) const {
  auto all = settings;
  for (auto& setting : all)
    if (const auto* value = variant(name).defaults.find(setting.name)) setting.fallback = *value;
  return all;
}

std::string models_that(bool (*does)(const ModelFamily& family), const char* before_last) {
  std::vector<std::string> all;
  for (const auto* family : model_families()) {
    if (!does(*family)) continue;
    if (!family->title.empty())
      all.push_back(family->title);
    else
      for (const auto& variant : family->variants) all.push_back(variant.name);
  }
  return listed(all, before_last);
}

ModelSpec complete(const ModelSpec& spec) {
  ModelSpec whole = spec;
  whole.settings = resolve(model_family(spec.name).settings_of(spec.name), spec.settings, "model " + spec.name);
  return whole;
}

std::optional<std::int64_t> most_tokens(const ModelSpec& spec) {
  const ModelFamily& family = model_family(spec.name);
  // What says how long samples are is, of some models, another setting.
  constexpr const char* kPositions = "context";
  const SettingSpec* const setting = find_setting(family.settings, kPositions);
  if (setting == nullptr || setting->role != SettingSpec::Role::kStructure) return std::nullopt;
  return complete(spec).settings.integer(kPositions);
}

SettingSpec size_setting(const char* name, std::int64_t fallback, const char* help, SettingSpec::Role role) {
  constexpr double kMostSize = 1 << 24;
  return {.name = name, .fallback = fallback, .help = help, .role = role, .low = 1, .high = kMostSize};
}

SettingSpec hidden_setting(std::vector<std::int64_t> fallback) {
  return {.name = "hidden",
          .fallback = std::move(fallback),
          .help = "widths of the hidden layers",
          .low = 1,
          .high = 1 << 24,
          .placeholder = "N,N,…"};
}

SettingSpec dropout_setting() {
  return {.name = "dropout",
          .fallback = 0.0,
          .help = "probability of dropping an element in training",
          .role = SettingSpec::Role::kTraining,
          .high = 1,
          .open_high = true,
          .placeholder = "P",
          .neutral = 0.0};
}

std::int64_t features_of(const ModelSpec& spec) {
  std::int64_t features = 1;
  for (const auto d : spec.sample_shape) features *= d;
  return features;
}

}  // namespace lockstep::nn
