#include "inference/prompts.h"

#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/stop.h"
#include "base/text.h"

namespace lockstep::inference {
namespace {

std::string read_standard_input() {
  std::string text;
  char buffer[1 << 16];
  while (const std::size_t got = std::fread(buffer, 1, sizeof buffer, stdin)) text.append(buffer, got);
  if (std::ferror(stdin) != 0) throw IoError("cannot read standard input: " + errno_text(errno));
  throw_if_stopped("reading standard input");
  return text;
}

}  // namespace

std::vector<PromptText> read_prompts(const InferConfig& config) {
  if (config.prompt) return {{*config.prompt, "--prompt"}};
  const std::string source = config.input == "-" ? "standard input" : config.input;
  std::string text = config.input == "-" ? read_standard_input() : std::string(MappedFile(config.input).text());
  if (!config.lines) return {{std::move(text), source}};
  std::vector<PromptText> prompts;
  const auto lines = split(text, '\n');
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::string line = lines[i];
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty()) prompts.push_back({std::move(line), fmt::format("{}, line {}", source, i + 1)});
  }
  if (prompts.empty()) throw IoError(fmt::format("{}: no line has a prompt", source), "write one per line");
  return prompts;
}

}  // namespace lockstep::inference
