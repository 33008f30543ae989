// Text to be continued: rows of tokens, each labelled with the token that follows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.h"

namespace lockstep::data {

/// The characters of a text, numbered in the order of their code points.
class Characters {
 public:
  /// Of `text`, which is UTF-8. Throws IoError naming `source` and the byte where it is not.
  Characters(std::string_view text, const std::string& source);

  int size() const { return static_cast<int>(characters_.size()); }
  /// Throws IoError naming `source` and the byte for what is no UTF-8, and for characters that are not among these.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& source) const;
  std::string decode(std::span<const std::int32_t> tokens) const;

 private:
  std::vector<char32_t> characters_;  // in ascending order
};

/// text:FILE, a token for each character. The first 90 % of them are for training, the others for validation. A sample
/// is a row of `context` tokens; rows follow one another without overlap. Throws IoError for a file that is missing,
/// is no UTF-8 or too short.
DataSplits open_text(const std::string& path, std::int64_t context);
/// The vocabulary of that file.
Characters read_characters(const std::string& path);

}  // namespace lockstep::data
