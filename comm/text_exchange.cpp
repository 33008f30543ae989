#include "comm/text_exchange.h"

#include <cstring>

#include "base/error.h"

namespace lockstep::comm {

// Slices are cut at multiples of 64 bytes, so each rank's is its text.
static_assert(TextExchange::kTextBytes % kArenaAlignment == 0);

Op TextExchange::begin(const std::string& mine) {
  LOCKSTEP_ASSERT(mine.size() < kTextBytes, "a text of {} bytes", mine.size());
  std::byte* const own = texts_->data() + static_cast<std::size_t>(rank_) * kTextBytes;
  std::memset(own, 0, kTextBytes);
  std::memcpy(own, mine.data(), mine.size());
  Op op;
  op.kind = OpKind::kAllGather;
  op.count = texts_->size();
  op.dtype = DType::kU8;
  op.data = texts_->data();
  return op;
}

std::vector<std::string> TextExchange::all() const {
  std::vector<std::string> all;
  for (std::size_t at = 0; at < texts_->size(); at += kTextBytes)
    all.emplace_back(reinterpret_cast<const char*>(texts_->data() + at));
  return all;
}

}  // namespace lockstep::comm
