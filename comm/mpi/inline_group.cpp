#include "comm/mpi/inline_group.h"

#include "base/stop.h"
#include "comm/host_arena.h"
#include "comm/mpi/backoff.h"

namespace lockstep::comm {

InlineGroup::InlineGroup(const World& world, Clock::duration timeout, const Tuning& tuning)
    : ProcessGroup(world.rank, world.size, timeout),
      session_(world, Deadline::after(timeout)),
      engine_(session_, tuning, patience_for(timeout)) {}

template <class Action>
auto InlineGroup::guarded(Action&& action) {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  try {
    return action();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

std::unique_ptr<Arena> InlineGroup::allocate(std::size_t bytes) { return HostArena::map(bytes); }

void InlineGroup::start(const Op& op) {
  guarded([&] {
    engine_.submit(op);
    engine_.advance();
  });
}

void InlineGroup::poll() {
  guarded([&] { engine_.advance(); });
}

bool InlineGroup::is_done(std::uint64_t sequence) {
  return guarded([&] {
    if (engine_.completed() < sequence) engine_.advance();
    return engine_.completed() >= sequence;
  });
}

void InlineGroup::wait_done(std::uint64_t sequence, Deadline deadline) {
  guarded([&] {
    const auto begin = Clock::now();
    Backoff backoff(session_.oversubscribed());
    while (engine_.completed() < sequence) {
      if (engine_.advance()) {
        backoff.reset();
        continue;
      }
      if (!backoff.pause()) continue;
      throw_if_stopped("waiting for the other ranks");
      engine_.watch_for_stalls();
      if (deadline.expired()) engine_.time_out(seconds_between(begin, Clock::now()));
    }
  });
}

void InlineGroup::shutdown() {
  barrier().wait_host();
  guarded([&] {
    engine_.abandon_notices();
    session_.finalize();
  });
}

}  // namespace lockstep::comm
