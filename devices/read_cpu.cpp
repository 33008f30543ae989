// What hwloc sees of this machine.
#include <hwloc.h>

#include <memory>

#include "base/text.h"
#include "devices/binding.h"
#include "devices/machine.h"

namespace lockstep::devices {
namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<hwloc_topology, TopologyDeleter>;

enum class Part { kAll, kCores };

/// Without hwloc's own look at graphics cards, which asks for X servers. Of kCores there are packages, cores and
/// processors that this process may use, and nothing else, which takes half the time.
Topology load_topology(Part part) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  Topology topology(raw);
  unsigned long flags =
      HWLOC_TOPOLOGY_FLAG_NO_DISTANCES | HWLOC_TOPOLOGY_FLAG_NO_MEMATTRS | HWLOC_TOPOLOGY_FLAG_NO_CPUKINDS;
  if (part == Part::kAll) {
    flags |= HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED;
    hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  } else {
    hwloc_topology_set_all_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
    for (const auto type : {HWLOC_OBJ_PACKAGE, HWLOC_OBJ_CORE})
      hwloc_topology_set_type_filter(raw, type, HWLOC_TYPE_FILTER_KEEP_ALL);
  }
  hwloc_topology_set_flags(raw, flags);
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

/// Every processor a core of its own, on one socket: what is known without hwloc's help.
std::vector<Core> processors_as_cores(const CpuMask& allowed) {
  std::vector<Core> cores;
  for (std::size_t cpu = 0; cpu < allowed.size(); ++cpu)
    if (allowed[cpu]) cores.emplace_back().cpus.set(cpu);
  return cores;
}

}  // namespace

Cpu read_cpu() {
  Cpu cpu;
  cpu.features = cpu_features();
  const Topology topology = load_topology(Part::kAll);
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

std::vector<Core> discover_cores(const CpuMask& allowed) {
  // Each time anew hwloc would load its plugins too, which takes 20 ms.
  static const Topology& topology = *new Topology(load_topology(Part::kCores));
  if (topology == nullptr) return processors_as_cores(allowed);
  std::vector<Core> cores;
  CpuMask seen;
  const int count = hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_CORE);
  for (int i = 0; i < count; ++i) {
    const hwloc_obj_t object = hwloc_get_obj_by_type(topology.get(), HWLOC_OBJ_CORE, static_cast<unsigned>(i));
    Core core;
    for (int cpu = hwloc_bitmap_first(object->cpuset); cpu >= 0; cpu = hwloc_bitmap_next(object->cpuset, cpu))
      if (static_cast<std::size_t>(cpu) < allowed.size() && allowed[static_cast<std::size_t>(cpu)])
        core.cpus.set(static_cast<std::size_t>(cpu));
    if (core.cpus.none()) continue;
    const hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(topology.get(), HWLOC_OBJ_PACKAGE, object);
    core.socket = package != nullptr ? static_cast<int>(package->logical_index) : 0;
    seen |= core.cpus;
    cores.push_back(core);
  }
  // Containers may hide the cores' files: what hwloc does not know counts all the same.
  return seen == allowed ? cores : processors_as_cores(allowed);
}

}  // namespace lockstep::devices
