// How a long row of tokens is cut into samples.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::data {

/// Consecutive samples of `context` tokens in tokens [begin, end). The label of a sample's last token is the first
/// token after it.
struct TokenRows {
  std::uint64_t begin = 0, end = 0;
  std::uint64_t context = 1;

  std::uint64_t count() const { return end > begin ? (end - begin - 1) / context : 0; }
  std::uint64_t begin_of(std::uint64_t sample) const { return begin + sample * context; }
};

struct TokenParts {
  TokenRows train, validation;
};

/// The first 90 % for training, the rest for validation. Throws UsageError for a context below 1, and IoError naming
/// `source` where a part has no sample.
TokenParts split_tokens(std::uint64_t tokens, std::int64_t context, const std::string& source);

/// All of them. Throws the same.
TokenRows whole_tokens(std::uint64_t tokens, std::int64_t context, const std::string& source);

}  // namespace lockstep::data
