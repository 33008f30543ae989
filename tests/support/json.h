// JSON that tests look into.
#pragma once

#include <string_view>

#include "base/json_value.h"

namespace lockstep::testing {

/// Parsed in base: to compile the library's parser again takes a second.
inline nlohmann::json json_in(std::string_view text) { return parse_json(text, /*deepest=*/100); }

}  // namespace lockstep::testing
