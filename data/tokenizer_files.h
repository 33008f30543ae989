// Hugging Face's files beside a vocabulary, which say how its texts are cut.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

struct TokenizerFiles {
  std::optional<bool> lower_case, strip_marks, split_ideographs;  // of a BERT
  bool add_prefix_space = false;                                  // of a GPT-2: each text begins with a blank
  struct Token {
    std::string name;
    std::int64_t number;
  };
  std::vector<Token> added;  // by number
  std::string source;        // the files that say any of it, for errors; empty: there is none
};

enum class TokenizerKind : std::uint8_t { kBert, kGpt2 };

/// What tokenizer_config.json, tokenizer.json and added_tokens.json say in the directory of `vocabulary`, each before
/// the next. Throws IoError naming the file for what is no JSON, and for a tokenizer of another kind, or with something
/// that texts cannot be cut by here.
TokenizerFiles read_tokenizer_files(const std::string& vocabulary, TokenizerKind kind);

/// The same of what `read_file` calls its second argument with, once per file that is there.
using ReadFile = std::function<void(const std::string& path, const std::function<void(std::string_view)>& parse)>;
TokenizerFiles parse_tokenizer_files(const std::string& vocabulary, TokenizerKind kind, const ReadFile& read_file);

/// Puts those that `pieces` does not end with at its end. Throws IoError for one that has another number there.
void append_added_tokens(const TokenizerFiles& files, std::vector<std::string>& pieces, const std::string& vocabulary);

}  // namespace lockstep::data
