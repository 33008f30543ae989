#include "devices/machine.h"

#include "base/json.h"

namespace lockstep::devices {
namespace {

JsonText json(const std::optional<Problem>& problem) {
  if (!problem) return nullptr;
  return JsonObject{{"what", problem->what}, {"remedy", problem->remedy}};
}

JsonText json(const std::optional<ComputeMode>& mode) {
  if (!mode) return nullptr;
  switch (*mode) {
    case ComputeMode::kDefault: return "default";
    case ComputeMode::kExclusiveThread: return "exclusive_thread";
    case ComputeMode::kProhibited: return "prohibited";
    case ComputeMode::kExclusiveProcess: return "exclusive_process";
  }
  return nullptr;
}

void add_memory(JsonObject& object, const std::optional<Memory>& memory) {
  object.add("memory_total_bytes", memory ? JsonText(memory->total_bytes) : nullptr);
  object.add("memory_free_bytes", memory ? JsonText(memory->free_bytes) : nullptr);
  object.add("memory_used_bytes", memory ? JsonText(memory->used_bytes) : nullptr);
  object.add("memory_reserved_bytes", memory ? JsonText(memory->reserved_bytes) : nullptr);
}

JsonObject json(const MigDevice& mig) {
  JsonObject object = {{"index", mig.index},
                       {"name", mig.name},
                       {"uuid", mig.uuid},
                       {"gpu_instance", mig.gpu_instance},
                       {"compute_instance", mig.compute_instance}};
  add_memory(object, mig.memory);
  return object;
}

JsonObject json(const GpuProcess& process) {
  return {{"pid", process.pid},
          {"type", process.type},
          {"name", process.name},
          {"memory_bytes", process.memory_bytes},
          {"mig_device", process.mig}};
}

JsonObject json(const Gpu& gpu);
JsonObject json(const GpuPair& pair);
JsonObject json(const MeasuredRates::Product& product);
JsonObject json(const MeasuredRates& rates);

template <class T>
JsonText json(const std::vector<T>& items) {
  std::vector<JsonText> array;
  for (const auto& item : items) array.emplace_back(json(item));
  return array;
}

JsonObject json(const Gpu& gpu) {
  JsonObject object = {{"index", gpu.index},
                       {"problem", json(gpu.problem)},
                       {"no_permission", gpu.denied},
                       {"name", gpu.name},
                       {"uuid", gpu.uuid},
                       {"bus_id", gpu.bus_id},
                       {"numa_node", gpu.numa_node},
                       {"persistence", gpu.persistence},
                       {"display", gpu.display},
                       {"ecc", gpu.ecc},
                       {"ecc_uncorrected_errors", gpu.ecc_errors},
                       {"fan_percent", gpu.fan_percent},
                       {"temperature_c", gpu.temperature_c},
                       {"performance_state", gpu.performance_state},
                       {"power_w", gpu.power_w},
                       {"power_cap_w", gpu.power_cap_w},
                       {"utilisation_percent", gpu.utilisation_percent},
                       {"memory_utilisation_percent", gpu.memory_utilisation_percent},
                       {"compute_mode", json(gpu.compute_mode)},
                       {"mig", gpu.mig}};
  add_memory(object, gpu.memory);
  object.add("pcie_width", gpu.pcie_width);
  object.add("most_pcie_width", gpu.most_pcie_width);
  object.add("slowed_by", gpu.slowed_by);
  object.add("nvlinks_up", gpu.nvlinks_up);
  object.add("nvlinks_down", gpu.nvlinks_down);
  object.add("mig_devices", json(gpu.mig_devices));
  object.add("processes", json(gpu.processes));
  return object;
}

JsonObject json(const GpuPair& pair) {
  return {{"gpus", std::vector<int>{pair.first, pair.second}},
          {"peer_access", pair.reads},
          {"reason", pair.reason},
          {"nvlink", pair.nvlink}};
}

JsonObject json(const Cpu& cpu) {
  const CpuFeatures& has = cpu.features;
  return {{"model", cpu.model},
          {"sockets", cpu.sockets},
          {"cores", cpu.cores},
          {"processors", cpu.processors},
          {"usable_processors", cpu.usable_processors},
          {"numa_nodes", cpu.numa_nodes},
          {"memory_bytes", cpu.memory_bytes},
          {"features", JsonObject{{"avx2", has.avx2},
                                  {"fma", has.fma},
                                  {"avx512", has.avx512},
                                  {"avx512_vnni", has.avx512_vnni},
                                  {"avx512_bf16", has.avx512_bf16},
                                  {"avx512_fp16", has.avx512_fp16},
                                  {"amx_bf16", has.amx_bf16},
                                  {"amx_int8", has.amx_int8}}}};
}

JsonObject json(const MeasuredRates::Product& product) {
  return {{"precision", product.precision}, {"width", product.width}, {"tflops", product.tflops}};
}

JsonObject json(const MeasuredRates& rates) {
  return {{"device", rates.device},
          {"problem", json(rates.problem)},
          {"threads", rates.threads},
          {"copy_bytes", rates.copy_bytes},
          {"copy_bytes_per_s", rates.copy_bytes_per_s},
          {"products", json(rates.products)},
          {"core_flops", rates.core_flops}};
}

}  // namespace

std::optional<double> MeasuredRates::product_tflops(std::string_view precision) const {
  for (const Product& product : products)
    if (product.precision == precision) return product.tflops;
  return std::nullopt;
}

std::string json_of(const Machine& machine) {
  JsonObject object = {{"driver_version", machine.gpus.driver_version}, {"cuda_version", machine.gpus.cuda_version},
                       {"problem", json(machine.gpus.problem)},         {"gpus", json(machine.gpus.list)},
                       {"gpu_pairs", json(machine.gpus.pairs)},         {"cpu", json(machine.cpu)}};
  if (!machine.measured.empty()) object.add("measured", json(machine.measured));
  return object.text();
}

}  // namespace lockstep::devices
