// BERT's tokens: words and pieces of words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/basic_tokenizer.h"
#include "data/tokenizer_files.h"
#include "data/vocabulary.h"

namespace lockstep::data {

inline constexpr std::array<std::string_view, 5> kSpecialPieces = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};

/// What is known of how texts are read; the vocabulary decides what is left open.
struct WordPieceRules {
  std::optional<bool> lower_case = {};
  std::optional<bool> strip_marks = {};  // by itself: in lower case those that no piece holds
  bool split_ideographs = true;
  std::vector<std::string> added = {};  // pieces that a text has where their names stand, beside the special ones

  friend bool operator==(const WordPieceRules&, const WordPieceRules&) = default;
};

/// WordPiece (Schuster and Nakajima, "Japanese and Korean Voice Search", 2012) as BERT has it (Devlin et al., 2019): a
/// text is cut into words (BasicTokenizer); a word is, from its start on, the longest pieces of the vocabulary, of
/// which all but the first are written with "##". A word that cannot be cut so, or of more than 100 characters, is
/// [UNK]. The names of special tokens are these tokens wherever a text has them. Immutable; several threads may use
/// one.
///
/// If rules leave it open, text is converted to lower case unless this changes a piece that texts can have. Some
/// published lower-case vocabularies have capitals only in special pieces, or capitals without a small letter (U+211D).
/// Marks (accents, but also a part of Japanese, Hindi, Korean) are then removed unless a piece has them.
class WordPieces final : public Vocabulary {
 public:
  /// vocab.txt: one piece per line, numbered from 0. Files beside it say what `cased` leaves open
  /// (read_tokenizer_files()). Throws IoError, naming file and line, for invalid UTF-8, for a repeated piece, and if
  /// one of [PAD], [UNK], [CLS], [SEP] and [MASK] is missing.
  static std::shared_ptr<const WordPieces> read(const std::string& path, std::optional<bool> cased = std::nullopt);

  /// The same of these pieces, which come from `source`.
  WordPieces(std::vector<std::string> pieces, const std::string& source, WordPieceRules rules = {});
  WordPieces(const WordPieces&) = delete;
  WordPieces& operator=(const WordPieces&) = delete;

  int size() const override { return static_cast<int>(pieces_.size()); }
  /// Without [CLS] and [SEP] around it. Of many texts an Encoder is faster.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const override;
  /// Words with blanks between them.
  std::string decode(std::span<const std::int32_t> tokens) const override;

  const std::vector<std::string>& pieces() const { return pieces_; }
  /// With everything that was open decided. With them, these pieces are these again.
  const WordPieceRules& rules() const { return rules_; }
  /// Of the pieces and of how texts are read: two with one hash are equal.
  std::string sha256() const override;
  /// Whether text keeps its capital letters.
  bool cased() const { return !words_.rules().lower_case; }
  /// How its texts are read, for people: "in lower case, without accents".
  std::string reads() const;
  std::int32_t padding() const { return padding_; }
  std::int32_t unknown() const { return unknown_; }
  std::int32_t start() const { return start_; }          // [CLS]
  std::int32_t separator() const { return separator_; }  // [SEP]
  std::int32_t mask() const { return mask_; }

  const BasicTokenizer& words() const { return words_; }
  const AddedTokens& special() const { return special_; }
  /// Appends the pieces of one of words().
  void encode_word(std::string_view word, std::vector<std::int32_t>& to) const;

  friend bool operator==(const WordPieces& a, const WordPieces& b) {
    return a.pieces_ == b.pieces_ && a.rules_ == b.rules_;
  }

 private:
  std::vector<std::string> pieces_;
  /// By piece, those that continue a word without their "##" in the second one. The keys are parts of pieces_.
  std::unordered_map<std::string_view, std::int32_t> starts_, continues_;
  std::size_t longest_ = 0;  // bytes of a piece
  WordPieceRules rules_;
  std::u32string held_;  // characters of pieces that would lose marks, in ascending order
  BasicTokenizer words_;
  AddedTokens special_;
  std::int32_t padding_ = 0, unknown_ = 0, start_ = 0, separator_ = 0, mask_ = 0;
};

/// WordPieces::encode() for many texts: it remembers words. The pieces must outlive it; one thread uses it.
class WordPieceEncoder {
 public:
  explicit WordPieceEncoder(const WordPieces& pieces) : pieces_(pieces) {}
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source);

 private:
  const WordPieces& pieces_;
  std::unordered_map<std::string, std::vector<std::int32_t>> words_;
  std::string key_;
};

/// Counts tokens that are [UNK]: of a vocabulary that is not the texts' many are.
class UnknownTokens {
 public:
  explicit UnknownTokens(const WordPieces& pieces) : pieces_(pieces) {}
  void add(std::span<const std::int32_t> tokens);
  /// What is to be said of `source`; nothing if they are at most a fifth.
  std::optional<std::string> warning(const std::string& source) const;

 private:
  const WordPieces& pieces_;
  std::uint64_t unknown_ = 0, all_ = 0;
};

/// A vocabulary of at most `size` pieces for these texts: the five special tokens; their characters, of more than 1,000
/// the most frequent; and words and parts of words, which are made by joining, again and again, the two neighbouring
/// pieces that are there most often, as long as that is at least twice (Sennrich, Haddow and Birch, "Neural Machine
/// Translation of Rare Words with Subword Units", 2016). Unless `cased`, in lower case and without accents: scripts
/// without capitals keep their marks, which are more to them. A pure function of the texts. Throws IoError naming
/// `source` and the byte where a text is not UTF-8.
class WordPieceLearner {
 public:
  explicit WordPieceLearner(bool cased = false);
  void add(std::string_view text, const std::string& source);
  std::shared_ptr<const WordPieces> learn(std::size_t size) const;

 private:
  BasicTokenizer tokenizer_;
  AddedTokens special_;
  std::unordered_map<std::string, std::int64_t> words_;  // how often each is there
};

}  // namespace lockstep::data
