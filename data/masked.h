// Rows of tokens, some of which are masked and are to be predicted.
#pragma once

#include <cstdint>

#include "data/word_pieces.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data {

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
