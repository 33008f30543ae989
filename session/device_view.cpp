#include "session/device_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/json_value.h"
#include "base/kernel.h"
#include "base/text.h"
#include "devices/visible.h"
#include "lockstep/base/env.h"

namespace lockstep::session {
namespace {

using Json = nlohmann::json;

const devices::Gpu* at_bus_id(const devices::Gpus& gpus, const std::string& bus_id) {
  const auto found = std::ranges::find_if(gpus.list, [&](const devices::Gpu& gpu) {
    return !gpu.problem && gpu.bus_id && plain_bus_id(*gpu.bus_id) == bus_id;
  });
  return bus_id.empty() || found == gpus.list.end() ? nullptr : &*found;
}

void describe(VisibleGpu& seen, const devices::Gpu& gpu, std::span<const devices::VisibleDevice> visible) {
  using devices::ComputeMode;
  seen.name = gpu.name.value_or("");
  if (gpu.uuid) seen.id = *gpu.uuid;
  if (gpu.memory) seen.free_bytes = gpu.memory->free_bytes;
  seen.prohibited = gpu.compute_mode == ComputeMode::kProhibited;
  seen.exclusive =
      gpu.compute_mode == ComputeMode::kExclusiveProcess || gpu.compute_mode == ComputeMode::kExclusiveThread;
  if (!gpu.mig.value_or(false)) return;
  // Of all MIG devices that it may see, CUDA shows a process the first one.
  const auto part = std::ranges::find_if(
      visible, [&](const devices::VisibleDevice& device) { return device.gpu == gpu.index && device.mig; });
  if (part == visible.end()) return;
  seen.id = part->id;
  seen.name += fmt::format(" MIG {}", *part->mig);
  seen.free_bytes = part->free_bytes;
}

Json json_of(const VisibleGpu& gpu) {
  Json json = {{"id", gpu.id}, {"bus_id", gpu.bus_id}, {"name", gpu.name}};
  if (gpu.free_bytes) json["free_bytes"] = *gpu.free_bytes;
  if (gpu.prohibited) json["prohibited"] = true;
  if (gpu.exclusive) json["exclusive"] = true;
  return json;
}

VisibleGpu gpu_of(const Json& json) {
  VisibleGpu gpu;
  gpu.id = json.at("id");
  gpu.bus_id = json.at("bus_id");
  gpu.name = json.at("name");
  if (json.contains("free_bytes")) gpu.free_bytes = json.at("free_bytes").get<std::int64_t>();
  gpu.prohibited = json.value("prohibited", false);
  gpu.exclusive = json.value("exclusive", false);
  return gpu;
}

}  // namespace

std::string plain_bus_id(std::string id) {
  id = lower_case(std::move(id));
  while (id.find(':') != std::string::npos && id.find(':') > 4 && id.front() == '0') id.erase(0, 1);
  return id;
}

std::string to_string(const VisibleGpu& gpu, int index) {
  const std::string comma = gpu.name.empty() || gpu.bus_id.empty() ? "" : ", ";
  const std::string about = gpu.name + comma + gpu.bus_id;
  return about.empty() ? fmt::format("GPU {}", index) : fmt::format("GPU {} ({})", index, about);
}

VisibleGpus list_visible_gpus(const CudaProbe& cuda, const devices::Gpus& nvml, const EnvLookup& lookup,
                              const std::string& machine) {
  VisibleGpus found;
  found.problem = cuda.problem;
  found.remedy = cuda.remedy;
  const auto visible = devices::visible_gpus(nvml, lookup);
  found.machine_has_gpus = cuda.devices > 0 || !visible.empty();
  for (int index = 0; index < cuda.devices; ++index) {
    VisibleGpu seen;
    if (const auto at = static_cast<std::size_t>(index); at < cuda.bus_ids.size())
      seen.bus_id = plain_bus_id(cuda.bus_ids[at]);
    if (const auto* gpu = at_bus_id(nvml, seen.bus_id)) describe(seen, *gpu, visible);
    if (seen.id.empty())
      seen.id = fmt::format("{} of {}", seen.bus_id.empty() ? fmt::format("cuda:{}", index) : seen.bus_id, machine);
    found.gpus.push_back(std::move(seen));
  }
  if (nvml.problem)
    found.memory_problem = nvml.problem->what;
  else if (std::ranges::none_of(found.gpus, [](const VisibleGpu& gpu) { return gpu.free_bytes.has_value(); }))
    found.memory_problem = "NVML does not report it";
  return found;
}

std::string encode(const RankView& view) {
  Json gpus = Json::array();
  for (const auto& gpu : view.visible.gpus) gpus.push_back(json_of(gpu));
  const Json json = {{"machine", view.machine},
                     {"host", view.host},
                     {"local_rank", view.local_rank},
                     {"device", view.device},
                     {"share", view.share_devices},
                     {"all", view.all_devices},
                     {"gpus", std::move(gpus)},
                     {"problem", view.visible.problem},
                     {"remedy", view.visible.remedy},
                     {"memory_problem", view.visible.memory_problem},
                     {"machine_has_gpus", view.visible.machine_has_gpus}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

RankView decode_view(const std::string& text) {
  const Json json = parse_json(text, /*deepest=*/3);
  RankView view;
  view.machine = json.at("machine");
  view.host = json.at("host");
  view.local_rank = json.at("local_rank");
  view.device = json.at("device");
  view.share_devices = json.at("share");
  view.all_devices = json.at("all");
  for (const auto& gpu : json.at("gpus")) view.visible.gpus.push_back(gpu_of(gpu));
  view.visible.problem = json.at("problem");
  view.visible.remedy = json.at("remedy");
  view.visible.memory_problem = json.at("memory_problem");
  view.visible.machine_has_gpus = json.at("machine_has_gpus");
  return view;
}

std::string machine_id() {
  const std::string boot = boot_id();
  return boot.empty() ? host_name() : boot;
}

}  // namespace lockstep::session
