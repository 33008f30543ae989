#include "data/token_rows.h"

#include "base/error.h"

namespace lockstep::data {

namespace {

std::uint64_t checked(std::int64_t context) {
  check_usage(context >= 1, "a context of less than one token", "give --context 1 or more");
  return static_cast<std::uint64_t>(context);
}

}  // namespace

TokenRows whole_tokens(std::uint64_t tokens, std::int64_t context, const std::string& source) {
  const TokenRows rows = {.begin = 0, .end = tokens, .context = checked(context)};
  if (rows.count() == 0)
    throw IoError(fmt::format("{}: {} tokens do not make a sample of {}", source, tokens, context),
                  "give a longer file, or a smaller --context");
  return rows;
}

TokenParts split_tokens(std::uint64_t tokens, std::int64_t context, const std::string& source) {
  const std::uint64_t width = checked(context);
  const std::uint64_t train = tokens - tokens / 10;
  const TokenParts parts = {.train = {.begin = 0, .end = train, .context = width},
                            .validation = {.begin = train, .end = tokens, .context = width}};
  if (parts.train.count() == 0 || parts.validation.count() == 0)
    throw IoError(fmt::format("{}: {} tokens do not make a sample of {} for training and one for validation", source,
                              tokens, context),
                  "give a longer text, or a smaller --context");
  return parts;
}

}  // namespace lockstep::data
