#include "base/kernel.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/device.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;  // or above: version 1 has a large number for "none"

std::optional<std::uint64_t> number_of(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The number after `key` in a file of lines "key number …" or "key: number …".
std::optional<std::uint64_t> entry_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto words = words_of(line);
    if (words.size() >= 2 && (words[0] == key || words[0] == key + ":")) return number_of(words[1]);
  }
  return std::nullopt;
}

/// A file of one number; kNoLimit for "max". Nothing where there is no such file.
std::optional<std::uint64_t> limit_of(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return word == "max" ? kNoLimit : number_of(word);
}

std::uint64_t less(std::uint64_t a, std::uint64_t b) { return a > b ? a - b : 0; }

/// What one group's limit `limit` leaves.
std::uint64_t room_under(const std::string& directory, std::uint64_t limit, bool unified, std::uint64_t machine_swap) {
  const std::string stat = directory + "/memory.stat", total = unified ? "" : "total_";
  const std::uint64_t used = limit_of(directory + (unified ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  std::uint64_t cached = 0;
  for (const char* const key : {"inactive_file", "active_file"}) cached += entry_of(stat, total + key).value_or(0);
  std::uint64_t swap = machine_swap;
  if (unified)
    if (const auto most = limit_of(directory + "/memory.swap.max"); most && *most < kNoLimit)
      swap = std::min(swap, less(*most, limit_of(directory + "/memory.swap.current").value_or(0)));
  return less(limit, less(used, cached)) + swap;
}

void add_groups(const std::string& root, const std::string& machine, bool unified, std::uint64_t machine_swap,
                std::vector<MemoryBound>& bounds) {
  const std::vector<const char*> limits = unified ? std::vector<const char*>{"memory.max", "memory.high"}
                                                  : std::vector<const char*>{"memory.limit_in_bytes"};
  for (const ControlGroup& group : control_groups("memory", unified, root)) {
    for (const char* const name : limits) {
      const auto limit = limit_of(fmt::format("{}/{}", group.directory, name));
      if (!limit || *limit >= kNoLimit) continue;
      // A path means the same group to the processes of one such namespace.
      bounds.push_back({.id = fmt::format("{} {} {} {}", machine, namespace_id("cgroup", root), name, group.name),
                        .name = fmt::format("the control group {} ({} {})", group.name, name,
                                            human_bytes(static_cast<double>(*limit))),
                        .free_bytes = room_under(group.directory, *limit, unified, machine_swap)});
    }
  }
}

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

std::int64_t peak_resident_bytes() {
  struct rusage usage = {};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

std::vector<MemoryBound> memory_bounds(const std::string& root) {
  constexpr std::uint64_t kKib = 1024;
  const std::string meminfo = root + "/proc/meminfo";
  const auto available = entry_of(meminfo, "MemAvailable");
  if (!available) return {};
  const std::uint64_t swap = entry_of(meminfo, "SwapFree").value_or(0) * kKib;
  const std::string machine = boot_id(root);
  std::vector<MemoryBound> bounds = {{.id = machine, .name = "the machine", .free_bytes = *available * kKib + swap}};
  for (const bool unified : {true, false}) add_groups(root, machine, unified, swap, bounds);
  return bounds;
}

std::optional<std::uint64_t> memory_kills(const std::string& root) {
  return entry_of(root + "/proc/vmstat", "oom_kill");
}

std::unique_ptr<MemorySource> make_host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace lockstep
