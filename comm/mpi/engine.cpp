#include "comm/mpi/engine.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/flight_record.h"
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
    : Engine(session.rank(), session.size()),
      own_session_(std::move(own)),
      session_(session),
      tuning_(tuning),
      small_limit_(tuning.small_limit(session.size())),
      patience_(patience),
      transfers_(session, most_messages(tuning, session.size())),
      messages_(session),
      stall_watch_(session, transfers_.tags(), patience) {
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
  due_ = false;
  suspects_.clear();
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
  stall_watch_.abandon_notices();
  if (own_session_ != nullptr) own_session_->finalize();
}

CollectiveAlgorithm& MpiEngine::algorithm_for(Slot& slot, const Op& op) {
  switch (op.kind) {
    case OpKind::kAllReduce:
      if (op.bytes() <= small_limit_ && (op.along == nullptr || op.along->one_each())) return slot.small_reduce;
      return slot.exchange;
    case OpKind::kReduceScatter:
    case OpKind::kAllGather: return slot.exchange;
    case OpKind::kBroadcast: return slot.broadcast;
    case OpKind::kBarrier: break;
  }
  return slot.barrier;
}

void MpiEngine::watch_stall() {
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
  stall_watch_.check(first.op(), completed(), transfers_.missing(first));
  maybe_warn_of_stall(first, now);
}

/// A rank that has just come to the operation reports waiting only after a while; ranks that have reported by then are
/// no suspects.
void MpiEngine::maybe_warn_of_stall(const CollectiveAlgorithm& first, Clock::time_point now) {
  auto silent = [&] { return stall_watch_.silent(first.op(), transfers_.missing(first)); };
  if (std::exchange(due_, false) && suspects_.empty()) {
    suspects_ = silent();
    confirm_at_ = now + patience_ + 2 * kCheckEvery;
    return;
  }
  if (suspects_.empty() || now < confirm_at_) return;
  const auto still = silent();
  std::erase_if(suspects_, [&](int rank) { return !std::ranges::binary_search(still, rank); });
  flight::set_missing(session_.job_ranks().of(suspects_));
  if (!suspects_.empty() && stall_watch_.is_first_to_wait(first.op()))
    warn_of_stall(describe(first.op()), stall_.waited_seconds(), stall_watch_.names_of(suspects_));
  suspects_.clear();
}

void MpiEngine::time_out(double waited_seconds) {
  watch_stall();  // ranks in different operations are not late
  const CollectiveAlgorithm& first = first_under_way();
  const auto silent = stall_watch_.silent(first.op(), transfers_.missing(first));
  throw_timeout(waited_seconds, session_.job_ranks().of(silent), stall_watch_.names_of(silent));
}

}  // namespace lockstep::comm
