// What bench dp-vs-ddp prints.
#include <cmath>

#include "base/json.h"
#include "base/text.h"
#include "bench/dp_vs_ddp.h"

namespace lockstep::bench {
namespace {

std::optional<double> rounded_if_known(std::optional<double> value) {
  return value ? std::optional(rounded(*value)) : std::nullopt;
}

double moved_by(const ModeResult& mode) {
  double bytes = 0;
  for (const DeviceShare& device : mode.devices) bytes += device.bytes_in;
  return bytes;
}

JsonObject json_of(const ModeResult& mode) {
  std::vector<JsonText> peaks, busy, in, out;
  for (const DeviceShare& device : mode.devices) {
    peaks.emplace_back(device.peak_memory_bytes);
    busy.emplace_back(rounded_if_known(device.busy));
    in.emplace_back(device.bytes_in);
    out.emplace_back(device.bytes_out);
  }
  return {{"step_ms", rounded(mode.step_ms)},
          {"samples_per_s", rounded(mode.samples_per_s)},
          {"peak_memory_bytes", peaks},
          {"busy_share", busy},
          {"bytes_in", in},
          {"bytes_out", out},
          {"bytes_moved", moved_by(mode)},
          {"memory_ratio", rounded_if_known(memory_ratio(mode))},
          {"busy_ratio", rounded_if_known(busy_ratio(mode))}};
}

std::string percent(std::optional<double> share) { return share ? fmt::format("{:.1f} %", 100 * *share) : "?"; }
std::string times(std::optional<double> ratio) { return ratio ? fmt::format("{:.2f}", *ratio) : "?"; }

std::string table_of(const DpVsDdpResult& r) {
  std::string text =
      fmt::format("{}: {} samples per step over {}, {} thread{} each\n  {}; {} steps, {} round{} per mode\n\n", r.model,
                  r.global_batch, join(r.devices, ", "), r.threads, r.threads == 1 ? "" : "s", r.device, r.steps,
                  r.rounds, r.rounds == 1 ? "" : "s");
  const auto row = [&](const std::string& name, const auto& cell) {
    text += fmt::format("  {:<22}{:>18}{:>14}{:>14}\n", name, cell(r.dp_loss_outside), cell(r.dp), cell(r.ddp));
  };
  text += fmt::format("  {:<22}{:>18}{:>14}{:>14}\n", "", "dp, loss outside", "dp", "ddp");
  row("step", [](const ModeResult& mode) { return fmt::format("{:.3f} ms", mode.step_ms); });
  row("throughput", [](const ModeResult& mode) { return fmt::format("{:.1f}/s", mode.samples_per_s); });
  const auto each = [&](const char* what, const auto& cell) {
    for (std::size_t i = 0; i < r.devices.size(); ++i)
      row(fmt::format("{} {}", r.devices[i], what), [&](const ModeResult& mode) { return cell(mode.devices[i]); });
  };
  each("memory", [](const DeviceShare& d) { return human_bytes(static_cast<double>(d.peak_memory_bytes)); });
  row("largest / smallest", [](const ModeResult& mode) { return times(memory_ratio(mode)); });
  each("busy", [](const DeviceShare& d) { return percent(d.busy); });
  row("largest / smallest", [](const ModeResult& mode) { return times(busy_ratio(mode)); });
  each("takes in", [](const DeviceShare& d) { return human_bytes(d.bytes_in); });
  each("sends out", [](const DeviceShare& d) { return human_bytes(d.bytes_out); });
  row("moved a step", [](const ModeResult& mode) { return human_bytes(moved_by(mode)); });
  return text;
}

}  // namespace

std::string text_of(const DpVsDdpResult& result, Format format) {
  if (format != Format::kJson) return table_of(result);
  const JsonObject json = {{"model", result.model},
                           {"devices", result.devices},
                           {"device", result.device},
                           {"threads", result.threads},
                           {"global_batch", result.global_batch},
                           {"steps", result.steps},
                           {"rounds", result.rounds},
                           {"dp_loss_outside", json_of(result.dp_loss_outside)},
                           {"dp", json_of(result.dp)},
                           {"ddp", json_of(result.ddp)}};
  return json.text() + "\n";
}

}  // namespace lockstep::bench
