#include "options/values.h"

#include <cmath>

#include "base/error.h"

namespace lockstep::options {

std::optional<Complaint> parse_integer(std::string_view text, std::int64_t low, std::int64_t high,
                                       std::int64_t& value) {
  const auto parsed = lockstep::parse_int(text);
  const std::string wanted = high == std::numeric_limits<std::int64_t>::max()
                                 ? fmt::format("give an integer of at least {}", low)
                                 : fmt::format("give an integer from {} to {}", low, high);
  if (!parsed) return Complaint{"not an integer that fits", wanted};
  if (*parsed < low || *parsed > high) return Complaint{"out of range", wanted};
  value = *parsed;
  return std::nullopt;
}

std::optional<Complaint> parse_number(std::string_view text, Range range, double& value) {
  const auto parsed = parse_double(text);
  std::string wanted = range.open_low ? fmt::format("give a number above {}", range.low)
                                      : fmt::format("give a number of at least {}", range.low);
  if (range.high < std::numeric_limits<double>::max())
    wanted += fmt::format(" and {} {}", range.open_high ? "below" : "at most", range.high);
  if (!parsed || !std::isfinite(*parsed)) return Complaint{"not a finite number", wanted};
  if (*parsed < range.low || *parsed > range.high || (range.open_low && *parsed == range.low) ||
      (range.open_high && *parsed == range.high))
    return Complaint{"out of range", wanted};
  value = *parsed;
  return std::nullopt;
}

std::optional<Complaint> parse_bool(std::string_view text, bool& value) {
  const bool yes = text == "true" || text == "1" || text == "yes" || text == "on";
  const bool no = text == "false" || text == "0" || text == "no" || text == "off";
  if (!yes && !no) return Complaint{"not a yes or no", "give true or false"};
  value = yes;
  return std::nullopt;
}

std::optional<Complaint> parse_choice(std::string_view text, const std::vector<std::string>& names,
                                      std::size_t& value) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] != text) continue;
    value = i;
    return std::nullopt;
  }
  const auto close = nearest(text, names);
  const std::string all = "one of " + join(names, ", ");
  return Complaint{"no such choice", close ? fmt::format("did you mean {}? It is {}", *close, all) : "give " + all};
}

Setter integers(std::vector<int>& target, int low, int high) {
  return [&target, low, high](const std::string& text) -> std::optional<Complaint> {
    target.clear();
    for (const auto& word : split(text, ',')) {
      std::int64_t value = 0;
      if (auto complaint = parse_integer(word, low, high, value)) return complaint;
      target.push_back(static_cast<int>(value));
    }
    return std::nullopt;
  };
}

Binding choice_of_names(std::string& target, std::vector<std::string> names) {
  const auto parse = [names = std::move(names)](const std::string& text) {
    std::size_t index = 0;
    return parse_choice(text, names, index);
  };
  return {[&target, parse](const std::string& text) {
            auto complaint = parse(text);
            if (!complaint) target = text;
            return complaint;
          },
          [&target] { return target.empty() ? "default" : target; },
          [&target, parse] { return target.empty() ? std::nullopt : parse(target); },
          [&target] { return !target.empty(); }};
}

namespace {

template <class Target>
Binding boolean_into(Target& target) {
  return {[&target](const std::string& text) {
            bool value = false;
            auto complaint = parse_bool(text, value);
            if (!complaint) target = value;
            return complaint;
          },
          [&target] { return options::text_of(target); },
          {},
          [&target] { return is_asked(target); }};
}

/// As is_asked() has it, for strings that may be there.
template <class Target>
Binding text_into(Target& target, std::string (*text)(const Target& target)) {
  return {[&target](const std::string& value) -> std::optional<Complaint> {
            target = value;
            return std::nullopt;
          },
          [&target, text] { return text(target); },
          {},
          [&target] { return is_asked(target); }};
}

// A text as a value of each kind that a setting may have.

std::optional<Complaint> parse_value(std::string_view text, const SettingSpec&, bool& value) {
  return parse_bool(text, value);
}

std::optional<Complaint> parse_value(std::string_view text, const SettingSpec& spec, std::int64_t& value) {
  const std::int64_t high = spec.high < SettingSpec::kMost ? static_cast<std::int64_t>(spec.high) : kMost;
  return parse_integer(text, static_cast<std::int64_t>(spec.low), high, value);
}

std::optional<Complaint> parse_value(std::string_view text, const SettingSpec& spec, double& value) {
  return parse_number(
      text, {.low = spec.low, .high = spec.high, .open_low = spec.open_low, .open_high = spec.open_high}, value);
}

std::optional<Complaint> parse_value(std::string_view text, const SettingSpec& spec, std::string& value) {
  if (spec.choices.empty()) {
    value = text;
    return std::nullopt;
  }
  std::size_t index = 0;
  if (auto complaint = parse_choice(text, spec.choices, index)) return complaint;
  value = spec.choices[index];
  return std::nullopt;
}

template <class T>
std::optional<Complaint> parse_value(std::string_view text, const SettingSpec& spec, std::vector<T>& values) {
  for (const auto& piece : split(text, ','))
    if (auto complaint = parse_value(trim(piece), spec, values.emplace_back())) return complaint;
  return std::nullopt;
}

}  // namespace

Binding boolean(bool& target) { return boolean_into(target); }
Binding boolean(std::optional<bool>& target) { return boolean_into(target); }

Binding text(std::string& target) {
  return text_into<std::string>(target, [](const std::string& value) { return value; });
}
Binding text(std::optional<std::string>& target) {
  return text_into<std::optional<std::string>>(target, [](const auto& value) { return value.value_or("default"); });
}

Binding parsed_text(std::string& target, std::function<void(const std::string&)> parse, std::string unset) {
  const auto complaint_of = [parse = std::move(parse)](const std::string& text) -> std::optional<Complaint> {
    try {
      parse(text);
      return std::nullopt;
    } catch (const UsageError& error) {
      return Complaint{error.what(), error.remedy()};
    }
  };
  return {[&target, complaint_of](const std::string& text) {
            auto complaint = complaint_of(text);
            if (!complaint) target = text;
            return complaint;
          },
          [&target] { return target; }, [&target, complaint_of] { return complaint_of(target); },
          [&target, unset = std::move(unset)] { return target != unset; }};
}

Binding setting(Settings& target, const SettingSpec& spec) {
  const auto given = [&target, name = spec.name] { return target.find(name); };
  return {[&target, spec](const std::string& text) {
            return std::visit(
                [&]<class T>(const T&) -> std::optional<Complaint> {
                  T value{};
                  if (auto complaint = parse_value(text, spec, value)) return complaint;
                  if (auto complaint = complaint_about(spec, value)) return complaint;
                  target.set(spec.name, std::move(value));
                  return std::nullopt;
                },
                spec.fallback.any());
          },
          [given, spec] { return to_string(given() != nullptr ? *given() : spec.fallback); },
          [given, spec] { return given() != nullptr ? complaint_about(spec, *given()) : std::nullopt; },
          [given, spec] { return given() != nullptr && !asks_for_nothing(spec, *given()); }};
}

}  // namespace lockstep::options
