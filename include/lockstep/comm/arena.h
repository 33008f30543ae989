// Memory that collectives work on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "lockstep/base/dtype.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {

/// Every slot of an arena starts at a multiple of this, so that slots never share a cache line and kernels may use
/// aligned loads.
inline constexpr std::size_t kArenaAlignment = 64;

constexpr std::size_t align_up(std::size_t bytes, std::size_t alignment = kArenaAlignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

class ProcessGroup;

/// A block of zero-initialised memory of the same size on every rank of the group that allocated it. Backends derive
/// from it to keep what they registered or mapped. The bytes may be read and written, by any thread of the group's
/// device, while no collective that names them is under way. The host may touch them only where that device is the CPU;
/// elsewhere ProcessGroup::copy() and zero() reach them.
///
/// It is destroyed by the thread that uses the group, when no operation on it is under way. Where one is, the memory
/// stays until this process ends, and every later call on the group throws a UsageError that names both. It stays too,
/// without an error, where an exception unwinds past the arena. After the end of its group, an arena is memory that no
/// operation takes; it may be destroyed then.
///
/// Note [Copies of other ranks]
/// Where all ranks of a group share memory, copy_of() says where the copies of the others are, to be read and written
/// with plain loads and stores. Nothing guards them, so ranks agree by operations on who may touch which copy: reads
/// and writes before a rank issues a barrier are done, and visible, once that barrier is complete. A copy is shared
/// memory that lasts as long as this rank's arena: it may be written after the other rank has destroyed its arena or
/// has ended, and nobody reads it then.
class Arena {
 public:
  virtual ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// Its group's arenas are counted from 1, on all ranks alike; 0: it belongs to no group.
  std::uint32_t id() const { return id_; }
  /// If the ranks of a host share memory: the distance between their copies, which are in the order of the ranks.
  std::size_t stride_bytes() const { return stride_bytes_; }
  /// Where this process has rank `rank`'s copy mapped (Note [Copies of other ranks]): data() for this rank itself.
  /// nullptr where it cannot reach it: the group has ranks on other hosts, MPI's messages or GPUs carry it, or it has
  /// ended. The same answer on all ranks, so that they can decide by it. UsageError for a rank that there is not.
  std::byte* copy_of(int rank) const;

  /// `count` elements of T from `offset_bytes`: addresses on the group's device, for the host to read and write only
  /// where that is the CPU, and good until the arena is destroyed. Throws UsageError where they do not lie within it,
  /// or not at a multiple of T's alignment.
  template <class T>
  std::span<T> view(std::size_t offset_bytes, std::size_t count) const {
    check_view(offset_bytes, count, sizeof(T), alignof(T));
    return {reinterpret_cast<T*>(data_ + offset_bytes), count};
  }

 protected:
  Arena(std::byte* data, std::size_t bytes, std::size_t stride_bytes = 0)
      : data_(data), bytes_(bytes), stride_bytes_(stride_bytes) {}

  /// For destructors of backends, before anything else: takes it off its group, and says whether the memory may go.
  /// It may not where operations on it may still be under way: in this process, on a GPU, or on other ranks.
  bool detach() noexcept;

 private:
  friend class ProcessGroup;
  void check_view(std::size_t offset_bytes, std::size_t count, std::size_t element, std::size_t alignment) const;

  std::byte* data_;
  std::size_t bytes_;
  std::size_t stride_bytes_;
  ProcessGroup* group_ = nullptr;  // nullptr: of none, or it has ended
  std::uint32_t id_ = 0;
  mutable OpDescriptor last_use_;  // the operation on it that was issued last; its sequence 0: none was
};

/// What a collective works on: `count` elements of `dtype` from `offset_bytes` of `arena`. All ranks of the group
/// name the same region of the same (collectively allocated) arena. A plain value: it does not keep the arena.
struct Region {
  const Arena* arena = nullptr;
  std::size_t offset_bytes = 0;  // a multiple of the element size
  std::size_t count = 0;
  DType dtype = DType::kF32;

  std::byte* data() const { return arena->data() + offset_bytes; }
  std::size_t bytes() const { return count * size_of(dtype); }
};

/// Anonymous pages from the kernel: zeroed, page-aligned, no physical memory until they are touched. Throws
/// std::bad_alloc when there are none. Safe to destroy at any time, also after its group.
class HostArena final : public Arena {
 public:
  static std::unique_ptr<HostArena> map(std::size_t bytes);
  ~HostArena() override;

 private:
  HostArena(std::byte* data, std::size_t bytes, std::size_t mapped_bytes)
      : Arena(data, bytes), mapped_bytes_(mapped_bytes) {}

  std::size_t mapped_bytes_;
};

}  // namespace lockstep::comm
