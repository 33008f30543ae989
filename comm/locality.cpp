#include "comm/locality.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <fstream>

#include "base/error.h"
#include "base/log.h"

namespace lockstep::comm {

Locality locality_of(const std::string& bus_id, const std::filesystem::path& sysfs) {
  if (bus_id.empty()) return {};
  const auto place = sysfs / "bus/pci/devices" / bus_id;
  Locality found;
  // -1 on machines without NUMA, and where the firmware does not say.
  if (!(std::ifstream(place / "numa_node") >> found.node) || found.node < 0) return {};
  std::string cpus;
  std::getline(std::ifstream(place / "local_cpulist"), cpus);
  found.cpus = parse_ranges(cpus);
  return found;
}

void prefer_memory_of(int node) {
  constexpr std::size_t kMostNodes = 1024;  // the most that Linux can be built for
  constexpr std::size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  if (node < 0 || static_cast<std::size_t>(node) >= kMostNodes) return;
  std::array<unsigned long, kMostNodes / kBits> nodes{};
  const auto bit = static_cast<std::size_t>(node);
  nodes[bit / kBits] = 1UL << (bit % kBits);
  // The kernel takes the last bit off the number of bits that it is told.
  if (::syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes.data(), kMostNodes + 1) != 0)
    log_debug("memory is not taken from NUMA node {}: {}", node, errno_text(errno));
}

}  // namespace lockstep::comm
