#include "comm/mpi/thread_group.h"

#include "base/error.h"
#include "base/stop.h"
#include "comm/host_arena.h"
#include "comm/mpi/backoff.h"
#include "comm/mpi/engine.h"
#include "comm/mpi/session.h"

namespace lockstep::comm {

ThreadGroup::ThreadGroup(const World& world, Clock::duration timeout, const Tuning& tuning)
    : ProcessGroup(world.rank, world.size, timeout), texts_(world.rank, world.size) {
  issued_.reserve(256);
  taken_.reserve(256);
  thread_ = std::thread([this, world, tuning] { run(world, tuning); });
  try {
    wait_until([&] { return ready_.load(std::memory_order_acquire); });
  } catch (...) {
    end_thread(Ending::kAbandon);
    throw;
  }
}

ThreadGroup::~ThreadGroup() {
  end_thread(Ending::kAbandon);
  if (completed_.load(std::memory_order_acquire) < handed_) keep_for_mpi(texts_.memory());
}

// ---- The caller's side ----

std::unique_ptr<Arena> ThreadGroup::map_arena(std::size_t bytes) { return HostArena::map(bytes); }

std::vector<std::string> ThreadGroup::exchange(const std::string& mine) {
  const std::uint64_t index = hand_over(texts_.begin(mine));
  wait_until([&] { return completed_.load(std::memory_order_acquire) >= index; }, Deadline::after(timeout()));
  return texts_.all();
}

std::uint64_t ThreadGroup::hand_over(const Op& op) {
  failure_.throw_if_any();
  const std::lock_guard lock(mutex_);
  issued_.push_back(op);
  orders_.notify_one();
  return ++handed_;
}

void ThreadGroup::start(const Op& op) { hand_over(op); }

bool ThreadGroup::is_done(std::uint64_t sequence) {
  failure_.throw_if_any();
  return completed_sequence_.load(std::memory_order_acquire) >= sequence;
}

void ThreadGroup::wait_done(std::uint64_t sequence, Deadline deadline) {
  failure_.throw_if_any();
  wait_until([&] { return completed_sequence_.load(std::memory_order_acquire) >= sequence; }, deadline);
}

template <class Condition>
void ThreadGroup::wait_until(Condition&& condition, Deadline deadline) {
  wait_begin_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  wait_end_.store(deadline.when().time_since_epoch().count(), std::memory_order_release);
  wait_until(condition);
  wait_end_.store(kNoWait, std::memory_order_relaxed);
}

template <class Condition>
void ThreadGroup::wait_until(Condition&& condition) {
  Backoff backoff(oversubscribed_.load(std::memory_order_relaxed));
  while (!condition()) {
    failure_.guard([] { throw_if_stopped("waiting for the other ranks"); });
    backoff.pause();
  }
}

void ThreadGroup::shutdown() {
  barrier().wait_host();
  end_thread(Ending::kFinalize);
  failure_.throw_if_any();
}

void ThreadGroup::end_thread(Ending ending) {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ending_ = ending;
    orders_.notify_one();
  }
  thread_.join();
}

// ---- The thread's side ----

void ThreadGroup::run(const World& world, const Tuning& tuning) {
  try {
    Session session(world, Deadline::after(timeout()));
    oversubscribed_.store(session.oversubscribed(), std::memory_order_relaxed);
    Engine engine(session, tuning, patience_for(timeout()));
    ready_.store(true, std::memory_order_release);
    serve(session, engine);
  } catch (...) {
    failure_.set(std::current_exception());
  }
}

void ThreadGroup::serve(Session& session, Engine& engine) {
  Backoff backoff(session.oversubscribed());
  for (;;) {
    const Ending ending = take_orders(engine);
    if (ending == Ending::kAbandon) return;
    if (ending == Ending::kFinalize) {
      engine.abandon_notices();
      session.finalize();
      return;
    }
    const bool moved = engine.advance();
    publish(engine);
    if (moved) {
      backoff.reset();
      continue;
    }
    if (!backoff.pause()) continue;
    engine.watch_for_stalls();
    const auto now = Clock::now().time_since_epoch().count();
    if (now >= wait_end_.load(std::memory_order_acquire) && !engine.idle())
      engine.time_out(
          std::chrono::duration<double>(Clock::duration(now - wait_begin_.load(std::memory_order_relaxed))).count());
  }
}

void ThreadGroup::publish(const Engine& engine) {
  completed_sequence_.store(engine.completed_sequence(), std::memory_order_release);
  completed_.store(engine.completed(), std::memory_order_release);
}

ThreadGroup::Ending ThreadGroup::take_orders(Engine& engine) {
  {
    std::unique_lock lock(mutex_);
    if (engine.idle()) orders_.wait(lock, [&] { return !issued_.empty() || ending_ != Ending::kNone; });
    if (ending_ == Ending::kAbandon || (ending_ == Ending::kFinalize && engine.idle() && issued_.empty()))
      return ending_;
    issued_.swap(taken_);
  }
  for (const Op& op : taken_) engine.submit(op);
  taken_.clear();
  return Ending::kNone;
}

}  // namespace lockstep::comm
