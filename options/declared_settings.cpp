#include "options/declared_settings.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "base/text.h"
#include "options/values.h"

namespace lockstep::options {
namespace {

using Role = SettingSpec::Role;

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

/// Held in `target`; where it is not given there, its text is what `name` has, of those who declare it.
Binding setting_of(Settings& target, const std::vector<Declared>& same, const std::string& name) {
  Binding binding = setting(target, same.front().spec);
  binding.text = [&target, same, &name] {
    if (const SettingValue* const given = target.find(same.front().spec.name)) return to_string(*given);
    const auto own = std::ranges::find(same, name, &Declared::name);
    return to_string((own != same.end() ? *own : same.front()).spec.fallback);
  };
  return binding;
}

}  // namespace

void add_settings(OptionTable& table, Settings& target, const std::vector<Declared>& declared,
                  const std::string& default_text, const WhyUnused& unless, const std::string& flag,
                  const std::string* variant) {
  for (const auto& name : texts_of(declared, name_of_setting)) {
    const auto same = those_with(declared, &SettingSpec::name, name);
    const SettingSpec& spec = same.front().spec;
    const OptionKind kind = kind_of(spec);
    const bool augments = spec.role == Role::kAugmentation;
    std::string to = flag + listed(texts_of(same, &Declared::title));
    if (spec.need.what != nullptr) to += fmt::format(" with {}", spec.need.what);
    table.add({.name = name,
               .synonyms = spec.synonyms,
               .kind = kind,
               .placeholder = kind == OptionKind::kFlag ? std::string() : spec.placeholder,
               .help = help_of(same),
               .default_text = default_text.empty() ? default_of(same) : default_text,
               .value = variant != nullptr ? setting_of(target, same, *variant) : setting(target, spec),
               .applies = {.to = std::move(to), .unless = [same, unless] { return unless(same); }},
               .agree = spec.role == Role::kTolerance ? Agree::kNo : Agree::kValue,
               .may_change = spec.role == Role::kTraining,
               .identity = augments ? name : std::string(),
               .not_in_identity = augments ? to_string(spec.fallback) : std::string()});
  }
}

bool declares(const std::vector<Declared>& same, const std::string& name) {
  return std::ranges::find(same, name, &Declared::name) != same.end();
}

}  // namespace lockstep::options
