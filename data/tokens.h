// Files of tokens that somebody else has made of a text, and how a long row of tokens is cut into samples,
// some of whose tokens may be masked and are to be predicted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "data/word_pieces.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/open.h"

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

inline constexpr int kGpt2Tokens = 50257;

enum class TokenType : std::uint8_t { kU16, kU32 };  // little-endian, without a sign

/// tokens:FILE, numbers below `classes`, which are read sample by sample. They are of `type`; by default of 16 bits, or
/// what the header of llm.c's files says, which is skipped. Where FILE is train.bin and val.bin lies beside it, that
/// one is for validation, and test.bin a test part; otherwise the last 10 % of FILE are. Samples are rows of `context`
/// tokens as in open_text(). Throws IoError for files that are missing, cut, too short or of another kind (texts,
/// archives, arrays; numbers of 32 or 64 bits, unless `type` says that they are not), and for a number that is too
/// large in the first GB, with its byte and `remedy` (default: --classes). One that comes later is found when it is
/// read; so is the end of a file that has been cut since.
DataSplits open_tokens(const std::string& path, std::int64_t context, int classes, std::optional<TokenType> type = {},
                       const std::string& remedy = {}, const Parts& parts = {});

/// The tokens that are more than text.
struct SpecialTokens {
  std::int32_t start, separator, mask;
};
SpecialTokens special_tokens(const WordPieces& pieces);

/// Tokens of a row, of the samples of `context`: those between [CLS] and [SEP]. Throws UsageError for a context of less
/// than three.
std::int64_t masked_row_tokens(std::int64_t context);
/// Of a sample of `context` tokens, how many are predicted: 15 % of its row, at least one.
std::int64_t masked_positions(std::int64_t context);

/// Samples for masked-language training (Devlin et al., 2019, section 3.1): [CLS], a row of `rows`, [SEP]. Of the row
/// exactly masked_positions() tokens are to be predicted, of which 80 % are replaced by [MASK], 10 % by any token,
/// and 10 % stay. Which ones is a pure function of the sample and its draw, and in evaluations of the sample alone.
/// A sample's inputs are tokens (T), token types (T, all 0), its length (T) and positions (K, ascending); its targets
/// are the K tokens that were at these positions. `rows` are data sets of tokens with a label for each, whose classes
/// are the vocabulary; `pieces` may be nullptr.
DataSplits mask_rows(const DataSplits& rows, const SpecialTokens& special, std::shared_ptr<const WordPieces> pieces);

}  // namespace lockstep::data
