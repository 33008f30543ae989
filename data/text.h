// Text to be continued: rows of tokens, each labelled with the token that follows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/vocabulary.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/open.h"

namespace lockstep::data {

/// The characters of a text, numbered in the order of their code points.
class Characters final : public Vocabulary {
 public:
  /// Of `text`, which is UTF-8. Throws IoError naming `source` and the byte where it is not.
  Characters(std::string_view text, const std::string& source);

  int size() const override { return static_cast<int>(characters_.size()); }
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const override;
  std::string decode(std::span<const std::int32_t> tokens) const override;
  /// All of them, in their order: Characters of that are these again.
  std::string text() const;

  friend bool operator==(const Characters& a, const Characters& b) { return a.characters_ == b.characters_; }

 private:
  std::vector<char32_t> characters_;  // in ascending order
};

/// text:FILE (Documents), a token for each character. The first 90 % of them are for training, the others for
/// validation. A sample is a row of `context` tokens; rows follow one another without overlap. Throws IoError for a
/// file that is missing, is no UTF-8 or too short. `characters`: the vocabulary, which may not lack any of the text's
/// (IoError); none: the text's own. `whole`: all of them are DataSplits::whole.
DataSplits open_text(const std::string& path, std::int64_t context,
                     std::shared_ptr<const Characters> characters = nullptr, bool whole = false);
/// The same of another vocabulary's tokens.
DataSplits open_text_of(const std::string& path, std::int64_t context, const Vocabulary& vocabulary,
                        bool whole = false);
/// text:FILE for masked-language training (mask_rows()): the same of word pieces, which are learned from the whole text
/// unless options have them. A sample has `context` tokens, [CLS] and [SEP] included.
DataSplits open_masked_text(const std::string& path, std::int64_t context, const WordPieceOptions& options,
                            bool whole = false);
/// The vocabulary of that file.
Characters read_characters(const std::string& path);

}  // namespace lockstep::data
