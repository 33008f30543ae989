// Device memory that is asked for once and then reused.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>

#include "lockstep/base/device.h"

namespace lockstep::nn {

class Heap;

/// More was asked for than a MemoryLimit allows. No lockstep::Error: whoever sets a limit catches it.
class MemoryLimitReached : public std::runtime_error {
 public:
  MemoryLimitReached() : std::runtime_error("more memory was asked for than is allowed here") {}
};

/// A piece of memory with a reference count. Owned by its heap, shared by tensors.
struct Block {
  std::byte* data = nullptr;
  std::size_t bytes = 0;  // capacity
  std::size_t asked = 0;  // of them, by acquire()
  std::atomic<int> references{0};
  int size_class = 0;
  int pool = 0;
  Heap* owner = nullptr;
  Block* next_free = nullptr;
};

/// Takes a block without references back; on any thread.
void recycle(Block* block) noexcept;
/// Whose memory it is.
Device device_of(const Block& block);

/// Keeps memory that it can do without: what a captured graph reads and writes. It is removed before it ends.
class MemoryHolder {
 public:
  /// Releases the memory, so that its blocks are idle, and never uses it again; false if it cannot now. Called within
  /// acquire(), which holds no lock then; it acquires nothing itself.
  virtual bool give_up() noexcept = 0;

 protected:
  ~MemoryHolder() = default;
};

/// Keeps freed blocks in lists by size class (four classes for each power of two, so that at most a fifth of a block is
/// wasted; 256 bytes at least) and hands them out again: a training loop of fixed shapes asks the system for nothing
/// after its first steps. Blocks are never split or merged. If memory runs out, idle blocks go back to the source, and
/// it is asked once more; after that, holders are asked to give up theirs. Thread-safe. Tensors may outlive it: what
/// they hold goes back to the source with the last of them, on the thread that releases it, and there the source ends.
class CachingAllocator {
 public:
  explicit CachingAllocator(std::unique_ptr<MemorySource> source);
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  /// A block of at least `bytes` with one reference, the caller's; its content is unspecified. Throws what the source
  /// does, DeviceError for sizes that no memory has, and MemoryLimitReached.
  Block* acquire(std::size_t bytes);
  /// Note [Graph memory]
  /// What a captured graph reads and writes must be nobody else's between two of its runs, though the host's handles
  /// are gone by then. So blocks acquired while it is made come from a pool of their own, and go back there. Graphs
  /// share one: they run one after the other, and leave nothing for each other in it. Its idle blocks go back to the
  /// source only if memory runs out and all holders have given up. One thread adds, asks and removes all holders.
  enum class Pool { kOrdinary, kGraph };
  void use(Pool pool);
  void add(MemoryHolder& holder);
  void remove(MemoryHolder& holder) noexcept;

  /// Whose memory it gives.
  Device device() const;

  /// From now on acquire() is given no more than so many bytes together, on all threads; nullopt: as many as there are.
  /// The last call counts.
  void limit(std::optional<std::size_t> bytes);

  /// Idle blocks go back to the source: for whoever has given up much that nobody will ask for again in such sizes.
  void trim();

  struct Stats {
    std::size_t bytes_in_use = 0;
    std::size_t peak_bytes_in_use = 0;
    std::size_t bytes_asked = 0, peak_bytes_asked = 0;  // of those in use, without what sizes are rounded up by
    std::size_t bytes_held = 0;                         // in use or cached
    std::uint64_t system_allocations = 0;               // requests that the cache could not serve
  };
  Stats stats() const;

 private:
  Heap* heap_;  // lives until this and all of its blocks are gone
};

/// In its scope, what is acquired is limited: for sizes that come out of a file. The end of one ends all limits of the
/// allocator, which must outlive it.
class MemoryLimit {
 public:
  MemoryLimit(CachingAllocator& allocator, std::size_t bytes) : allocator_(allocator) { allocator_.limit(bytes); }
  ~MemoryLimit() { allocator_.limit(std::nullopt); }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  CachingAllocator& allocator_;
};

/// Acquires from the pool of graphs in its scope, whatever the thread. Not within another one. The allocator must
/// outlive it.
class GraphMemory {
 public:
  explicit GraphMemory(CachingAllocator& allocator) : allocator_(allocator) {
    allocator_.use(CachingAllocator::Pool::kGraph);
  }
  ~GraphMemory() { allocator_.use(CachingAllocator::Pool::kOrdinary); }
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

 private:
  CachingAllocator& allocator_;
};

}  // namespace lockstep::nn
