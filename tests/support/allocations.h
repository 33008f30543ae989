// Counts heap allocations, in programs that link allocations.cpp: those of a whole process, by the shared object that
// asked for them, and those of a thread.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <map>
#include <string>

namespace lockstep::testing {

/// While it lives, every malloc, calloc, realloc, aligned allocation and operator new of every thread is counted with
/// the address it returns to. One at a time. A program that links allocations.cpp has all of these replaced; with a
/// sanitizer, which replaces malloc itself, only operator new.
class AllocationCounter {
 public:
  AllocationCounter();
  ~AllocationCounter();
  AllocationCounter(const AllocationCounter&) = delete;
  AllocationCounter& operator=(const AllocationCounter&) = delete;

  /// How many allocations each caller made: "libdnnl.so.2 + 0x1234" → count. Ends counting.
  std::map<std::string, long> by_caller();
};

/// The callers among `all` that do not lie in `foreign` (prefixes of shared objects' file names).
std::map<std::string, long> without(const std::map<std::string, long>& all, std::initializer_list<std::string> foreign);

/// "3 × libfoo.so + 0x10\n…", for messages.
std::string listed(const std::map<std::string, long>& callers);

/// Calls of operator new by this thread, so far: on rank 0 the store of the rendezvous has a thread, and allocations,
/// of its own.
std::size_t thread_allocations();

}  // namespace lockstep::testing
