#include "lockstep/comm/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <new>

#include "base/error.h"

namespace lockstep::comm {

void Arena::check_view(std::size_t offset_bytes, std::size_t count, std::size_t element, std::size_t alignment) const {
  if (offset_bytes % alignment == 0 && offset_bytes <= bytes_ && count <= (bytes_ - offset_bytes) / element) return;
  throw UsageError(fmt::format("{} elements of {} bytes at byte {} do not fit an arena of {} bytes", count, element,
                               offset_bytes, bytes_),
                   "name elements that lie within it, at a multiple of their alignment");
}

std::unique_ptr<HostArena> HostArena::map(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (bytes > std::numeric_limits<std::size_t>::max() - page) throw std::bad_alloc();
  const std::size_t mapped = align_up(std::max<std::size_t>(bytes, 1), page);
  void* data = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return std::unique_ptr<HostArena>(new HostArena(static_cast<std::byte*>(data), bytes, mapped));
}

HostArena::~HostArena() {
  // If operations are under way, the group's progress thread, and other ranks through the kernel, still read and write
  // its pages until this process ends.
  if (detach()) ::munmap(data(), mapped_bytes_);
}

}  // namespace lockstep::comm
