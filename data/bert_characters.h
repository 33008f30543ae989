// What BERT's tokenizer takes each character for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lockstep::data {

/// Note [Characters of one version]
/// Unicode grows: what is a letter to one version of a library is a mark or unassigned to another one, and a text would
/// have other tokens on another machine. So kinds, and everything else on which versions differ, are written down here
/// as the `tokenizers` package has them (0.23: kinds of Unicode 8, decompositions of Unicode 9, lower case of Unicode
/// 17). Only what is the same in all versions since then is left to utf8proc.

enum class CharacterKind : std::uint8_t {
  kLetter,  // and whatever is none of the others
  kLeftOut,
  kBlank,
  kPunctuation,
  kMark,       // combines with the character before it: an accent, a vowel sign
  kIdeograph,  // a word by itself
};

CharacterKind kind_of(char32_t code);

/// Unicode's, by which neighbours are put in order; of marks, which are all left out together, 0.
int combining_class_of(char32_t code);

/// The small letter of a capital. (U+0130 has two: "i" and a dot.)
char32_t in_lower_case(char32_t code);

/// Whether its script has capital letters: it is one, or could be.
bool has_case(char32_t code);

/// The canonical decomposition.
struct Decomposition {
  static constexpr std::size_t kMost = 8;
  std::array<char32_t, kMost> codes{};
  std::size_t count = 0;

  const char32_t* begin() const { return codes.data(); }
  const char32_t* end() const { return codes.data() + count; }
};
Decomposition decomposed(char32_t code);

}  // namespace lockstep::data
