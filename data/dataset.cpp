#include "lockstep/data/dataset.h"

#include "base/error.h"

namespace lockstep::data {

Dataset::Dataset(Info info) : info_(std::move(info)) {
  constexpr std::size_t kMost = std::size_t{1} << 60;
  for (const auto dim : info_.dims)
    if (dim < 0 || __builtin_mul_overflow(elements_, static_cast<std::size_t>(dim), &elements_) || elements_ > kMost)
      throw UsageError(fmt::format("the data set '{}' has samples of an extent of {}", name(), dim),
                       "give extents of at least 0 whose product fits into memory");
}

void Dataset::read(std::uint64_t, std::span<float>, std::int32_t&) const {
  if (has_tokens())
    throw UsageError(fmt::format("the data set '{}' has tokens, and is read as numbers", name()),
                     "read it with read_tokens()");
  throw UsageError(fmt::format("the data set '{}' does not say how its samples are read", name()),
                   "override read(std::uint64_t, std::span<float>, std::int32_t&) const in its class; for tokens set "
                   "Info::tokens, and override read_tokens()");
}

void Dataset::read_augmented(std::uint64_t index, std::uint64_t, std::span<float> x, std::int32_t& label) const {
  read(index, x, label);
}

void Dataset::read_tokens(std::uint64_t, std::span<std::int32_t>, std::span<std::int32_t>) const {
  if (!has_tokens())
    throw UsageError(fmt::format("the data set '{}' has numbers, and is read as tokens", name()),
                     "read it with read()");
  throw UsageError(fmt::format("the data set '{}' does not say how its tokens are read", name()),
                   "override read_tokens(std::uint64_t, std::span<std::int32_t>, std::span<std::int32_t>) const in its "
                   "class");
}

}  // namespace lockstep::data
