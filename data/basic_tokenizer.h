// From a text to words, as BERT has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/bert_characters.h"

namespace lockstep::data {

/// How a text is written before it is cut into words.
struct TextRules {
  bool lower_case = true;
  enum class Marks : std::uint8_t {
    kKept,
    kLeftOut,
    kLeftOutUnlessHeld,  // those stay that the vocabulary holds, or characters with them
  } marks = Marks::kLeftOut;
  bool split_ideographs = true;  // each of them is a word

  friend bool operator==(const TextRules&, const TextRules&) = default;
};

/// A text is cut into words at blanks and around each punctuation mark and each ideograph. Control characters are left
/// out. Where marks are left out, characters are decomposed first, and what they are made of is looked at: "≮" is "<".
/// Equal to BertNormalizer and BertPreTokenizer of the `tokenizers` package, but for kLeftOutUnlessHeld, which is not
/// there: a character that `holds` says is held, once it is composed and in lower case, stays as it is.
class BasicTokenizer {
 public:
  using Holds = std::function<bool(char32_t)>;
  explicit BasicTokenizer(const TextRules& rules, Holds holds = nullptr) : rules_(rules), holds_(std::move(holds)) {}

  const TextRules& rules() const { return rules_; }
  /// Throws IoError naming `source` and the byte where `text`, which begins at byte `offset` of it, is not UTF-8.
  void for_each_word(std::string_view text, const std::string& source,
                     const std::function<void(std::string_view)>& visit, std::size_t offset = 0) const;

 private:
  TextRules rules_;
  Holds holds_;
};

/// Throws IoError naming `source` and the byte where `text` is not UTF-8.
void check_utf8(std::string_view text, const std::string& source);

/// The characters of `text`; nothing where it is not UTF-8.
std::optional<std::u32string> characters_of(std::string_view text);

}  // namespace lockstep::data
