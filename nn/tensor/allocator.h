// Device memory that is asked for once and then reused.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memory_source.h"

namespace lockstep::nn {

class CachingAllocator;

/// A piece of memory with a reference count. Owned by its allocator, shared by tensors.
struct Block {
  std::byte* data = nullptr;
  std::size_t bytes = 0;  // capacity
  std::atomic<int> references{0};
  int size_class = 0;
  CachingAllocator* owner = nullptr;
  Block* next_free = nullptr;
};

/// Keeps freed blocks in lists by size class (four classes for each power of two, so that at most a fifth of a block is
/// wasted; 256 bytes at least) and
/// hands them out again: a training loop of fixed shapes asks the system for nothing after its first steps.
/// Thread-safe. Must outlive every tensor that it gave memory to.
class CachingAllocator {
 public:
  explicit CachingAllocator(std::unique_ptr<MemorySource> source);
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  /// A block of at least `bytes` with one reference; its content is unspecified.
  Block* acquire(std::size_t bytes);
  /// Takes a block without references back.
  void recycle(Block* block) noexcept;

  struct Stats {
    std::size_t bytes_in_use = 0;
    std::size_t peak_bytes_in_use = 0;
    std::size_t bytes_held = 0;            // in use or cached
    std::uint64_t system_allocations = 0;  // requests that the cache could not serve
  };
  Stats stats() const;

 private:
  std::unique_ptr<MemorySource> source_;
  mutable std::mutex mutex_;
  std::vector<Block*> free_lists_;              // by size class
  std::vector<std::unique_ptr<Block>> blocks_;  // all that exist
  Stats stats_;
};

}  // namespace lockstep::nn
