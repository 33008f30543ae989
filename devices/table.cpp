#include "devices/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "devices/frame.h"

namespace lockstep::devices {
namespace {

constexpr const char* kUnknown = "N/A";

const Cells kWhole = {76};
const Cells kNumbered = {4, 69};
const Cells kGpuCells = {4, 34, 12, 17};
const Cells kProcessCells = {4, 10, 4, 10, 36};

template <class T>
std::string shown(const std::optional<T>& value) {
  return value ? fmt::to_string(*value) : kUnknown;
}

std::string with_unit(std::string_view format, const std::optional<int>& value) {
  return value ? fmt::format(fmt::runtime(format), *value) : kUnknown;
}

std::string mebibytes(std::int64_t bytes) { return fmt::format("{} MiB", (bytes + (1 << 19)) >> 20); }

std::string on_off(const std::optional<bool>& value) { return !value ? kUnknown : *value ? "on" : "off"; }

std::string watts(const std::optional<double>& value) {
  return value ? fmt::format("{}", std::lround(*value)) : kUnknown;
}

std::string mode_text(const std::optional<ComputeMode>& mode) {
  if (!mode) return kUnknown;
  switch (*mode) {
    case ComputeMode::kDefault: return "default";
    case ComputeMode::kExclusiveThread: return "one thread";
    case ComputeMode::kProhibited: return "prohibited";
    case ComputeMode::kExclusiveProcess: return "exclusive";
  }
  return kUnknown;
}

/// The three lines of a memory cell, under the heading that says which is which.
std::vector<std::string> memory_lines(const std::optional<Memory>& memory, int columns) {
  if (!memory) return std::vector<std::string>(3, right_in(kUnknown, columns));
  return {right_in(mebibytes(memory->used_bytes), columns), right_in(mebibytes(memory->free_bytes), columns),
          right_in(mebibytes(memory->total_bytes), columns)};
}

std::string counted(std::size_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string problem_text(const Problem& problem) {
  return problem.remedy.empty() ? problem.what : problem.what + " → " + problem.remedy;
}

void add_wrapped(Frame& frame, std::string_view number, const std::string& text) {
  for (const auto& line : wrapped(text, kNumbered[1])) {
    frame.line(kNumbered, {right_in(number, kNumbered[0]), line});
    number = "";
  }
}

void add_headings(Frame& frame) {
  const int middle = kGpuCells[1], memory = kGpuCells[2], last = kGpuCells[3];
  frame.line(kGpuCells, {" GPU", "name", right_in("memory used", memory), spread("busy", "compute", last)});
  frame.line(kGpuCells, {"", spread("bus id", "NUMA node", middle), right_in("memory free", memory),
                         spread("ECC", "errors", last)});
  frame.line(kGpuCells, {"", spread("temp   perf   fan", "power / cap", middle), right_in("memory total", memory),
                         spread("persist.", "display", last)});
}

void add_mig_device(Frame& frame, const Gpu& gpu, const MigDevice& mig) {
  const auto memory = memory_lines(mig.memory, kGpuCells[2]);
  frame.line(kGpuCells, {right_in(fmt::format("{}:{}", gpu.index, mig.index), kGpuCells[0]),
                         mig.name.value_or(kUnknown), memory[0], "MIG device"});
  frame.line(kGpuCells, {"", fmt::format("GPU instance {}", shown(mig.gpu_instance)), memory[1], ""});
  frame.line(kGpuCells, {"", fmt::format("compute instance {}", shown(mig.compute_instance)), memory[2], ""});
}

void add_gpu(Frame& frame, const Gpu& gpu) {
  const int middle = kGpuCells[1], last = kGpuCells[3];
  if (gpu.problem) {
    std::string who = gpu.name.value_or("");
    if (gpu.bus_id) who += (who.empty() ? "" : ", ") + *gpu.bus_id;
    if (!who.empty()) who += ": ";
    add_wrapped(frame, std::to_string(gpu.index), who + problem_text(*gpu.problem));
    return;
  }
  const bool mig = gpu.mig.value_or(false);
  const auto memory = memory_lines(gpu.memory, kGpuCells[2]);
  frame.line(kGpuCells, {right_in(std::to_string(gpu.index), kGpuCells[0]), gpu.name.value_or(kUnknown), memory[0],
                         spread(with_unit("{} %", gpu.utilisation_percent), mode_text(gpu.compute_mode), last)});
  frame.line(kGpuCells,
             {"", spread(gpu.bus_id.value_or(kUnknown) + (mig ? "  MIG on" : ""), shown(gpu.numa_node), middle),
              memory[1], spread(on_off(gpu.ecc), shown(gpu.ecc_errors), last)});
  const std::string readings = left_in(with_unit("{} °C", gpu.temperature_c), 7) +
                               left_in(with_unit("P{}", gpu.performance_state), 7) + with_unit("{} %", gpu.fan_percent);
  frame.line(kGpuCells,
             {"", spread(readings, fmt::format("{} / {} W", watts(gpu.power_w), watts(gpu.power_cap_w)), middle),
              memory[2], spread(on_off(gpu.persistence), on_off(gpu.display), last)});
  for (const auto& device : gpu.mig_devices) add_mig_device(frame, gpu, device);
  if (mig && gpu.mig_devices.empty()) frame.line(kGpuCells, {"", "no MIG devices: nothing runs here", "", ""});
  if (!gpu.denied.empty()) add_wrapped(frame, "", "no permission to read: " + join(gpu.denied, ", "));
}

void add_process(Frame& frame, const Gpu& gpu, const GpuProcess& process) {
  const std::string where = process.mig ? fmt::format("{}:{}", gpu.index, *process.mig) : std::to_string(gpu.index);
  const auto& c = kProcessCells;
  frame.line(c, {right_in(where, c[0]), right_in(std::to_string(process.pid), c[1]), process.type,
                 right_in(process.memory_bytes ? mebibytes(*process.memory_bytes) : kUnknown, c[3]),
                 process.name ? cut_columns(*process.name, c[4], Keep::kEnd) : kUnknown});
}

void add_processes(Frame& frame, const Gpus& gpus) {
  const bool any = std::ranges::any_of(gpus.list, [](const Gpu& gpu) { return !gpu.processes.empty(); });
  frame.rule();
  if (!any) {
    frame.line(kWhole, {"no processes to be seen on the GPUs"});
    return;
  }
  const auto& c = kProcessCells;
  frame.line(c, {" GPU", right_in("process id", c[1]), "type", right_in("memory", c[3]), "name"});
  frame.double_rule();
  for (const auto& gpu : gpus.list)
    for (const auto& process : gpu.processes) add_process(frame, gpu, process);
}

std::string title(const Gpus& gpus) {
  std::vector<std::string> pieces;
  if (gpus.driver_version) pieces.push_back("NVIDIA driver " + *gpus.driver_version);
  if (gpus.cuda_version) pieces.push_back("CUDA " + *gpus.cuda_version);
  const std::string count = gpus.list.empty() ? "no GPU" : counted(gpus.list.size(), "GPU");
  return spread(join(pieces, ", "), count, kWhole[0]);
}

void add_gpus(Frame& frame, const Gpus& gpus) {
  if (gpus.problem) {
    for (const auto& line : wrapped("no GPUs: " + problem_text(*gpus.problem), kWhole[0])) frame.line(kWhole, {line});
    return;
  }
  frame.line(kWhole, {title(gpus)});
  if (gpus.list.empty()) return;
  frame.rule();
  add_headings(frame);
  frame.double_rule();
  for (const auto& gpu : gpus.list) {
    if (&gpu != &gpus.list.front()) frame.rule();
    add_gpu(frame, gpu);
  }
  add_processes(frame, gpus);
}

std::string features_text(const CpuFeatures& has) {
  const auto with = [](const char* name, std::vector<std::string> extras) {
    std::erase(extras, "");
    return extras.empty() ? std::string(name) : fmt::format("{} with {}", name, join(extras, ", "));
  };
  const auto if_has = [](bool feature, const char* name) { return std::string(feature ? name : ""); };
  std::vector<std::string> pieces;
  pieces.push_back(has.avx2 ? with("AVX2", {if_has(has.fma, "FMA")}) : "no AVX2");
  pieces.push_back(has.avx512 ? with("AVX-512", {if_has(has.avx512_vnni, "int8 (VNNI)"),
                                                 if_has(has.avx512_bf16, "bf16"), if_has(has.avx512_fp16, "fp16")})
                              : "no AVX-512");
  pieces.push_back(has.amx_bf16 || has.amx_int8
                       ? with("AMX", {if_has(has.amx_bf16, "bf16"), if_has(has.amx_int8, "int8")})
                       : "no AMX");
  return join(pieces, "; ");
}

void add_cpu(Frame& frame, const Cpu& cpu) {
  const auto counted_or = [](const std::optional<int>& count, const char* noun) {
    return count ? counted(static_cast<std::size_t>(*count), noun) : fmt::format("{}s {}", noun, kUnknown);
  };
  std::string processors = counted_or(cpu.processors, "processor");
  if (cpu.processors && cpu.usable_processors && *cpu.usable_processors < *cpu.processors)
    processors += fmt::format(" ({} usable)", *cpu.usable_processors);
  const std::string memory =
      cpu.memory_bytes ? mebibytes(*cpu.memory_bytes) + " of memory" : fmt::format("memory {}", kUnknown);
  frame.line(kNumbered, {" CPU", cpu.model.value_or(kUnknown)});
  frame.line(kNumbered, {"", fmt::format("{}, {}, {}", counted_or(cpu.sockets, "socket"), counted_or(cpu.cores, "core"),
                                         processors)});
  frame.line(kNumbered, {"", fmt::format("{}, {}", counted_or(cpu.numa_nodes, "NUMA node"), memory)});
  frame.line(kNumbered, {"", features_text(cpu.features)});
}

std::string measured_text(const MeasuredRates& rates) {
  std::string text = rates.device;
  if (rates.threads) text += fmt::format(", {}", counted(static_cast<std::size_t>(*rates.threads), "thread"));
  text += ": measured";
  std::vector<std::string> pieces;
  if (rates.copy_bytes_per_s)
    pieces.push_back(fmt::format(" {:.4g} GB/s in a copy of {}", 1e-9 * *rates.copy_bytes_per_s,
                                 human_bytes(static_cast<double>(rates.copy_bytes))));
  for (const auto& product : rates.products)
    pieces.push_back(fmt::format(" {:.4g} TFLOP/s in {} products of {} x {}", product.tflops, product.precision,
                                 product.width, product.width));
  if (rates.core_flops)
    pieces.push_back(fmt::format(" {:.4g} GFLOP/s in multiply-adds of a core", 1e-9 * *rates.core_flops));
  if (rates.problem) pieces.push_back((pieces.empty() ? " nothing: " : " no more: ") + problem_text(*rates.problem));
  return text + join(pieces, ",");
}

}  // namespace

std::string table_of(const Machine& machine) {
  Frame frame(kTableColumns);
  add_gpus(frame, machine.gpus);
  frame.rule();
  add_cpu(frame, machine.cpu);
  if (!machine.measured.empty()) frame.rule();
  for (const auto& rates : machine.measured)
    for (const auto& line : wrapped(measured_text(rates), kWhole[0])) frame.line(kWhole, {line});
  return frame.text();
}

}  // namespace lockstep::devices
