#include "lockstep/base/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {
namespace {

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

std::string range_of(const SettingSpec& spec) {
  const bool bounded = spec.high < SettingSpec::kMost;
  const auto above = fmt::format("{} {}", spec.open_low ? "above" : bounded ? "from" : "of at least", spec.low);
  if (!bounded) return "a finite number " + above;
  return fmt::format("a number {} {} {}", above, spec.open_high ? "and below" : "to", spec.high);
}

bool in_range(const SettingSpec& spec, double value) {
  return (spec.open_low ? value > spec.low : value >= spec.low) &&
         (spec.open_high ? value < spec.high : value <= spec.high);
}

const char* kind_of(const SettingValue& value) {
  return std::visit(Overloaded{[](bool) { return "true or false"; }, [](std::int64_t) { return "a whole number"; },
                               [](double) { return "a number"; },
                               [](const std::vector<std::int64_t>&) { return "a list of whole numbers"; },
                               [](const std::vector<double>&) { return "a list of numbers"; },
                               [](const std::string&) { return "a word"; }},
                    value.any());
}

}  // namespace

std::string to_string(const SettingValue& value) {
  return std::visit(
      Overloaded{[](bool flag) { return std::string(flag ? "true" : "false"); },
                 [](const auto& number) { return fmt::to_string(number); },
                 [](const std::vector<std::int64_t>& all) { return fmt::format("{}", fmt::join(all, ",")); },
                 [](const std::vector<double>& all) { return fmt::format("{}", fmt::join(all, ",")); },
                 [](const std::string& word) { return word; }},
      value.any());
}

void check_family_name(const std::string& what, const std::string& name) {
  const auto can_be_typed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' ||
           c == '_';
  };
  if (!name.empty() && std::ranges::all_of(name, can_be_typed) && name.front() != '-') return;
  throw UsageError(fmt::format("a {} named '{}'", what, name), "use letters, digits, '.', '-' and '_'");
}

const SettingValue* Settings::find(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

template <class T>
const T& Settings::get(const std::string& name) const {
  const SettingValue* const value = find(name);
  LOCKSTEP_ASSERT(value != nullptr && std::holds_alternative<T>(value->any()), "setting {} is {}", name,
                  value != nullptr ? kind_of(*value) : "not there");
  return std::get<T>(value->any());
}
template const bool& Settings::get(const std::string&) const;
template const std::int64_t& Settings::get(const std::string&) const;
template const double& Settings::get(const std::string&) const;
template const std::vector<std::int64_t>& Settings::get(const std::string&) const;
template const std::vector<double>& Settings::get(const std::string&) const;
template const std::string& Settings::get(const std::string&) const;

std::optional<Complaint> complaint_about(const SettingSpec& spec, const SettingValue& value) {
  if (value.any().index() != spec.fallback.any().index())
    return Complaint{fmt::format("{} is {}", to_string(value), kind_of(value)),
                     fmt::format("give {}", kind_of(spec.fallback))};
  const auto check = [&](const auto& number) -> std::optional<Complaint> {
    if (in_range(spec, static_cast<double>(number))) return std::nullopt;
    return Complaint{fmt::format("{} is out of range", number), fmt::format("give {}", range_of(spec))};
  };
  const auto check_all = [&](const auto& list) -> std::optional<Complaint> {
    if (list.size() < spec.least_many || list.size() > spec.most_many)
      return Complaint{fmt::format("{} is a list of {}", to_string(value), list.size()),
                       spec.least_many == spec.most_many
                           ? fmt::format("give {} numbers, with commas between", spec.most_many)
                           : fmt::format("give {} to {} numbers", spec.least_many, spec.most_many)};
    for (const auto& number : list)
      if (auto complaint = check(number)) return complaint;
    return std::nullopt;
  };
  const auto check_word = [&](const std::string& word) -> std::optional<Complaint> {
    if (spec.choices.empty()) {
      if (!word.empty()) return std::nullopt;
      return Complaint{"it is empty", fmt::format("give {}", spec.placeholder)};
    }
    if (std::ranges::find(spec.choices, word) != spec.choices.end()) return std::nullopt;
    return Complaint{fmt::format("'{}' is none of the choices", word),
                     fmt::format("give {}", listed(spec.choices, "or"))};
  };
  return std::visit(Overloaded{[](bool) { return std::optional<Complaint>(); },
                               [&](const std::string& word) { return check_word(word); },
                               [&](const std::vector<std::int64_t>& all) { return check_all(all); },
                               [&](const std::vector<double>& all) { return check_all(all); },
                               [&](const auto& number) { return check(number); }},
                    value.any());
}

bool asks_for_nothing(const SettingSpec& spec, const SettingValue& value) {
  if (spec.neutral) return value == *spec.neutral;
  const bool* const flag = std::get_if<bool>(&value.any());
  return flag != nullptr && !*flag && spec.fallback == value;
}

const SettingSpec* find_setting(std::span<const SettingSpec> specs, std::string_view name) {
  const auto found = std::ranges::find(specs, name, &SettingSpec::name);
  return found == specs.end() ? nullptr : &*found;
}

void throw_second(const std::string& what, const std::string& name) {
  throw UsageError(fmt::format("a second {} named '{}'", what, name), "choose another name");
}

void throw_unknown(const std::string& what, const std::string& name, std::span<const std::string> names) {
  const auto near = nearest(name, names);
  throw UsageError(fmt::format("unknown {} '{}'", what, name),
                   near ? fmt::format("did you mean '{}'?", *near) : fmt::format("use one of: {}", join(names, ", ")));
}

Settings resolve(std::span<const SettingSpec> specs, const Settings& given, const std::string& whose) {
  for (const auto& [name, value] : given) {
    const SettingSpec* const spec = find_setting(specs, name);
    if (spec == nullptr) {
      std::vector<std::string> names;
      for (const auto& other : specs) names.push_back(other.name);
      throw UsageError(fmt::format("{} has no setting '{}'", whose, name),
                       names.empty() ? "it has none" : fmt::format("it has {}", join(names, ", ")));
    }
    if (const auto complaint = complaint_about(*spec, value))
      throw UsageError(fmt::format("--{} of {}: {}", name, whose, complaint->what), complaint->remedy);
  }
  Settings all;
  for (const auto& spec : specs) {
    const SettingValue* const value = given.find(spec.name);
    all.set(spec.name, value != nullptr ? *value : spec.fallback);
  }
  return all;
}

}  // namespace lockstep
