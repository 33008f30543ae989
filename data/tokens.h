// Tokens that somebody else has made of a text.
#pragma once

#include <cstdint>
#include <string>

#include "data/dataset.h"

namespace lockstep::data {

inline constexpr int kGpt2Tokens = 50257;

/// tokens:FILE, little-endian 16-bit numbers below `classes`, which are read sample by sample. Where FILE is train.bin
/// and val.bin lies beside it, that one is for validation; otherwise the last 10 % of FILE are. Samples are rows of
/// `context` tokens as in open_text(). Throws IoError for files that are missing, cut or too short; a number that is
/// too large is found when it is read, and named with its byte; so is the end of a file that has been cut since.
DataSplits open_tokens(const std::string& path, std::int64_t context, int classes);

}  // namespace lockstep::data
