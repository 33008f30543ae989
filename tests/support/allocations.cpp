#include "tests/support/allocations.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>

namespace {

// Open addressing, never full in practice; what finds no place is counted under address 0. Nothing here may allocate.
struct Caller {
  std::atomic<const void*> address{nullptr};
  std::atomic<long> count{0};
};
constexpr std::size_t kCallers = 4096;
std::array<Caller, kCallers> g_callers;
std::atomic<long> g_overflow{0};
std::atomic<bool> g_counting{false};
thread_local std::size_t t_allocations = 0;  // by operator new

void count(const void* address) {
  if (!g_counting.load(std::memory_order_relaxed)) return;
  const std::size_t start = reinterpret_cast<std::uintptr_t>(address) * 0x9e3779b97f4a7c15ull >> 52;
  for (std::size_t i = 0; i < kCallers; ++i) {
    Caller& caller = g_callers[(start + i) % kCallers];
    const void* held = nullptr;
    if (caller.address.compare_exchange_strong(held, address) || held == address) {
      ++caller.count;
      return;
    }
  }
  ++g_overflow;
}

}  // namespace

// glibc's own, under the names that a replacement can still call.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* data, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
}

#define LOCKSTEP_CALLER __builtin_return_address(0)

#if defined(LOCKSTEP_SANITIZED)

namespace {
void* take(std::size_t bytes, std::size_t alignment) {
  return std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
}
}  // namespace

#else

namespace {
void* take(std::size_t bytes, std::size_t alignment) {
  return alignment <= alignof(std::max_align_t) ? __libc_malloc(bytes) : __libc_memalign(alignment, bytes);
}
}  // namespace

extern "C" {
void* malloc(std::size_t bytes) {
  count(LOCKSTEP_CALLER);
  return __libc_malloc(bytes);
}
void* calloc(std::size_t number, std::size_t bytes) {
  count(LOCKSTEP_CALLER);
  return __libc_calloc(number, bytes);
}
void* realloc(void* data, std::size_t bytes) {
  count(LOCKSTEP_CALLER);
  return __libc_realloc(data, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  count(LOCKSTEP_CALLER);
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  count(LOCKSTEP_CALLER);
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** data, std::size_t alignment, std::size_t bytes) {
  count(LOCKSTEP_CALLER);
  *data = __libc_memalign(alignment, bytes);
  return *data == nullptr ? ENOMEM : 0;
}
}

#endif

// The operators too, or all their callers would be "libstdc++".
namespace {
void* take_counted(std::size_t bytes, std::size_t alignment, const void* caller) noexcept {
  ++t_allocations;
  count(caller);
  return take(bytes, alignment);
}
void* take_or_throw(std::size_t bytes, std::size_t alignment, const void* caller) {
  if (void* const data = take_counted(bytes, alignment, caller)) return data;
  throw std::bad_alloc();
}
constexpr std::size_t kDefault = alignof(std::max_align_t);
}  // namespace

void* operator new(std::size_t bytes) { return take_or_throw(bytes, kDefault, LOCKSTEP_CALLER); }
void* operator new[](std::size_t bytes) { return take_or_throw(bytes, kDefault, LOCKSTEP_CALLER); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment), LOCKSTEP_CALLER);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment), LOCKSTEP_CALLER);
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return take_counted(bytes, kDefault, LOCKSTEP_CALLER);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return take_counted(bytes, kDefault, LOCKSTEP_CALLER);
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return take_counted(bytes, static_cast<std::size_t>(alignment), LOCKSTEP_CALLER);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return take_counted(bytes, static_cast<std::size_t>(alignment), LOCKSTEP_CALLER);
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t, const std::nothrow_t&) noexcept { std::free(data); }

namespace lockstep::testing {

AllocationCounter::AllocationCounter() {
  for (auto& caller : g_callers) {
    caller.address = nullptr;
    caller.count = 0;
  }
  g_overflow = 0;
  g_counting = true;
}

AllocationCounter::~AllocationCounter() { g_counting = false; }

std::map<std::string, long> AllocationCounter::by_caller() {
  g_counting = false;
  std::map<std::string, long> named;
  for (const auto& caller : g_callers) {
    const void* const address = caller.address;
    if (address == nullptr) continue;
    Dl_info where{};
    std::string name = "?";
    if (::dladdr(address, &where) != 0 && where.dli_fname != nullptr) {
      char offset[32];
      std::snprintf(offset, sizeof offset, " + %#tx",
                    static_cast<const char*>(address) - static_cast<const char*>(where.dli_fbase));
      name = std::filesystem::path(where.dli_fname).filename().string() + offset;
    }
    named[name] += caller.count;
  }
  if (g_overflow > 0) named["too many callers"] = g_overflow;
  return named;
}

std::map<std::string, long> without(const std::map<std::string, long>& all,
                                    std::initializer_list<std::string> foreign) {
  std::map<std::string, long> rest;
  for (const auto& [caller, times] : all) {
    bool is_foreign = false;
    for (const auto& prefix : foreign) is_foreign = is_foreign || caller.starts_with(prefix);
    if (!is_foreign) rest[caller] = times;
  }
  return rest;
}

std::size_t thread_allocations() { return t_allocations; }

std::string listed(const std::map<std::string, long>& callers) {
  std::string text;
  for (const auto& [caller, times] : callers) text += std::to_string(times) + " × " + caller + "\n";
  return text;
}

}  // namespace lockstep::testing
