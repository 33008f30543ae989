// Hugging Face's files beside a vocabulary, which say how its texts are cut, and the tokens that they add to it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
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

/// The same where `vocabulary` is itself a tokenizer.json, whatever its name.
TokenizerFiles read_tokenizer_file(const std::string& vocabulary, TokenizerKind kind);

/// The same of what `read_file` calls its second argument with, once per file that is there.
using ReadFile = std::function<void(const std::string& path, const std::function<void(std::string_view)>& parse)>;
TokenizerFiles parse_tokenizer_files(const std::string& vocabulary, TokenizerKind kind, const ReadFile& read_file);

/// Puts those that `pieces` does not end with at its end. Throws IoError for one that has another number there.
void append_added_tokens(const TokenizerFiles& files, std::vector<std::string>& pieces, const std::string& vocabulary);

/// Tokens that are no words: a text has them where their names stand.
class AddedTokens {
 public:
  /// A name once; not empty.
  void add(std::string name, std::int32_t token);
  std::vector<std::string> names() const;

  /// Calls on_text(part) for what lies between names, if anything, and on_token(token) for each name, in their order.
  /// Of names that begin at one place the longest counts, as with Hugging Face.
  void cut(std::string_view text, const std::function<void(std::string_view)>& on_text,
           const std::function<void(std::int32_t)>& on_token) const;

 private:
  std::vector<std::pair<std::string, std::int32_t>> tokens_;  // the longest first
  std::string first_;                                         // what they begin with
};

}  // namespace lockstep::data
