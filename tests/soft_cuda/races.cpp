#include "races.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fibers.h"
#include "streams.h"

// Where the program's own variables lie: static arrays, which __shared__ ones are here.
extern "C" char __executable_start;  // NOLINT
extern "C" char __data_start;        // NOLINT
extern "C" char _end;                // NOLINT

namespace lockstep::soft_cuda {
namespace {

constexpr unsigned kLanes = 32;
constexpr std::size_t kLineBytes = 512;   // no two allocations share one: memory.cpp's margins
constexpr std::size_t kGranuleBytes = 2;  // the smallest element that is often a thread's own
constexpr std::size_t kGranules = kLineBytes / kGranuleBytes;
constexpr std::size_t kMostLines = 16384;  // 150 MB; what a grid uses beyond is not watched

constexpr std::uint64_t kMostAccesses = 200000;  // of a grid: its other blocks are not watched, whichever they are

enum class AccessKind : std::uint8_t { kRead, kWrite, kAtomic };

// Time advances at barriers and at beginnings of blocks and grids. Accesses of older grids, and of older blocks to
// shared memory, are void by their time alone.
using Time = std::uint32_t;

struct Access {
  Time time = 0;
  std::uint16_t thread = 0;
  std::uint8_t bytes = 0;  // of the granule: a bit for each
  AccessKind kind = AccessKind::kRead;
};

struct Cell {
  Access write;
  // Of other blocks the first; of this block two that nothing orders, so that one of them is not the writer's own.
  std::array<Access, 3> reads;
};

enum class Where : std::uint8_t { kNotWatched, kNowhere, kGlobal, kShared };

struct Line {
  std::uint64_t grid = 0;  // for which all but the cells is right
  Where where = Where::kNotWatched;
  std::uint16_t begin = 0, end = 0;  // of it, what is the allocation's
  Time block = 0;                    // for which `written` is right
  std::array<std::uint64_t, kLineBytes / 64> written{};
  std::array<Cell, kGranules> cells;
};

// What a kernel has been seen to write to shared memory: bits of lines.
using SharedBytes = std::map<std::uintptr_t, std::array<std::uint64_t, kLineBytes / 64>>;

std::unordered_map<std::uintptr_t, std::unique_ptr<Line>> lines;
std::array<std::pair<std::uintptr_t, Line*>, 1024> found;  // the last ones that were asked for
std::map<std::tuple<const void*, std::uint64_t, std::uint64_t, unsigned>, int> launches;
std::unordered_map<const void*, SharedBytes> shared_of;

const Kernel* kernel = nullptr;
std::uint64_t grid_number = 0;
std::uint64_t accesses = 0;  // of this grid, to memory
Time time_now = 0;
Time grid_time = 0, block_time = 0, barrier_time = 0;
std::array<Time, 1024> full_warp_time;  // of each warp: when all its lanes synchronized
std::array<std::array<Time, kLanes>, 1024> lane_time;
std::vector<std::pair<Time, std::uint64_t>> blocks;  // when each began

// Of the thread that runs the grid: host code of the same files makes the same calls.
constinit thread_local bool watching = false;

bool overlaps(const Access& access, std::uint8_t bytes) { return (access.bytes & bytes) != 0; }

bool is_before(const Access& access) {  // the current thread, in any order that CUDA guarantees
  if (access.time < block_time) return false;
  if (access.thread == current_thread || access.time < barrier_time) return true;
  if (access.thread / kLanes != current_thread / kLanes) return false;
  return access.time < full_warp_time[current_thread / kLanes] ||
         access.time < lane_time[current_thread][access.thread % kLanes];
}

const char* verb(AccessKind kind, bool past) {
  switch (kind) {
    case AccessKind::kRead: return past ? "has read" : "reads";
    case AccessKind::kWrite: return past ? "has written" : "writes";
    default: return past ? "has changed in an atomic operation" : "changes in an atomic operation";
  }
}

std::string place_text(std::uintptr_t at, Where where) {
  if (where == Where::kShared) return "shared memory";
  const auto extent = extent_of(reinterpret_cast<const void*>(at));
  if (!extent) return "memory";
  const auto offset = static_cast<std::int64_t>(at) - static_cast<std::int64_t>(extent->begin);
  return fmt::format("byte {} of an allocation of {} bytes", offset, extent->bytes);
}

[[noreturn]] void report_race(const Access& other, AccessKind kind, std::uintptr_t at, Where where) {
  const auto after = std::ranges::upper_bound(blocks, other.time, {}, &std::pair<Time, std::uint64_t>::first);
  const std::uint64_t block = std::prev(after)->second;
  const bool same = other.time >= block_time;
  abandon_thread(fmt::format("a race: thread {} {} {}, which thread {}{} {}, and {}", thread_text(current_thread),
                             verb(kind, false), place_text(at, where), thread_text(other.thread),
                             same ? "" : fmt::format(" of block {}", block_text(block)), verb(other.kind, true),
                             same ? "no barrier is between" : "nothing orders blocks"));
}

void note_write(Cell& cell, std::uint8_t bytes, AccessKind kind, Time oldest, std::uintptr_t at, Where where) {
  Access& last = cell.write;
  if (last.time >= oldest && overlaps(last, bytes) &&
      !(kind == AccessKind::kAtomic && last.kind == AccessKind::kAtomic) && !is_before(last))
    report_race(last, kind, at, where);
  for (Access& read : cell.reads) {
    if (read.time < oldest || !overlaps(read, bytes)) continue;
    if (!is_before(read)) report_race(read, kind, at, where);
    read.bytes = static_cast<std::uint8_t>(read.bytes & ~bytes);
  }
  // Of atomic operations the first stays, which plain accesses of the last one's thread are not ordered after.
  if (kind == AccessKind::kAtomic && last.time >= oldest && last.kind == kind && overlaps(last, bytes) &&
      !is_before(last))
    return;
  const bool also = last.time == time_now && last.thread == current_thread && last.kind == kind;
  last = {time_now, static_cast<std::uint16_t>(current_thread),
          static_cast<std::uint8_t>(also ? last.bytes | bytes : bytes), kind};
}

void note_read(Cell& cell, std::uint8_t bytes, Time oldest, std::uintptr_t at, Where where) {
  const Access& last = cell.write;
  if (last.time >= oldest && overlaps(last, bytes) && !is_before(last)) report_race(last, AccessKind::kRead, at, where);
  const Access mine = {time_now, static_cast<std::uint16_t>(current_thread), bytes, AccessKind::kRead};
  for (std::size_t i = 0; i < cell.reads.size(); ++i) {
    Access& read = cell.reads[i];
    if (read.time == time_now && read.thread == current_thread) {
      read.bytes |= bytes;
      return;
    }
    const bool is_old = read.time < oldest || read.bytes == 0 || (read.time < block_time && i > 0);
    if (is_old || (is_before(read) && (read.bytes & ~bytes) == 0)) {
      read = mine;
      return;
    }
  }
  cell.reads[1 + time_now % 2] = mine;
}

Line* line_of(std::uintptr_t number) {
  auto& [last, line] = found[number % found.size()];
  if (last != number || line == nullptr) {
    auto& made = lines[number];
    if (made == nullptr) {
      if (lines.size() > kMostLines) {
        lines.erase(number);
        return nullptr;
      }
      made = std::make_unique<Line>();
    }
    last = number;
    line = made.get();
  }
  if (line->grid == grid_number) return line;
  line->grid = grid_number;
  line->begin = 0;
  line->end = kLineBytes;
  const std::uintptr_t at = number * kLineBytes;
  if (at + kLineBytes > reinterpret_cast<std::uintptr_t>(&__data_start) &&
      at < reinterpret_cast<std::uintptr_t>(&_end)) {
    line->where = Where::kShared;
    return line;
  }
  line->where = Where::kNowhere;
  // Registered memory begins where it likes.
  for (const std::uintptr_t inside : {at, at + kLineBytes - 1}) {
    const auto extent = extent_of(reinterpret_cast<const void*>(inside));
    if (!extent || extent->begin >= at + kLineBytes || extent->begin + extent->bytes <= at) continue;
    line->where = Where::kGlobal;
    line->begin = static_cast<std::uint16_t>(extent->begin > at ? extent->begin - at : 0);
    line->end = static_cast<std::uint16_t>(std::min(extent->begin + extent->bytes - at, kLineBytes));
    break;
  }
  return line;
}

[[noreturn]] void report_outside(AccessKind kind, std::uintptr_t at, std::size_t bytes) {
  const auto extent = extent_of(reinterpret_cast<const void*>(at));
  abandon_thread(fmt::format(
      "thread {} {} {} bytes at {}", thread_text(current_thread), verb(kind, false), bytes,
      extent ? place_text(at, Where::kGlobal) + ", outside of it" : "an address that is no memory of the device"));
}

bool is_constant(std::uintptr_t at) {  // of the program
  return at >= reinterpret_cast<std::uintptr_t>(&__executable_start) &&
         at < reinterpret_cast<std::uintptr_t>(&__data_start);
}

// False where some byte is not written.
bool is_written(const Line& line, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i)
    if ((line.written[i / 64] >> (i % 64) & 1) == 0) return false;
  return true;
}

void watch_access(const void* address, std::size_t bytes, AccessKind kind) {
  auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at - Fiber::stacks().begin < Fiber::stacks().bytes) return;
  if (at - places_begin() < places_bytes()) return;  // threadIdx and its like
  ++accesses;
  while (bytes > 0) {
    const std::size_t offset = at % kLineBytes, part = std::min(bytes, kLineBytes - offset), end = offset + part;
    Line* const line = line_of(at / kLineBytes);
    if (line == nullptr || line->where == Where::kNotWatched) return;
    if (line->where == Where::kNowhere || offset < line->begin || end > line->end) {
      const auto begin = reinterpret_cast<std::uintptr_t>(kernel->arguments);
      if (line->where == Where::kNowhere && kind == AccessKind::kRead && at - begin < kernel->argument_bytes) return;
      if (kind == AccessKind::kRead && is_constant(at)) return;
      // Of registered memory there may be several pieces in a line: the others are not watched.
      const auto extent = extent_of(address);
      if (extent && at >= extent->begin && at + bytes <= extent->begin + extent->bytes) return;
      report_outside(kind, at, bytes);
    }
    const bool is_shared = line->where == Where::kShared;
    if (is_shared) {
      if (line->block != block_time) {
        line->block = block_time;
        line->written.fill(0);
      }
      if (kind != AccessKind::kWrite && !is_written(*line, offset, end))
        abandon_thread(fmt::format("thread {} {} {} bytes of shared memory that no thread of its block has written",
                                   thread_text(current_thread), verb(kind, false), bytes));
      if (kind != AccessKind::kRead)
        for (std::size_t i = offset; i < end; ++i) line->written[i / 64] |= std::uint64_t{1} << (i % 64);
    }
    const Time oldest = is_shared ? block_time : grid_time;
    for (std::size_t i = offset; i < end;) {
      const std::size_t granule = i / kGranuleBytes, next = std::min((granule + 1) * kGranuleBytes, end);
      const unsigned from = static_cast<unsigned>(i % kGranuleBytes), count = static_cast<unsigned>(next - i);
      const auto mask = static_cast<std::uint8_t>(((1u << count) - 1) << from);
      if (kind == AccessKind::kRead)
        note_read(line->cells[granule], mask, oldest, at - offset + i, line->where);
      else
        note_write(line->cells[granule], mask, kind, oldest, at - offset + i, line->where);
      i = next;
    }
    at += part;
    bytes -= part;
  }
}

}  // namespace

