// Memory of the host.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/device.h"

namespace lockstep {
namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

class HostMemory final : public MemorySource {
 public:
  std::byte* allocate(std::size_t bytes) override { return allocate_in_part(bytes, bytes); }

  // A huge page is resident as a whole once a byte of it is written, so the last one is worth it where it is nearly
  // full; parameters have many blocks of a few of them.
  std::byte* allocate_in_part(std::size_t bytes, std::size_t used) override {
    const std::size_t huge = std::min((used + kHugePage / 4) / kHugePage, bytes / kHugePage);
    void* data = nullptr;
    if (::posix_memalign(&data, huge > 0 ? kHugePage : kCacheLine, bytes) != 0)
      throw OutOfMemoryError(fmt::format("no host memory left for {} more", human_bytes(static_cast<double>(bytes))),
                             "use a smaller batch or model, or a machine with more memory");
    // Only a wish: the page faults of a first touch are few then.
    if (huge > 0) ::madvise(data, huge * kHugePage, MADV_HUGEPAGE);
    return static_cast<std::byte*>(data);
  }
  void free(std::byte* data, std::size_t) noexcept override { std::free(data); }
};

}  // namespace

std::unique_ptr<MemorySource> make_host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace lockstep
