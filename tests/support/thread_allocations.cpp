#include "tests/support/thread_allocations.h"

#include <cstdlib>
#include <new>

namespace {
thread_local std::size_t t_allocations = 0;
}  // namespace

// noinline: GCC takes the malloc inside one and the free inside the other for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++t_allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++t_allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

std::size_t lockstep::testing::thread_allocations() { return t_allocations; }
