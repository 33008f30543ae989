#include "comm/engine.h"

#include <cstring>

#include "base/error.h"
#include "base/flight_record.h"
#include "comm/flight.h"

namespace lockstep::comm {

// Slices are cut at multiples of 64 bytes, so each rank's is its text.
static_assert(Engine::kTextBytes % kArenaAlignment == 0);

Engine::Engine(int rank, int size, StallDiagnosis::Patience patience)
    : rank_(rank),
      size_(size),
      flight_group_(next_flight_group()),
      pairs_(size, *this),
      stall_(*this, size, patience),
      texts_memory_(std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size) * kTextBytes)),
      texts_(texts_memory_->data()) {
  queue_.reserve(512);
}

Engine::~Engine() = default;

std::uint64_t Engine::submit(const Op& op) {
  history_ = digest(op, history_);
  Op& taken = queue_.emplace_back(op);
  taken.op_index = taken_now_ = ++submitted_;
  taken.history = history_;
  taken.flight = record_issue(taken, flight_group_);
  return submitted_;
}

bool Engine::advance() {
  const bool moved = advance_operations();
  taken_now_ = 0;
  return pairs_.advance() || moved;
}

void Engine::check_transfers() {
  if (pairs_.idle()) return;
  const auto who_is_gone = [&]() -> const PairTransfer* {
    for (const PairTransfer* transfer : pairs_.waiting())
      if (is_gone(*transfer)) return transfer;
    return nullptr;
  };
  if (who_is_gone() != nullptr) {
    // What it has done before its end counts.
    while (advance()) {
    }
    if (const PairTransfer* transfer = who_is_gone()) {
      await_own_stop_request();
      throw_gone(*transfer);
    }
  }
}

void Engine::watch_stall() {
  if (idle()) return;
  compare_waits();
  stall_.look(first(), progress(), Clock::now());
}

void Engine::watch_stall_of(const PairTransfer& transfer) {
  if (transfers_stall_.is_due(pairs_.progress(), Clock::now()))
    warn_of_stall(transfer, transfers_stall_.waited_seconds(), job_rank(transfer.peer), name_of(transfer.peer));
}

void Engine::throw_gone(const PairTransfer& transfer) {
  LOCKSTEP_ASSERT(false, "{} is gone in {}", name_of(transfer.peer), describe(transfer, name_of(transfer.peer)));
}

void Engine::time_out(double waited_seconds) {
  compare_waits();  // ranks in different operations are not late
  const auto [ranks, names] = stall_.suspects(first());
  give_up_on(ranks);
  throw TimeoutError(
      fmt::format("{} timed out after {:.3g} s waiting for {}", describe(first()), waited_seconds, names),
      fmt::format("look at the log of rank {}; if it is only slow, raise --timeout-seconds",
                  ranks.empty() ? 0 : ranks.front()));
}

void Engine::time_out(const PairTransfer& transfer, double waited_seconds) {
  throw_transfer_timeout(transfer, waited_seconds, job_rank(transfer.peer), name_of(transfer.peer),
                         trouble_with(transfer.peer));
}

void Engine::check_all_received() { pairs_.check_nothing_left(); }

void Engine::complete_first(bool at_once) {
  if (const std::uint64_t sequence = first().sequence; sequence > 0) completed_sequence_ = sequence;
  flight::complete(first().flight, at_once && completed_ + 1 == taken_now_);
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

}  // namespace lockstep::comm
