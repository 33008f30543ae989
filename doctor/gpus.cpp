// GPUs, what is between them, and what NCCL makes of it.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "devices/visible.h"
#include "doctor/rows.h"

namespace lockstep::doctor {
namespace {

/// Of /sys/bus/pci: NVIDIA's cards that compute or draw.
std::size_t nvidia_cards(const View& view) {
  std::size_t cards = 0;
  for (const auto& name : names_in(view, "/sys/bus/pci/devices")) {
    const std::string at = "/sys/bus/pci/devices/" + name;
    const auto kind = read(view, at + "/class").value_or("");
    if (read(view, at + "/vendor") == "0x10de" && (kind.starts_with("0x0300") || kind.starts_with("0x0302"))) ++cards;
  }
  return cards;
}

void check_gpu(const devices::Gpu& gpu, RowFindings& report, bool& fine) {
  const std::string name = fmt::format("GPU {}", gpu.index);
  const auto warn = [&](const std::string& what, const std::string& remedy) {
    report.warn(name + ": " + what, remedy);
    fine = false;
  };
  if (gpu.problem) {
    report.fail(name + ": " + gpu.problem->what, gpu.problem->remedy);
    fine = false;
  }
  if (gpu.ecc_errors.value_or(0) > 0)
    warn(fmt::format("{} uncorrected memory errors since the driver was loaded", *gpu.ecc_errors),
         fmt::format("nvidia-smi -q -i {}; reset it, and replace it if they return", gpu.index));
  if (gpu.compute_mode == devices::ComputeMode::kProhibited) {
    report.fail(name + ": its compute mode refuses all programs",
                fmt::format("nvidia-smi -i {} -c DEFAULT", gpu.index));
    fine = false;
  }
  if (gpu.compute_mode == devices::ComputeMode::kExclusiveProcess && !gpu.processes.empty()) {
    report.fail(name + ": another process has it for itself", "see who: lockstep devices");
    fine = false;
  }
  if (gpu.persistence == false)
    warn("the driver unloads it between programs, which costs seconds at each start",
         fmt::format("nvidia-smi -i {} -pm 1, or nvidia-persistenced", gpu.index));
  if (gpu.temperature_c.value_or(0) >= 85)
    warn(fmt::format("{} °C", *gpu.temperature_c), "it is slowed down when it is hot: look at fans and air");
  for (const std::string& reason : gpu.slowed_by)
    warn("slowed down now, by " + reason,
         fmt::format("nvidia-smi -q -d PERFORMANCE -i {}; look at fans, air and power supplies", gpu.index));
  if (gpu.slowed_by.empty() && gpu.performance_state.value_or(0) > 0 && gpu.utilisation_percent.value_or(0) >= 50)
    warn(fmt::format("it works in performance state P{}", *gpu.performance_state),
         fmt::format("nvidia-smi -q -d PERFORMANCE -i {} says what slows it down", gpu.index));
  if (gpu.memory && gpu.memory->used_bytes > gpu.memory->total_bytes / 20 + static_cast<std::int64_t>(kGi))
    warn(fmt::format("{} of {} in use", human_bytes(static_cast<double>(gpu.memory->used_bytes)),
                     human_bytes(static_cast<double>(gpu.memory->total_bytes))),
         "see who uses it: lockstep devices");
}

/// "GPU 0 and GPU 3".
std::string text_of(const devices::GpuPair& pair) { return fmt::format("GPU {} and GPU {}", pair.first, pair.second); }

bool all_by_nvlink(const devices::Gpus& gpus) {
  return !gpus.pairs.empty() && std::ranges::all_of(gpus.pairs, &devices::GpuPair::nvlink);
}

/// Ports of InfiniBand or RoCE that are up: "mlx5_0"; of all, how many there are.
struct RdmaPorts {
  std::vector<std::string> active;
  std::size_t all = 0;
};
RdmaPorts rdma_ports(const View& view) {
  RdmaPorts ports;
  const std::string root = "/sys/class/infiniband";
  for (const auto& card : names_in(view, root))
    for (const auto& port : names_in(view, root + "/" + card + "/ports")) {
      ++ports.all;
      // "4: ACTIVE"
      if (read(view, root + "/" + card + "/ports/" + port + "/state").value_or("").ends_with("ACTIVE"))
        ports.active.push_back(card + (port == "1" ? "" : ":" + port));
    }
  return ports;
}

bool is_on(const View& view, const char* variable) {
  const auto value = view.env(variable);
  return value && !value->empty() && *value != "0";
}

/// NCCL's default order: the memory of the other GPU, of the host, the network (its user guide, "Environment
/// Variables": NCCL_P2P_DISABLE, NCCL_SHM_DISABLE).
std::string way_within_host(const View& view) {
  const bool peers = std::ranges::all_of(view.gpus.pairs, [](const auto& pair) { return pair.reads.value_or(false); });
  if (!is_on(view, "NCCL_P2P_DISABLE")) {
    if (all_by_nvlink(view.gpus)) return "NVLink";
    if (peers) return "PCIe, from GPU to GPU";
  }
  return is_on(view, "NCCL_SHM_DISABLE") ? "the network" : "the host's memory";
}

}  // namespace

void check_gpus(const View& view, RowFindings& report) {
  const std::size_t cards = nvidia_cards(view);
  if (view.gpus.list.empty() && cards == 0) return report.ok("no GPU");
  if (view.gpus.list.empty()) {
    const auto problem = view.gpus.problem.value_or(devices::Problem{"the driver lists none", ""});
    return report.fail(
        fmt::format("{} NVIDIA card{}, and {}", cards, cards == 1 ? " is there" : "s are there", problem.what),
        problem.remedy.empty() ? "install NVIDIA's driver (in a container: docker run --gpus all)" : problem.remedy);
  }
  bool fine = true;
  if (!view.has_cuda)
    report.warn(fmt::format("{} GPUs, and this lockstep was built without CUDA", view.gpus.list.size()),
                "build it where nvcc is found"),
        fine = false;
  for (const auto& gpu : view.gpus.list) check_gpu(gpu, report, fine);
  if (const auto visible = view.env("CUDA_VISIBLE_DEVICES");
      visible && devices::visible_gpus(view.gpus, view.env).empty())
    report.fail(
        fmt::format("CUDA_VISIBLE_DEVICES={} leaves none of {} GPUs", printable(*visible), view.gpus.list.size()),
        "unset it, or name some that lockstep devices shows"),
        fine = false;
  if (fine)
    report.ok(fmt::format("{} GPU{}, driver {}", view.gpus.list.size(), view.gpus.list.size() == 1 ? "" : "s",
                          view.gpus.driver_version.value_or("unknown")));
}

void check_gpu_links(const View& view, RowFindings& report) {
  bool fine = true;
  const auto warn = [&](const std::string& what, const std::string& remedy) {
    report.warn(what, remedy);
    fine = false;
  };
  for (const auto& gpu : view.gpus.list) {
    const std::string name = fmt::format("GPU {}", gpu.index);
    if (gpu.pcie_width && gpu.most_pcie_width && *gpu.pcie_width < *gpu.most_pcie_width)
      warn(fmt::format("{} runs at PCIe x{}, not x{}", name, *gpu.pcie_width, *gpu.most_pcie_width),
           "push the card and its riser in again, or use a slot of full width");
    if (gpu.nvlinks_down > 0)
      warn(fmt::format("{}: {} of {} NVLinks are down", name, gpu.nvlinks_down, gpu.nvlinks_up + gpu.nvlinks_down),
           fmt::format("nvidia-smi nvlink -s -i {}; look at bridges, and at the fabric manager's log", gpu.index));
  }
  std::vector<std::string> apart;
  std::string reason;
  for (const auto& pair : view.gpus.pairs) {
    if (pair.reads.value_or(true)) continue;
    apart.push_back(text_of(pair));
    reason = pair.reason.value_or("");
  }
  if (!apart.empty())
    warn(fmt::format("{}{} do not reach each other's memory ({}): what they exchange passes through the host's",
                     apart.front(), apart.size() == 1 ? "" : fmt::format(", and {} pairs more,", apart.size() - 1),
                     reason),
         "nvidia-smi topo -p2p r; turn off PCIe's ACS and the IOMMU where nobody needs them");
  if (!fine) return;
  if (view.gpus.list.size() < 2) return report.ok("no two GPUs");
  const bool known = std::ranges::all_of(view.gpus.pairs, [](const auto& pair) { return pair.reads.has_value(); });
  if (!known) return report.note("the driver does not say what GPUs reach");
  report.ok(all_by_nvlink(view.gpus) ? "NVLink between all GPUs" : "all GPUs reach each other's memory");
}

void check_nccl(const View& view, RowFindings& report) {
  if (view.gpus.list.empty()) return report.ok("no GPU");
  bool fine = true;
  const RdmaPorts ports = rdma_ports(view);
  const bool off = is_on(view, "NCCL_IB_DISABLE");
  if (view.several_hosts && !off && ports.all > 0 && ports.active.empty())
    report.warn(
        fmt::format("none of {} InfiniBand port{} is active: NCCL uses TCP", ports.all, ports.all == 1 ? "" : "s"),
        "ibstat; look at cables and at the subnet manager"),
        fine = false;
  const bool rdma = !off && !ports.active.empty();
  // With open kernel modules and a recent kernel DMA-BUF does it, too, which nothing under /sys shows.
  if (view.several_hosts && rdma && names_in(view, "/sys/module/nvidia_peermem").empty())
    report.note("nvidia_peermem is not loaded: without DMA-BUF, GPUs' data pass through the host's memory");
  std::vector<std::string> ways;
  if (view.gpus.list.size() > 1) ways.push_back("on this host by " + way_within_host(view));
  if (view.several_hosts)
    ways.push_back(rdma ? "between hosts by RDMA (" + join(ports.active, ", ") + ")" : "between hosts by TCP");
  if (fine) report.ok(ways.empty() ? "one GPU: NCCL moves nothing" : "NCCL will move data " + join(ways, ", "));
}

}  // namespace lockstep::doctor
