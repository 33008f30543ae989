#include "comm/mpi/inline_group.h"

#include "base/stop.h"
#include "comm/host_arena.h"
#include "comm/mpi/backoff.h"

namespace lockstep::comm {

InlineGroup::InlineGroup(std::unique_ptr<MpiStore> store, Clock::duration timeout, const Tuning& tuning)
    : ProcessGroup(store->rank(), store->size(), timeout),
      store_(std::move(store)),
      engine_(store_->session(), tuning, patience_for(timeout)),
      texts_(rank(), size()) {}

InlineGroup::~InlineGroup() {
  if (!engine_.idle()) keep_for_mpi(texts_.memory());
}

std::unique_ptr<Arena> InlineGroup::map_arena(std::size_t bytes) { return HostArena::map(bytes); }

std::vector<std::string> InlineGroup::exchange(const std::string& mine) {
  return failure_.guard([&] {
    engine_.submit(texts_.begin(mine));
    const std::uint64_t index = engine_.submitted();
    wait_until([&] { return engine_.completed() >= index; }, Deadline::after(timeout()));
    return texts_.all();
  });
}

void InlineGroup::start(const Op& op) {
  failure_.guard([&] {
    engine_.submit(op);
    engine_.advance();
  });
}

void InlineGroup::poll() {
  failure_.guard([&] { engine_.advance(); });
}

bool InlineGroup::is_done(std::uint64_t sequence) {
  return failure_.guard([&] {
    if (engine_.completed_sequence() < sequence) engine_.advance();
    return engine_.completed_sequence() >= sequence;
  });
}

void InlineGroup::wait_done(std::uint64_t sequence, Deadline deadline) {
  failure_.guard([&] { wait_until([&] { return engine_.completed_sequence() >= sequence; }, deadline); });
}

template <class Condition>
void InlineGroup::wait_until(Condition&& done, Deadline deadline) {
  const auto begin = Clock::now();
  Backoff backoff(store_->session().oversubscribed());
  while (!done()) {
    if (engine_.advance()) {
      backoff.reset();
      continue;
    }
    if (!backoff.pause()) continue;
    throw_if_stopped("waiting for the other ranks");
    engine_.watch_for_stalls();
    if (deadline.expired()) engine_.time_out(seconds_between(begin, Clock::now()));
  }
}

void InlineGroup::shutdown() {
  barrier().wait_host();
  failure_.guard([&] {
    engine_.abandon_notices();
    store_->leave(Deadline::after(timeout()));
  });
}

}  // namespace lockstep::comm
