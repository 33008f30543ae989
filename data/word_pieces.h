// BERT's tokens: words and pieces of words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/vocabulary.h"

namespace lockstep::data {

/// WordPiece (Schuster and Nakajima, "Japanese and Korean Voice Search", 2012) as BERT has it (Devlin et al., 2019): a
/// text is cut into words at blanks and around each punctuation mark and each Chinese character; a word is, from its
/// start on, the longest pieces of the vocabulary, of which all but the first are written with "##". A word that cannot
/// be cut so, or of more than 100 characters, is [UNK]. Where no piece has a capital letter, text is taken in lower
/// case and without accents first. Control characters are left out. The results are those of Hugging Face's
/// BertTokenizer. Immutable; several threads may use one.
class WordPieces final : public Vocabulary {
 public:
  /// vocab.txt: one piece per line, numbered from 0. Throws IoError naming the file, and the line, for what is no
  /// UTF-8, for a piece that is there twice, and where one of [PAD], [UNK], [CLS], [SEP] and [MASK] is missing.
  static std::shared_ptr<const WordPieces> read(const std::string& path);

  /// The same of these pieces, which come from `source`.
  WordPieces(std::vector<std::string> pieces, const std::string& source);

  int size() const override { return static_cast<int>(pieces_.size()); }
  /// Without [CLS] and [SEP]. "[MASK]" in a text is three words like others. Of many texts an Encoder is faster.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const override;
  /// Words with blanks between them.
  std::string decode(std::span<const std::int32_t> tokens) const override;

  const std::vector<std::string>& pieces() const { return pieces_; }
  /// Of all of them: two with one hash are equal.
  std::string sha256() const;
  /// Whether text keeps its capital letters and accents.
  bool cased() const { return cased_; }
  std::int32_t padding() const { return padding_; }
  std::int32_t unknown() const { return unknown_; }
  std::int32_t start() const { return start_; }          // [CLS]
  std::int32_t separator() const { return separator_; }  // [SEP]
  std::int32_t mask() const { return mask_; }

  /// Appends the pieces of one word, as for_each_word() has it.
  void encode_word(std::string_view word, std::vector<std::int32_t>& to) const;

  friend bool operator==(const WordPieces& a, const WordPieces& b) { return a.pieces_ == b.pieces_; }

 private:
  std::vector<std::string> pieces_;
  /// By piece, those that continue a word without their "##" in the second one. The keys are parts of pieces_.
  std::unordered_map<std::string_view, std::int32_t> starts_, continues_;
  std::size_t longest_ = 0;  // bytes of a piece
  bool cased_ = false;
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

/// Calls visit(word) for each word of `text`, as WordPieces cuts it. Throws IoError naming `source` and the byte where
/// it is not UTF-8.
void for_each_word(std::string_view text, bool cased, const std::string& source,
                   const std::function<void(std::string_view)>& visit);

/// A vocabulary of at most `size` pieces for these texts: the five special tokens; their characters, of more than 1,000
/// the most frequent; and words and parts of words, which are made by joining, again and again, the two neighbouring
/// pieces that are there most often, as long as that is at least twice (Sennrich, Haddow and Birch, "Neural Machine
/// Translation of Rare Words with Subword Units", 2016). In lower case, without accents. A pure function of the texts.
/// Throws IoError as for_each_word() does.
class WordPieceLearner {
 public:
  void add(std::string_view text, const std::string& source);
  std::shared_ptr<const WordPieces> learn(std::size_t size) const;

 private:
  std::unordered_map<std::string, std::int64_t> words_;  // how often each is there
};

}  // namespace lockstep::data