bool begin_watch(const Kernel& of, dim3 grid, dim3 block) {
  const auto shape = std::tuple(of.function, std::uint64_t{grid.x} << 32 | grid.y << 16 | grid.z,
                                std::uint64_t{block.x} << 32 | block.y << 16 | block.z, 0u);
  if (launches[shape]++ >= machine().watched_launches) return false;
  if (lines.size() > kMostLines / 2 || time_now > Time{1} << 31) {
    lines.clear();
    found = {};
  }
  if (time_now > Time{1} << 31) {
    time_now = 0;
    full_warp_time.fill(0);
    lane_time.fill({});
  }
  kernel = &of;
  ++grid_number;
  grid_time = ++time_now;
  blocks.clear();
  accesses = 0;
  watching = true;
  return true;
}

void end_watch() {
  watching = false;
  for (const auto& [number, line] : lines) {
    if (line->where != Where::kShared || line->block < grid_time) continue;
    auto& known = shared_of[kernel->function][number];
    for (std::size_t i = 0; i < known.size(); ++i) known[i] |= line->written[i];
  }
}

void poison_shared(const void* function) {
  const auto known = shared_of.find(function);
  if (known == shared_of.end()) return;
  for (const auto& [number, bytes] : known->second) {
    auto* const line = reinterpret_cast<std::byte*>(number * kLineBytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] == ~std::uint64_t{0})
        std::memset(line + i * 64, kUnwrittenByte, 64);
      else
        for (std::size_t bit = 0; bit < 64; ++bit)
          if ((bytes[i] >> bit & 1) != 0) line[i * 64 + bit] = std::byte{kUnwrittenByte};
    }
  }
}

