// Counts what each thread allocates with operator new, in programs that link thread_allocations.cpp.
#pragma once

#include <cstddef>

namespace lockstep::testing {

/// By this thread, so far: on rank 0 the store of the rendezvous has a thread, and allocations, of its own.
std::size_t thread_allocations();

}  // namespace lockstep::testing
