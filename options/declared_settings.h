// Settings that families in registries declare (lockstep/base/settings.h), as options.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/settings.h"
#include "options/table.h"

namespace lockstep::options {

/// A setting and who declares it: a family under one of its names.
struct Declared {
  std::string label;  // in help: "gpt", for gpt2 too
  std::string title;  // for people: "ResNets", or the name
  std::string name;
  SettingSpec spec;
};

/// Of all families of a registry, in its order.
template <class Family>
std::vector<Declared> declared_by(const std::vector<const Family*>& families, bool (*wanted)(const SettingSpec& spec)) {
  std::vector<Declared> all;
  for (const auto* family : families)
    for (const auto& spec : family->settings)
      if (wanted(spec))
        all.push_back({.label = family->name, .title = family->name, .name = family->name, .spec = spec});
  return all;
}

/// Whether a family called `name` is among them.
bool declares(const std::vector<Declared>& same, const std::string& name);

/// What a run is instead, where it has no use for a setting that `same` declare.
using WhyUnused = std::function<std::optional<std::string>(const std::vector<Declared>& same)>;

/// Adds an option for each setting of `declared`, held in `target`. `default_text`: what holds where it is not given;
/// empty: the families' own defaults. `flag` names the flag that chooses the family ("--optimizer "), for messages.
/// `variant`: the run's, of names that have defaults of their own.
void add_settings(OptionTable& table, Settings& target, const std::vector<Declared>& declared,
                  const std::string& default_text, const WhyUnused& unless, const std::string& flag = {},
                  const std::string* variant = nullptr);

}  // namespace lockstep::options