bool watch_block(std::uint64_t index) {
  if (accesses > kMostAccesses) {
    watching = false;
    return false;
  }
  block_time = ++time_now;
  barrier_time = 0;
  blocks.emplace_back(time_now, index);
  return true;
}

void watch_barrier() { barrier_time = ++time_now; }

void watch_warp_barrier(unsigned first, unsigned mask) {
  ++time_now;
  if (mask == 0xffffffffu) {
    full_warp_time[first / kLanes] = time_now;
    return;
  }
  // Each lane knows what any of them knew.
  std::array<Time, kLanes> known{};
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    for (unsigned other = 0; other < kLanes; ++other)
      known[other] = std::max(known[other], lane_time[first + i][other]);
  }
  for (unsigned i = 0; i < kLanes; ++i)
    if ((mask >> i & 1u) != 0) known[i] = time_now;
  for (unsigned i = 0; i < kLanes; ++i)
    if ((mask >> i & 1u) != 0) lane_time[first + i] = known;
}

void watch_atomic(const void* at, std::size_t bytes) {
  if (watching) watch_access(at, bytes, AccessKind::kAtomic);
}

}  // namespace lockstep::soft_cuda

// What the compiler calls. None of it may throw: the compiler takes these for functions that do not.
// NOLINTBEGIN
using lockstep::soft_cuda::AccessKind;
using lockstep::soft_cuda::watch_access;
using lockstep::soft_cuda::watching;

