#include "options/values.h"

#include <cmath>

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
  if (range.high < std::numeric_limits<double>::max()) wanted += fmt::format(" and at most {}", range.high);
  if (!parsed || !std::isfinite(*parsed)) return Complaint{"not a finite number", wanted};
  if (*parsed < range.low || *parsed > range.high || (range.open_low && *parsed == range.low))
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

Binding number_pair(std::pair<double, double>& target, Range range) {
  return [&target, range](const std::string& text) -> std::optional<Complaint> {
    const auto pieces = split(text, ',');
    if (pieces.size() != 2) return Complaint{"not a pair", "give two numbers with a comma between, such as 0.9,0.999"};
    std::pair<double, double> parsed;
    if (auto complaint = parse_number(trim(pieces[0]), range, parsed.first)) return complaint;
    if (auto complaint = parse_number(trim(pieces[1]), range, parsed.second)) return complaint;
    target = parsed;
    return std::nullopt;
  };
}

Binding integers(std::vector<int>& target, int low, int high) {
  return [&target, low, high](const std::string& text) -> std::optional<Complaint> {
    std::vector<int> parsed;
    for (const auto& piece : split(text, ',')) {
      std::int64_t value = 0;
      if (auto complaint = parse_integer(trim(piece), low, high, value)) return complaint;
      parsed.push_back(static_cast<int>(value));
    }
    target = std::move(parsed);
    return std::nullopt;
  };
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

/// What a text says that is to be of the kind that `fallback` has.
std::optional<Complaint> parse_setting(const std::string& text, const SettingValue& fallback,
                                       std::optional<SettingValue>& value) {
  const auto& kind = fallback.any();
  bool flag = false;
  std::int64_t whole = 0;
  double number = 0;
  if (std::holds_alternative<bool>(kind)) {
    if (auto complaint = parse_bool(text, flag)) return complaint;
    value = flag;
  } else if (std::holds_alternative<std::int64_t>(kind)) {
    if (auto complaint = parse_integer(text, std::numeric_limits<std::int64_t>::min(), kMost, whole)) return complaint;
    value = whole;
  } else if (std::holds_alternative<double>(kind)) {
    constexpr double kLargest = std::numeric_limits<double>::max();
    if (auto complaint = parse_number(text, {.low = -kLargest, .high = kLargest}, number)) return complaint;
    value = number;
  } else {
    std::vector<std::int64_t> all;
    std::vector<double> numbers;
    const bool are_whole = std::holds_alternative<std::vector<std::int64_t>>(kind);
    for (const auto& piece : split(text, ',')) {
      const auto parsed = are_whole ? std::optional<double>() : parse_double(trim(piece));
      const auto parsed_whole = are_whole ? parse_int(trim(piece)) : std::nullopt;
      if (!parsed && !parsed_whole)
        return Complaint{fmt::format("'{}' is no {}number", trim(piece), are_whole ? "whole " : ""),
                         "give numbers with commas between"};
      if (are_whole)
        all.push_back(*parsed_whole);
      else
        numbers.push_back(*parsed);
    }
    value = are_whole ? SettingValue(all) : SettingValue(numbers);
  }
  return std::nullopt;
}

std::optional<Complaint> checked(const SettingSpec& spec, const SettingValue& value) {
  const auto complaint = complaint_about(spec, value);
  if (!complaint) return std::nullopt;
  return Complaint{complaint->what, complaint->remedy};
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

Binding setting(Settings& target, const SettingSpec& spec) {
  return {[&target, spec](const std::string& text) -> std::optional<Complaint> {
            std::optional<SettingValue> value;
            if (auto complaint = parse_setting(text, spec.fallback, value)) return complaint;
            if (auto complaint = checked(spec, *value)) return complaint;
            target.set(spec.name, *value);
            return std::nullopt;
          },
          [&target, spec] { return to_string(target.has(spec.name) ? *target.find(spec.name) : spec.fallback); },
          [&target, spec]() -> std::optional<Complaint> {
            const SettingValue* const value = target.find(spec.name);
            return value != nullptr ? checked(spec, *value) : std::nullopt;
          },
          [&target, spec] {
            const SettingValue* const value = target.find(spec.name);
            return value != nullptr && !asks_for_nothing(spec, *value);
          }};
}

}  // namespace lockstep::options
