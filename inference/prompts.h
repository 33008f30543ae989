// Texts that are given to a model: --prompt, or a file, or its lines, or the rows of a table.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "inference/config.h"

namespace lockstep::inference {

struct PromptText {
  std::string text;
  std::string source;                   // for errors: "FILE, line 3"
  std::optional<std::string> second{};  // of a pair
  bool of_table = false;                // tabs in it are text
};

/// At least one; of lines also those that are empty: results shall be as many. With --lines the first line of a table
/// (data::is_table()) names its columns, and is no text. Throws IoError for a file that cannot be read, and where no
/// line has a text.
std::vector<PromptText> read_prompts(const InferConfig& config);

}  // namespace lockstep::inference