extern "C" {

#define WATCH_SIZE(bytes)                                                          \
  void __tsan_read##bytes(void* at) {                                              \
    if (watching) [[unlikely]]                                                     \
      watch_access(at, bytes, AccessKind::kRead);                                  \
  }                                                                                \
  void __tsan_write##bytes(void* at) {                                             \
    if (watching) [[unlikely]]                                                     \
      watch_access(at, bytes, AccessKind::kWrite);                                 \
  }                                                                                \
  void __tsan_unaligned_read##bytes(void* at) { __tsan_read##bytes(at); }          \
  void __tsan_unaligned_write##bytes(void* at) { __tsan_write##bytes(at); }        \
  void __tsan_volatile_read##bytes(void* at) { __tsan_read##bytes(at); }           \
  void __tsan_volatile_write##bytes(void* at) { __tsan_write##bytes(at); }         \
  void __tsan_unaligned_volatile_read##bytes(void* at) { __tsan_read##bytes(at); } \
  void __tsan_unaligned_volatile_write##bytes(void* at) { __tsan_write##bytes(at); }
WATCH_SIZE(1)
WATCH_SIZE(2)
WATCH_SIZE(4)
WATCH_SIZE(8)
WATCH_SIZE(16)

void __tsan_read_range(void* at, unsigned long bytes) {
  if (watching) watch_access(at, bytes, AccessKind::kRead);
}
void __tsan_write_range(void* at, unsigned long bytes) {
  if (watching) watch_access(at, bytes, AccessKind::kWrite);
}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
  __tsan_write_range(to, bytes);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
  __tsan_write_range(to, bytes);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  __tsan_write_range(to, bytes);
  return std::memset(to, value, bytes);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Of the host's code in those files: std::shared_ptr's counts and its like.
#define ATOMIC_SIZE(bits, T)                                                                                        \
  T __tsan_atomic##bits##_load(const volatile T* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }         \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_exchange(volatile T* at, T value, int) {                                                  \
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                                        \
  }                                                                                                                 \
  T __tsan_atomic##bits##_fetch_add(volatile T* at, T value, int) {                                                 \
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                                 \
  T __tsan_atomic##bits##_fetch_sub(volatile T* at, T value, int) {                                                 \
    return __atomic_fetch_sub(at, value, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                                 \
  T __tsan_atomic##bits##_fetch_and(volatile T* at, T value, int) {                                                 \
    return __atomic_fetch_and(at, value, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                                 \
  T __tsan_atomic##bits##_fetch_or(volatile T* at, T value, int) {                                                  \
    return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST);                                                          \
  }                                                                                                                 \
  T __tsan_atomic##bits##_fetch_xor(volatile T* at, T value, int) {                                                 \
    return __atomic_fetch_xor(at, value, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                                 \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T value, int, int) {               \
    return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);             \
  }                                                                                                                 \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* expected, T value, int, int) {                 \
    return __atomic_compare_exchange_n(at, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
  }
ATOMIC_SIZE(8, unsigned char)
ATOMIC_SIZE(16, unsigned short)
ATOMIC_SIZE(32, unsigned int)
ATOMIC_SIZE(64, unsigned long)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

}  // extern "C"
// NOLINTEND
