#include "devices/json.h"

#include <nlohmann/json.hpp>

namespace lockstep::devices {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
Json json(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json json(const std::optional<Problem>& problem) {
  if (!problem) return nullptr;
  return {{"what", problem->what}, {"remedy", problem->remedy}};
}

Json json(const std::optional<ComputeMode>& mode) {
  if (!mode) return nullptr;
  switch (*mode) {
    case ComputeMode::kDefault: return "default";
    case ComputeMode::kExclusiveThread: return "exclusive_thread";
    case ComputeMode::kProhibited: return "prohibited";
    case ComputeMode::kExclusiveProcess: return "exclusive_process";
  }
  return nullptr;
}

void add_memory(Json& object, const std::optional<Memory>& memory) {
  object["memory_total_bytes"] = memory ? Json(memory->total_bytes) : Json(nullptr);
  object["memory_free_bytes"] = memory ? Json(memory->free_bytes) : Json(nullptr);
  object["memory_used_bytes"] = memory ? Json(memory->used_bytes) : Json(nullptr);
  object["memory_reserved_bytes"] = memory ? json(memory->reserved_bytes) : Json(nullptr);
}

Json json(const MigDevice& mig) {
  Json object = {{"index", mig.index},
                 {"name", json(mig.name)},
                 {"uuid", json(mig.uuid)},
                 {"gpu_instance", json(mig.gpu_instance)},
                 {"compute_instance", json(mig.compute_instance)}};
  add_memory(object, mig.memory);
  return object;
}

Json json(const GpuProcess& process) {
  return {{"pid", process.pid},
          {"type", process.type},
          {"name", json(process.name)},
          {"memory_bytes", json(process.memory_bytes)},
          {"mig_device", json(process.mig)}};
}

Json json(const Gpu& gpu);

template <class T>
Json json(const std::vector<T>& items) {
  Json array = Json::array();
  for (const auto& item : items) array.push_back(json(item));
  return array;
}

Json json(const Gpu& gpu) {
  Json object = {{"index", gpu.index},
                 {"problem", json(gpu.problem)},
                 {"no_permission", gpu.denied},
                 {"name", json(gpu.name)},
                 {"uuid", json(gpu.uuid)},
                 {"bus_id", json(gpu.bus_id)},
                 {"numa_node", json(gpu.numa_node)},
                 {"persistence", json(gpu.persistence)},
                 {"display", json(gpu.display)},
                 {"ecc", json(gpu.ecc)},
                 {"ecc_uncorrected_errors", json(gpu.ecc_errors)},
                 {"fan_percent", json(gpu.fan_percent)},
                 {"temperature_c", json(gpu.temperature_c)},
                 {"performance_state", json(gpu.performance_state)},
                 {"power_w", json(gpu.power_w)},
                 {"power_cap_w", json(gpu.power_cap_w)},
                 {"utilisation_percent", json(gpu.utilisation_percent)},
                 {"memory_utilisation_percent", json(gpu.memory_utilisation_percent)},
                 {"compute_mode", json(gpu.compute_mode)},
                 {"mig", json(gpu.mig)}};
  add_memory(object, gpu.memory);
  object["mig_devices"] = json(gpu.mig_devices);
  object["processes"] = json(gpu.processes);
  return object;
}

Json json(const Cpu& cpu) {
  const CpuFeatures& has = cpu.features;
  return {{"model", json(cpu.model)},
          {"sockets", json(cpu.sockets)},
          {"cores", json(cpu.cores)},
          {"processors", json(cpu.processors)},
          {"usable_processors", json(cpu.usable_processors)},
          {"numa_nodes", json(cpu.numa_nodes)},
          {"memory_bytes", json(cpu.memory_bytes)},
          {"features",
           {{"avx2", has.avx2},
            {"fma", has.fma},
            {"avx512", has.avx512},
            {"avx512_vnni", has.avx512_vnni},
            {"avx512_bf16", has.avx512_bf16},
            {"avx512_fp16", has.avx512_fp16},
            {"amx_bf16", has.amx_bf16},
            {"amx_int8", has.amx_int8}}}};
}

}  // namespace

std::string json_of(const Machine& machine) {
  const Json object = {{"driver_version", json(machine.gpus.driver_version)},
                       {"cuda_version", json(machine.gpus.cuda_version)},
                       {"problem", json(machine.gpus.problem)},
                       {"gpus", json(machine.gpus.list)},
                       {"cpu", json(machine.cpu)}};
  // Names of processes may be any bytes.
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace lockstep::devices
