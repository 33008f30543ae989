#include "devices/machine.h"

#include <hwloc.h>

#include <memory>

#include "base/text.h"

namespace lockstep::devices {
namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<hwloc_topology, TopologyDeleter>;

/// Without hwloc's own look at graphics cards, which asks for X servers.
Topology load_topology() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  Topology topology(raw);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_flags(raw, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED | HWLOC_TOPOLOGY_FLAG_NO_DISTANCES |
                                    HWLOC_TOPOLOGY_FLAG_NO_MEMATTRS | HWLOC_TOPOLOGY_FLAG_NO_CPUKINDS);
  if (hwloc_topology_load(raw) != 0) return nullptr;
  return topology;
}

std::optional<int> count_of(hwloc_topology_t topology, hwloc_obj_type_t type) {
  const int count = hwloc_get_nbobjs_by_type(topology, type);
  return count > 0 ? std::optional(count) : std::nullopt;
}

std::optional<std::string> model_of(hwloc_topology_t topology) {
  hwloc_obj_t object = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
  if (object == nullptr) object = hwloc_get_root_obj(topology);
  const char* model = hwloc_obj_get_info_by_name(object, "CPUModel");
  if (model == nullptr || trim(model).empty()) return std::nullopt;
  return std::string(trim(model));
}

std::optional<int> usable_processors(hwloc_topology_t topology) {
  hwloc_bitmap_t set = hwloc_bitmap_alloc();
  const bool known = set != nullptr && hwloc_get_cpubind(topology, set, HWLOC_CPUBIND_THREAD) == 0;
  const int count = known ? hwloc_bitmap_weight(set) : 0;
  hwloc_bitmap_free(set);
  return count > 0 ? std::optional(count) : std::nullopt;
}

}  // namespace

Cpu read_cpu() {
  Cpu cpu;
  cpu.features = cpu_features();
  const Topology topology = load_topology();
  if (!topology) return cpu;
  cpu.model = model_of(topology.get());
  cpu.sockets = count_of(topology.get(), HWLOC_OBJ_PACKAGE);
  cpu.cores = count_of(topology.get(), HWLOC_OBJ_CORE);
  cpu.numa_nodes = count_of(topology.get(), HWLOC_OBJ_NUMANODE);
  cpu.processors = count_of(topology.get(), HWLOC_OBJ_PU);
  cpu.usable_processors = usable_processors(topology.get());
  if (const auto bytes = hwloc_get_root_obj(topology.get())->total_memory; bytes > 0)
    cpu.memory_bytes = static_cast<std::int64_t>(bytes);
  return cpu;
}

}  // namespace lockstep::devices
