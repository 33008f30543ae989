// Setters that parse one kind of value each and store it. Their targets must outlive them.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "cli/option_table.h"

namespace lockstep::cli {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();  // of a number that has no limit of its own

/// From `low` to `high`, both included; `open_low` leaves `low` itself out.
struct Range {
  double low = 0;
  double high = std::numeric_limits<double>::max();
  bool open_low = false;
};

/// The parsers under the setters: they fill `value` or say what is wrong.
std::optional<Complaint> parse_integer(std::string_view text, std::int64_t low, std::int64_t high, std::int64_t& value);
std::optional<Complaint> parse_number(std::string_view text, Range range, double& value);
std::optional<Complaint> parse_bool(std::string_view text, bool& value);
/// `value` becomes the index in `names`.
std::optional<Complaint> parse_choice(std::string_view text, const std::vector<std::string>& names, std::size_t& value);

namespace detail {
template <class T>
struct Stored {
  using Type = T;
};
template <class T>
struct Stored<std::optional<T>> {
  using Type = T;
};
}  // namespace detail

/// What a target holds: T for T and for std::optional<T>.
template <class Target>
using StoredType = typename detail::Stored<Target>::Type;

/// An integer from `low` to `high`; Target is an integer type or an optional of one that can hold them.
template <class Target>
Setter integer(Target& target, std::int64_t low, std::int64_t high) {
  return [&target, low, high](const std::string& text) {
    std::int64_t value = 0;
    auto complaint = parse_integer(text, low, high, value);
    if (!complaint) target = static_cast<StoredType<Target>>(value);
    return complaint;
  };
}

/// A finite number within `range`; Target is double or std::optional<double>.
template <class Target>
Setter number(Target& target, Range range) {
  return [&target, range](const std::string& text) {
    double value = 0;
    auto complaint = parse_number(text, range, value);
    if (!complaint) target = value;
    return complaint;
  };
}

/// One of the names, stored as the enumerator beside it.
template <class Enum>
Setter choice(Enum& target, std::vector<std::pair<std::string, Enum>> choices) {
  return [&target, choices = std::move(choices)](const std::string& text) {
    std::vector<std::string> names;
    for (const auto& [name, value] : choices) names.push_back(name);
    std::size_t index = 0;
    auto complaint = parse_choice(text, names, index);
    if (!complaint) target = choices[index].second;
    return complaint;
  };
}

/// Two numbers "0.9,0.999", each within `range`.
Setter number_pair(std::pair<double, double>& target, Range range);
Setter number_pair(std::optional<std::pair<double, double>>& target, Range range);
/// Integers from `low` to `high`, separated by commas.
Setter integers(std::vector<int>& target, int low, int high);
Setter boolean(bool& target);
Setter boolean(std::optional<bool>& target);
Setter text(std::string& target);

}  // namespace lockstep::cli
