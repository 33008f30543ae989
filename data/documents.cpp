#include "data/documents.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/json_value.h"
#include "base/text.h"

namespace lockstep::data {
namespace {

bool has_lines(const std::string& path) {
  std::string name = lower_case(path);
  if (name.ends_with(".gz")) name.resize(name.size() - 3);
  return name.ends_with(".jsonl") || name.ends_with(".ndjson");
}

}  // namespace

std::vector<std::string> document_files(const std::string& files) {
  std::error_code error;
  return std::filesystem::exists(files, error) ? std::vector{files} : split(files, ',');
}

Documents::Documents(const std::string& files) : name_(files) {
  const auto paths = document_files(files);
  alone_ = paths.size() == 1 && !has_lines(paths.front());
  if (alone_) {
    file_ = std::make_unique<TextFile>(files);
    joined_ = file_->text();
    texts_.push_back({.source = files, .begin = 0, .bytes = joined_.size()});
    return;
  }
  for (const std::string& path : paths) {
    if (path.empty())
      throw UsageError(fmt::format("data 'text:{}' has a comma without a file", printable(files)),
                       "give files with one comma between them");
    if (has_lines(path))
      add_lines(path);
    else
      add(path, TextFile(path).text());
  }
  joined_ = memory_;
  if (texts_.empty()) throw IoError(fmt::format("{}: it has no text", printable(files)), "give lines with texts");
}

void Documents::add(std::string source, std::string_view text) {
  if (text.empty()) return;
  texts_.push_back({.source = std::move(source), .begin = memory_.size(), .bytes = text.size()});
  memory_ += text;
  if (text.back() != '\n') memory_ += '\n';
}

void Documents::add_lines(const std::string& path) {
  const TextFile file(path);
  std::string_view rest = file.text();
  constexpr int kDeepest = 64;
  for (std::uint64_t line = 1; !rest.empty(); ++line) {
    const std::string_view one = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(one.size() + 1, rest.size()));
    if (trim(one).empty()) continue;
    std::string source = fmt::format("{}, line {}", path, line);
    const JsonMembers members(one, kDeepest, printable(source), "each line is an object with a member \"text\"");
    add(std::move(source), members.text("text"));
  }
}

std::size_t Documents::bytes() const {
  std::size_t all = 0;
  for (const Text& text : texts_) all += text.bytes;
  return all;
}

std::vector<std::int32_t> Documents::encode(const Vocabulary& vocabulary) const {
  if (alone_) return vocabulary.encode(joined_, name_);
  const auto end = vocabulary.end_of_text();
  std::vector<std::int32_t> tokens;
  for (const Text& text : texts_) {
    // What ends it is the token, or the end of the line that add() has put there.
    const bool is_cut = joined_[text.begin + text.bytes - 1] != '\n';
    const std::size_t bytes = !end && is_cut ? text.bytes + 1 : text.bytes;
    const auto some = vocabulary.encode(joined_.substr(text.begin, bytes), text.source);
    tokens.insert(tokens.end(), some.begin(), some.end());
    if (end) tokens.push_back(*end);
  }
  return tokens;
}

}  // namespace lockstep::data
