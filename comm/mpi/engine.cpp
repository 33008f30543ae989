#include "comm/mpi/engine.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "lockstep/comm/arena.h"

namespace lockstep::comm {
namespace {

/// Each operation sends and receives, in two phases, a few chunks to and from each peer.
std::size_t most_messages(const Tuning& tuning, int world_size) {
  return tuning.operations_under_way * 4 * tuning.chunks_under_way * static_cast<std::size_t>(world_size - 1);
}

// Between two looks at what the other ranks say.
constexpr auto kCheckEvery = std::chrono::milliseconds(100);

}  // namespace

MpiEngine::MpiEngine(const Session& session, const Tuning& tuning, Clock::duration patience)
    : MpiEngine(session, nullptr, tuning, patience) {}

MpiEngine::MpiEngine(std::unique_ptr<Session> session, const Tuning& tuning, Clock::duration patience)
    : MpiEngine(*session, std::move(session), tuning, patience) {}

MpiEngine::MpiEngine(const Session& session, std::unique_ptr<Session>&& own, const Tuning& tuning,
                     Clock::duration patience)
    : Engine(session.rank(), session.size(), {.at_least = 2 * patience, .confirms = patience + 2 * kCheckEvery}),
      own_session_(std::move(own)),
      session_(session),
      tuning_(tuning),
      small_limit_(tuning.small_limit(session.size())),
      patience_(patience),
      transfers_(session, most_messages(tuning, session.size())),
      messages_(session),
      wait_notices_(session, transfers_.tags(), patience) {
  for (std::size_t i = 0; i < tuning.operations_under_way; ++i)
    slots_.push_back(std::make_unique<Slot>(session.rank(), session.size(), tuning_, transfers_));
}

MpiEngine::~MpiEngine() {
  if (idle()) return;
  for (auto& slot : slots_) keep_for_mpi(std::move(slot));
  keep_for_mpi(texts_memory());
}

std::unique_ptr<Arena> MpiEngine::map_arena(std::size_t bytes, TextExchange) { return HostArena::map(bytes); }

bool MpiEngine::advance_operations() {
  if (idle()) return false;
  const bool begun = begin_taken();
  if (!transfers_.test()) return begun;
  last_look_ = {};
  ++moves_;
  retire();
  begin_taken();
  return true;
}

bool MpiEngine::begin_taken() {
  const std::uint64_t begun = begun_;
  while (begun_ < submitted() && begun_ - completed() < slots_.size()) {
    const Op& op = op_at(++begun_);
    Slot& slot = slot_of(begun_);
    slot.active = &algorithm_for(slot, op);
    slot.active->begin(op);
    retire();  // an empty operation is complete when it has begun
  }
  return begun_ != begun;
}

void MpiEngine::retire() {
  while (completed() < begun_) {
    Slot& slot = slot_of(completed() + 1);
    if (!slot.active->done()) return;
    slot.active = nullptr;
    complete_first();
  }
}

WaitPolicy MpiEngine::wait_policy(bool) const { return nap_policy(oversubscribed()); }

void MpiEngine::sleep(Clock::duration at_most, Clock::duration idle, FunctionRef<bool()> awake) {
  // Messages wake nobody.
  if (!is_quiet()) return nap(idle);
  std::unique_lock lock(mutex_);
  wakeup_.wait_for(lock, at_most, [&] { return awake(); });
}

void MpiEngine::wake_up() const {
  { const std::lock_guard lock(mutex_); }
  wakeup_.notify_one();
}

void MpiEngine::leave() {
  wait_notices_.abandon_notices();
  if (own_session_ != nullptr) own_session_->finalize();
}

CollectiveAlgorithm& MpiEngine::algorithm_for(Slot& slot, const Op& op) {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      if (op.bytes() <= small_limit_ && (op.along == nullptr || op.along->one_each())) return slot.small_reduce;
      return slot.exchange;
    case OpKind::kReduceScatter:
    case OpKind::kAllGather: return slot.exchange;
    case OpKind::kBroadcast: return slot.broadcast;
    case OpKind::kBarrier: break;
  }
  return slot.barrier;
}

void MpiEngine::compare_waits() {
  const auto now = Clock::now();
  // Something moved since the last look, or the long gap between the two is this rank's own doing: no stall.
  if (now - last_look_ > patience_ / 2) next_check_ = now + patience_;
  last_look_ = now;
  if (now < next_check_) return;
  next_check_ = now + kCheckEvery;
  const CollectiveAlgorithm& first = first_under_way();
  wait_notices_.check(first.op(), completed(), transfers_.missing(first));
}

void MpiEngine::find_states(const Op& op, std::span<PeerState> states) {
  wait_notices_.find_states(op, transfers_.missing(first_under_way()), states);
}

}  // namespace lockstep::comm
