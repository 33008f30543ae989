// JSON that others wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace lockstep {

/// What a text does that is not taken for JSON: "is not JSON at byte 7", "nests deeper than 3 levels at byte 9", "names
/// 'a' twice, again before byte 30".
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// `deepest`: 0 is a value alone, 1 an object of values. `offset` is added to the place of what is wrong. Throws
/// JsonError for what is no JSON, nests deeper, names a key of an object twice, or has a number that no double holds.
nlohmann::json parse_json(std::string_view text, int deepest, std::size_t offset = 0);
/// The same, with keys in their order: for few of them.
nlohmann::ordered_json parse_ordered_json(std::string_view text, int deepest);

/// A number without sign, fraction and exponent, at most `most`; nothing else is one. (The library's get() casts
/// whatever number it finds.)
template <class Json>
std::optional<std::uint64_t> whole_number(const Json& value, std::uint64_t most) {
  if (!value.is_number_unsigned() || value.template get<std::uint64_t>() > most) return std::nullopt;
  return value.template get<std::uint64_t>();
}

}  // namespace lockstep
