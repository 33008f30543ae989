// Texts that are given to a model: --prompt, or a file, or its lines.
#pragma once

#include <string>
#include <vector>

#include "inference/config.h"

namespace lockstep::inference {

struct PromptText {
  std::string text;
  std::string source;  // for errors: "FILE, line 3"
};

/// At least one; lines that are empty are none. Throws IoError for a file that cannot be read, and where no line has a
/// text.
std::vector<PromptText> read_prompts(const InferConfig& config);

}  // namespace lockstep::inference
