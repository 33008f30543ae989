#include "data/dataset.h"

#include "base/error.h"

namespace lockstep::data {

void Dataset::read(std::uint64_t, std::span<float>, std::int32_t&) const {
  LOCKSTEP_ASSERT(false, "{} has no samples of numbers", name());
}

void Dataset::read_changed(std::uint64_t index, std::uint64_t, std::span<float> x, std::int32_t& label) const {
  read(index, x, label);
}

void Dataset::read_tokens(std::uint64_t, std::span<std::int32_t>, std::span<std::int32_t>) const {
  LOCKSTEP_ASSERT(false, "{} has no tokens", name());
}

}  // namespace lockstep::data
