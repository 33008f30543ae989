// What bench dp-vs-ddp prints.
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "bench/dp_vs_ddp.h"

namespace lockstep::bench {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson json_of(std::optional<double> value) { return value ? OrderedJson(rounded(*value)) : OrderedJson(); }

double moved_by(const Way& way) {
  double bytes = 0;
  for (const DeviceShare& device : way.devices) bytes += device.bytes_in;
  return bytes;
}

OrderedJson json_of(const Way& way) {
  OrderedJson json = {{"step_ms", rounded(way.step_ms)},
                      {"samples_per_s", rounded(way.samples_per_s)},
                      {"peak_memory_bytes", OrderedJson::array()},
                      {"busy_share", OrderedJson::array()},
                      {"bytes_in", OrderedJson::array()},
                      {"bytes_out", OrderedJson::array()},
                      {"bytes_moved", moved_by(way)},
                      {"memory_ratio", json_of(memory_ratio(way))},
                      {"busy_ratio", json_of(busy_ratio(way))}};
  for (const DeviceShare& device : way.devices) {
    json["peak_memory_bytes"].push_back(device.peak_memory_bytes);
    json["busy_share"].push_back(json_of(device.busy));
    json["bytes_in"].push_back(device.bytes_in);
    json["bytes_out"].push_back(device.bytes_out);
  }
  return json;
}

std::string percent(std::optional<double> share) { return share ? fmt::format("{:.1f} %", 100 * *share) : "?"; }
std::string times(std::optional<double> ratio) { return ratio ? fmt::format("{:.2f}", *ratio) : "?"; }

std::string table_of(const DpVsDdpResult& r) {
  std::string text =
      fmt::format("{}: {} samples a step over {}, {} thread{} each\n  {}; {} steps, {} time{} each way\n\n", r.model,
                  r.global_batch, join(r.devices, ", "), r.threads, r.threads == 1 ? "" : "s", r.device, r.steps,
                  r.rounds, r.rounds == 1 ? "" : "s");
  const auto row = [&](const std::string& name, const auto& cell) {
    text += fmt::format("  {:<22}{:>14}{:>14}\n", name, cell(r.dp), cell(r.ddp));
  };
  text += fmt::format("  {:<22}{:>14}{:>14}\n", "", "dp", "ddp");
  row("step", [](const Way& way) { return fmt::format("{:.3f} ms", way.step_ms); });
  row("throughput", [](const Way& way) { return fmt::format("{:.1f}/s", way.samples_per_s); });
  const auto each = [&](const char* what, const auto& cell) {
    for (std::size_t i = 0; i < r.devices.size(); ++i)
      row(fmt::format("{} {}", r.devices[i], what), [&](const Way& way) { return cell(way.devices[i]); });
  };
  each("memory", [](const DeviceShare& d) { return human_bytes(static_cast<double>(d.peak_memory_bytes)); });
  row("largest / smallest", [](const Way& way) { return times(memory_ratio(way)); });
  each("busy", [](const DeviceShare& d) { return percent(d.busy); });
  row("largest / smallest", [](const Way& way) { return times(busy_ratio(way)); });
  each("takes in", [](const DeviceShare& d) { return human_bytes(d.bytes_in); });
  each("sends out", [](const DeviceShare& d) { return human_bytes(d.bytes_out); });
  row("moved a step", [](const Way& way) { return human_bytes(moved_by(way)); });
  return text;
}

}  // namespace

std::string text_of(const DpVsDdpResult& result, Format format) {
  if (format != Format::kJson) return table_of(result);
  const OrderedJson json = {{"model", result.model},
                            {"devices", result.devices},
                            {"device", result.device},
                            {"threads", result.threads},
                            {"global_batch", result.global_batch},
                            {"steps", result.steps},
                            {"rounds", result.rounds},
                            {"dp", json_of(result.dp)},
                            {"ddp", json_of(result.ddp)}};
  return json.dump() + "\n";
}

}  // namespace lockstep::bench
