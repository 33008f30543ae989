#include "comm/mpi/engine.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lockstep::comm {
namespace {

/// Each operation sends and receives, in two phases, a few chunks to and from each peer.
std::size_t most_messages(const Tuning& tuning, int world_size) {
  return tuning.operations_under_way * 4 * tuning.chunks_under_way * static_cast<std::size_t>(world_size - 1);
}

// Between two looks at what the other ranks say.
constexpr auto kCheckEvery = std::chrono::milliseconds(100);

}  // namespace

Engine::Engine(const Session& session, const Tuning& tuning, Clock::duration patience)
    : tuning_(tuning),
      small_limit_(tuning.small_limit(session.size())),
      patience_(patience),
      transfers_(session, most_messages(tuning, session.size())),
      stall_watch_(session, transfers_.tags(), patience) {
  for (std::size_t i = 0; i < tuning.operations_under_way; ++i)
    slots_.push_back(std::make_unique<Slot>(session.rank(), session.size(), tuning_, transfers_));
  waiting_.reserve(256);
}

Engine::~Engine() {
  if (idle()) return;
  for (auto& slot : slots_) keep_for_mpi(std::move(slot));
}

void Engine::submit(const Op& op) {
  history_ = digest(op, history_);
  Op& taken = waiting_.emplace_back(op);
  taken.op_index = ++submitted_;
  taken.history = history_;
  begin_waiting();
}

bool Engine::advance() {
  if (idle()) return false;
  if (transfers_.test()) {
    last_look_ = {};
    ++moves_;
    due_ = false;
    suspects_.clear();
    retire();
    begin_waiting();
    return true;
  }
  return false;
}

void Engine::begin_waiting() {
  while (next_waiting_ < waiting_.size() && begun_ - completed_ < slots_.size()) {
    const Op& op = waiting_[next_waiting_++];
    Slot& slot = slot_of(op.op_index);
    slot.active = &algorithm_for(slot, op);
    begun_ = op.op_index;
    slot.active->begin(op);
    retire();  // an empty operation is complete when it has begun
  }
  // Done with a stretch: move what is left to the front, which costs less than has been taken since the last time.
  if (next_waiting_ * 2 >= waiting_.size()) {
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(next_waiting_));
    next_waiting_ = 0;
  }
}

void Engine::retire() {
  while (completed_ < begun_) {
    Slot& slot = slot_of(completed_ + 1);
    if (!slot.active->done()) return;
    if (const std::uint64_t sequence = slot.active->op().sequence; sequence > 0) completed_sequence_ = sequence;
    slot.active = nullptr;
    ++completed_;
  }
}

CollectiveAlgorithm& Engine::algorithm_for(Slot& slot, const Op& op) {
  switch (op.kind) {
    case OpKind::kAllReduce:
      if (op.bytes() <= small_limit_) return slot.small_reduce;
      return slot.exchange;
    case OpKind::kReduceScatter:
    case OpKind::kAllGather: return slot.exchange;
    case OpKind::kBroadcast: return slot.broadcast;
    case OpKind::kBarrier: break;
  }
  return slot.barrier;
}

void Engine::watch_for_stalls() {
  if (idle()) return;
  const auto now = Clock::now();
  // Something moved since the last look, or the long gap between the two is this rank's own doing: no stall.
  if (now - last_look_ > patience_ / 2) next_check_ = now + patience_;
  last_look_ = now;
  // Not before all who wait have had the time to say so.
  due_ = stall_.is_due(moves_, now, 2 * patience_) || due_;
  if (now < next_check_) return;
  next_check_ = now + kCheckEvery;
  const CollectiveAlgorithm& first = first_under_way();
  stall_watch_.check(first.op(), completed_, transfers_.missing(first));
  mention_stall(first, now);
}

/// Whoever has come to the operation just now says that it waits only after a while: those who do by then are no
/// suspects any more.
void Engine::mention_stall(const CollectiveAlgorithm& first, Clock::time_point now) {
  auto silent = [&] { return stall_watch_.silent(first.op(), transfers_.missing(first)); };
  if (std::exchange(due_, false) && suspects_.empty()) {
    suspects_ = silent();
    confirm_at_ = now + patience_ + 2 * kCheckEvery;
    return;
  }
  if (suspects_.empty() || now < confirm_at_) return;
  const auto still = silent();
  std::erase_if(suspects_, [&](int rank) { return !std::ranges::binary_search(still, rank); });
  if (!suspects_.empty() && stall_watch_.is_first_to_wait(first.op()))
    warn_of_stall(describe(first.op()), stall_.waited_seconds(), stall_watch_.names_of(suspects_));
  suspects_.clear();
}

void Engine::time_out(double waited_seconds) {
  const CollectiveAlgorithm& first = first_under_way();
  stall_watch_.time_out(first.op(), transfers_.missing(first), waited_seconds);
}

}  // namespace lockstep::comm
