#include "comm/engine.h"

#include <cstring>

#include "base/error.h"
#include "base/status_report.h"

namespace lockstep::comm {

// Slices are cut at multiples of 64 bytes, so each rank's is its text.
static_assert(Engine::kTextBytes % kArenaAlignment == 0);

Engine::Engine(int rank, int size)
    : rank_(rank),
      size_(size),
      texts_memory_(std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size) * kTextBytes)),
      texts_(texts_memory_->data()) {
  queue_.reserve(512);
}

Engine::~Engine() = default;

std::uint64_t Engine::submit(const Op& op) {
  history_ = digest(op, history_);
  Op& taken = queue_.emplace_back(op);
  taken.op_index = ++submitted_;
  taken.history = history_;
  return submitted_;
}

void Engine::complete_first() {
  if (const std::uint64_t sequence = first().sequence; sequence > 0) completed_sequence_ = sequence;
  ++completed_;
  ++head_;
  // Done with a stretch: move what is left to the front, which costs less than has been taken since the last time.
  if (head_ * 2 >= queue_.size()) {
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
}

void Engine::put_texts(std::byte* texts, std::size_t stride_bytes) {
  texts_ = texts;
  texts_stride_ = stride_bytes;
  texts_memory_.reset();
}

Op Engine::text_op(const std::string& mine, bool within_host) {
  LOCKSTEP_ASSERT(mine.size() < kTextBytes, "a text of {} bytes", mine.size());
  std::memset(text_of(rank_), 0, kTextBytes);
  std::memcpy(text_of(rank_), mine.data(), mine.size());
  Op op;
  op.kind = OpKind::kAllGather;
  op.count = within_host ? 0 : static_cast<std::size_t>(size_) * kTextBytes;
  op.dtype = DType::kU8;
  op.data = texts_;
  op.stride_bytes = texts_stride_;
  op.within_host = within_host;
  return op;
}

std::vector<std::string> Engine::texts() const {
  std::vector<std::string> all;
  for (int r = 0; r < size_; ++r) all.emplace_back(reinterpret_cast<const char*>(text_of(r)));
  return all;
}

void Engine::throw_timeout(double waited_seconds, const std::vector<int>& ranks, const std::string& names) const {
  report_missing_ranks(ranks);
  throw TimeoutError(
      fmt::format("{} timed out after {:.3g} s waiting for {}", describe(first()), waited_seconds, names),
      fmt::format("look at the log of rank {}; if it is only slow, raise --timeout-seconds",
                  ranks.empty() ? 0 : ranks.front()));
}

}  // namespace lockstep::comm
