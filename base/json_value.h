// Values of JSON that others wrote: with the library's header, which no other header of ours includes.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json.h"

namespace lockstep {

/// A number without sign, fraction and exponent, at most `most`; nothing else is one. (The library's get() casts
/// whatever number it finds.)
template <class Json>
std::optional<std::uint64_t> whole_number(const Json& value, std::uint64_t most) {
  if (!value.is_number_unsigned() || value.template get<std::uint64_t>() > most) return std::nullopt;
  return value.template get<std::uint64_t>();
}

}  // namespace lockstep
