// GPT-2's tokens: byte pairs, merged.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/vocabulary.h"

namespace lockstep::data {

/// Byte-level byte-pair encoding (Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword
/// Units", 2016; Radford et al., 2019) from the two files that GPT-2 comes with. Any text can be encoded, and comes
/// back as it was. Immutable; several threads may use one.
class BytePairs final : public Vocabulary {
 public:
  /// vocab.json: an object from tokens to their numbers, 0 to N − 1; merges.txt: one pair per line, the likelier ones
  /// first, after a line that starts with #version. Throws IoError naming file and line or byte.
  BytePairs(const std::string& vocabulary_path, const std::string& merges_path);
  ~BytePairs() override;
  BytePairs(const BytePairs&) = delete;
  BytePairs& operator=(const BytePairs&) = delete;

  int size() const override;
  /// "<|endoftext|>" in a text is a text like others, not the token.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const override;
  std::string decode(std::span<const std::int32_t> tokens) const override;
  /// <|endoftext|>
  std::optional<std::int32_t> end_of_text() const override;

 private:
  struct Tables;
  std::unique_ptr<const Tables> tables_;
};

}  // namespace lockstep::data
