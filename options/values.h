// Setters that parse one kind of value each and store it. Their targets must outlive them.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text.h"
#include "lockstep/base/settings.h"
#include "options/table.h"

namespace lockstep::options {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();  // of a number that has no limit of its own

/// From `low` to `high`, both included; `open_low` leaves `low` itself out.
struct Range {
  double low = 0;
  double high = std::numeric_limits<double>::max();
  bool open_low = false, open_high = false;  // the bound itself is not allowed
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

/// As text: a value that a setter takes, "default" for an optional without one.
template <class T>
std::string text_of(const T& value) {
  return fmt::to_string(value);
}
template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? fmt::to_string(*value) : "default";
}

/// Whether the target says something: an optional with a value, a number other than 0, a switch that is on.
template <class T>
bool is_asked(const T& value) {
  return value != T{};
}
template <class T>
bool is_asked(const std::optional<T>& value) {
  return value.has_value();
}
inline bool is_asked(const std::optional<bool>& value) { return value == true; }

namespace detail {
/// A Binding whose `check` applies the parser's own limits to the target; an unset target is right.
template <class Target, class Check>
Binding bound(Target& target, Setter set, Check check) {
  return {std::move(set), [&target] { return options::text_of(target); },
          [&target, check = std::move(check)]() -> std::optional<Complaint> {
            if constexpr (std::is_same_v<Target, StoredType<Target>>)
              return check(target);
            else
              return target ? check(*target) : std::nullopt;
          },
          [&target] { return is_asked(target); }};
}
}  // namespace detail

/// An integer from `low` to `high`; Target is an integer type or an optional of one that can hold them. `unset` stands
/// for none.
template <class Target>
Binding integer(Target& target, std::int64_t low, std::int64_t high, std::optional<std::int64_t> unset = {}) {
  return detail::bound(
      target,
      [&target, low, high](const std::string& text) {
        std::int64_t value = 0;
        auto complaint = parse_integer(text, low, high, value);
        if (!complaint) target = static_cast<StoredType<Target>>(value);
        return complaint;
      },
      [low, high, unset](auto value) -> std::optional<Complaint> {
        std::int64_t ignored = 0;
        if (unset && std::cmp_equal(value, *unset)) return std::nullopt;
        if (high == kMost && std::cmp_greater(value, kMost)) return std::nullopt;  // unsigned
        return parse_integer(fmt::to_string(value), low, high, ignored);
      });
}

/// A finite number within `range`; Target is double or std::optional<double>.
template <class Target>
Binding number(Target& target, Range range) {
  return detail::bound(
      target,
      [&target, range](const std::string& text) {
        double value = 0;
        auto complaint = parse_number(text, range, value);
        if (!complaint) target = value;
        return complaint;
      },
      [range](double value) -> std::optional<Complaint> {
        double ignored = 0;
        return parse_number(fmt::to_string(value), range, ignored);
      });
}

/// One of the names, stored as the enumerator beside it.
template <class Enum>
Binding choice(Enum& target, std::vector<std::pair<std::string, Enum>> choices) {
  std::vector<std::string> names;
  for (const auto& [name, value] : choices) names.push_back(name);
  const auto current = [&target, choices]() -> std::string {
    for (const auto& [name, value] : choices)
      if (value == target) return name;
    return "none of them";
  };
  return {[&target, choices, names](const std::string& text) {
            std::size_t index = 0;
            auto complaint = parse_choice(text, names, index);
            if (!complaint) target = choices[index].second;
            return complaint;
          },
          current,
          [current, names] {
            std::size_t index = 0;
            return parse_choice(current(), names, index);
          },
          [&target] { return is_asked(target); }};
}

/// Integers with commas between, each from `low` to `high`.
Setter integers(std::vector<int>& target, int low, int high);
/// One of the names; empty: none.
Binding choice_of_names(std::string& target, std::vector<std::string> names);
Binding boolean(bool& target);
Binding boolean(std::optional<bool>& target);
Binding text(std::string& target);
Binding text(std::optional<std::string>& target);
/// A text that `parse` takes: what it throws (UsageError) is the complaint. `unset` stands for none.
Binding parsed_text(std::string& target, std::function<void(const std::string&)> parse, std::string unset);
/// One setting of a family (lockstep/base/settings.h), held in `target` where it is given.
Binding setting(Settings& target, const SettingSpec& spec);

}  // namespace lockstep::options
