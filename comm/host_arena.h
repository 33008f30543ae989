// Arenas in this process's own memory.
#pragma once

#include <cstddef>
#include <memory>

#include "comm/arena.h"

namespace lockstep::comm {

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
