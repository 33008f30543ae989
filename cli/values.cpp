#include "cli/values.h"

#include <cmath>

namespace lockstep::cli {

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

namespace {

template <class Target>
Setter number_pair_into(Target& target, Range range) {
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

}  // namespace

Setter number_pair(std::pair<double, double>& target, Range range) { return number_pair_into(target, range); }

Setter number_pair(std::optional<std::pair<double, double>>& target, Range range) {
  return number_pair_into(target, range);
}

Setter integers(std::vector<int>& target, int low, int high) {
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

Setter boolean(bool& target) {
  return [&target](const std::string& text) { return parse_bool(text, target); };
}

Setter boolean(std::optional<bool>& target) {
  return [&target](const std::string& text) {
    bool value = false;
    auto complaint = parse_bool(text, value);
    if (!complaint) target = value;
    return complaint;
  };
}

Setter text(std::string& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    target = text;
    return std::nullopt;
  };
}

}  // namespace lockstep::cli
