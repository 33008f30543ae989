#include "base/memory_source.h"

#include <sys/mman.h>

#include <cstdlib>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

class HostMemory final : public MemorySource {
 public:
  std::byte* allocate(std::size_t bytes) override {
    const bool large = bytes >= kHugePage;
    const std::size_t alignment = large ? kHugePage : kCacheLine;
    const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    void* data = std::aligned_alloc(alignment, rounded);
    if (data == nullptr)
      throw OutOfMemoryError(fmt::format("no host memory left for {} more", human_bytes(static_cast<double>(bytes))),
                             "use a smaller batch or model, or a machine with more memory");
    if (large) ::madvise(data, rounded, MADV_HUGEPAGE);  // only a wish: the page faults of a first touch are few then
    return static_cast<std::byte*>(data);
  }
  void free(std::byte* data, std::size_t) noexcept override { std::free(data); }
};

}  // namespace

std::unique_ptr<MemorySource> make_host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace lockstep
