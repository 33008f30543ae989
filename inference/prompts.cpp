#include "inference/workers.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/text.h"
#include "data/table_file.h"
#include "data/text_file.h"
#include "data/text_table.h"

namespace lockstep::inference {

std::string read_standard_input() {
  std::string text;
  char buffer[1 << 16];
  while (const std::size_t got = std::fread(buffer, 1, sizeof buffer, stdin)) text.append(buffer, got);
  if (std::ferror(stdin) != 0) throw IoError("cannot read standard input: " + errno_text(errno));
  throw_if_stopped("reading standard input");
  return text;
}

namespace {

std::vector<PromptText> read_table(const InferConfig& config) {
  const Settings settings = resolve(data::text_table_settings(/*classes=*/false), config.table, "a table");
  data::TextTable table = data::read_text_table(config.input, data::text_table_options(settings));
  if (!config.quiet) log_info("{}", table.summary);
  if (table.rows.empty())
    throw IoError(fmt::format("{}: it has no row after its first line, which names the columns", config.input),
                  "write a text per line");
  std::vector<PromptText> prompts;
  for (data::TextRow& row : table.rows) {
    PromptText prompt = {.text = std::move(row.first), .source = std::move(row.source), .of_table = true};
    if (table.texts.size() > 1) prompt.second = std::move(row.second);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

std::vector<PromptText> read_folder(const InferConfig& config) {
  if (config.lines)
    throw UsageError(fmt::format("--lines with {}, a folder: each of its files is a text", config.input),
                     "leave --lines out, or give one file");
  std::string directory = config.input;
  while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
  const data::FileList files = data::list_all_files(directory, data::text_files());
  std::vector<PromptText> prompts;
  for (std::uint64_t i = 0; i < files.size(); ++i) {
    std::string path = files.path(i);
    prompts.push_back({.text = std::string(data::TextFile(path).text()), .source = path, .file = path});
  }
  return prompts;
}

}  // namespace

std::vector<PromptText> read_prompts(const InferConfig& config) {
  if (config.prompt) return {{*config.prompt, "--prompt"}};
  if (std::error_code error; std::filesystem::is_directory(config.input, error)) return read_folder(config);
  if (config.lines && data::is_table(config.input)) return read_table(config);
  const std::string source = config.input == "-" ? "standard input" : config.input;
  std::string text = config.input == "-" ? read_standard_input() : std::string(data::TextFile(config.input).text());
  if (!config.lines) return {{std::move(text), source}};
  std::vector<PromptText> prompts;
  auto lines = split(text, '\n');
  if (lines.back().empty()) lines.pop_back();  // after the end of the last one
  bool any = false;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::string& line = lines[i];
    if (line.ends_with('\r')) line.pop_back();
    any = any || !line.empty();
    prompts.push_back({std::move(line), fmt::format("{}, line {}", source, i + 1)});
  }
  if (!any) throw IoError(fmt::format("{}: no line has a prompt", source), "write one per line");
  return prompts;
}

}  // namespace lockstep::inference
