#include "options/table.h"

#include <algorithm>
#include <cctype>

namespace lockstep::options {
namespace {

/// A word that starts with '-' and is neither "-" nor a negative number.
bool is_flag(std::string_view word) {
  if (word.size() < 2 || word[0] != '-') return false;
  return std::isdigit(static_cast<unsigned char>(word[1])) == 0 && word[1] != '.';
}

}  // namespace

std::string with_dashes(std::string_view name) {
  std::string plain(name);
  std::ranges::replace(plain, '_', '-');
  return plain;
}

std::string environment_name(std::string_view name) {
  std::string upper = "LOCKSTEP_";
  for (const char c : name) upper += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return upper;
}

NormalisedArgs normalise(const OptionTable& table, std::span<const std::string> args) {
  NormalisedArgs out;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string& word = args[i];
    if (word == "--") {
      out.has_program = true;
      out.program.assign(args.begin() + static_cast<std::ptrdiff_t>(i) + 1, args.end());
      break;
    }
    if (!is_flag(word)) {
      out.words.push_back(word);
      continue;
    }
    const std::size_t equals = std::min(word.find('='), word.size());
    const std::size_t dashes = word[1] == '-' ? 2 : 1;
    const std::string name = with_dashes(std::string_view(word).substr(dashes, equals - dashes));
    const Option* const option = table.find(name);
    std::string rewritten = "--" + (option != nullptr ? option->name : name) + word.substr(equals);
    const OtherProgramsFlag* const elsewhere = option == nullptr ? table.find_elsewhere(name) : nullptr;
    const bool takes_value =
        option != nullptr ? option->kind != OptionKind::kFlag : elsewhere != nullptr && elsewhere->takes_value;
    const bool wants_value = takes_value && equals == word.size();
    if (wants_value && i + 1 < args.size() && args[i + 1] != "--" && !is_flag(args[i + 1]))
      rewritten += "=" + args[++i];
    out.words.push_back(std::move(rewritten));
  }
  return out;
}

}  // namespace lockstep::options
