// Groups whose operations an engine moves on, and who drives it.
#pragma once

#include <functional>
#include <memory>

#include "comm/engine.h"
#include "comm/process_group.h"
#include "comm/store.h"

namespace lockstep::comm {

/// Note [Drivers]
/// There are two drivers, each for every engine. Inline: operations move on whenever the caller issues, polls (as it
/// does at tape nodes), asks or waits; what has been issued earlier than it is needed absorbs the difference between
/// fast and slow ranks all the same. By a thread: a thread of the group moves them on while the caller computes, and
/// sleeps while nothing comes. That is worth it where a core is spare; on busy cores it only takes time from the
/// caller.

/// A group that takes `engine`, and `store`, which its shutdown() ends after the engine; there may be none.
std::unique_ptr<ProcessGroup> make_inline_group(int rank, int size, std::unique_ptr<Engine> engine,
                                                std::unique_ptr<Store> store, Clock::duration timeout);

/// The same with a thread, on which `make` makes the engine, and where that ends too. Throws what `make` throws.
std::unique_ptr<ProcessGroup> make_thread_group(int rank, int size, std::function<std::unique_ptr<Engine>()> make,
                                                std::unique_ptr<Store> store, Clock::duration timeout);

}  // namespace lockstep::comm
