#include "cli/commands.h"

#include <cstdio>

#include "base/resource_limits.h"
#include "bench/ceilings.h"
#include "devices/binding.h"
#include "devices/machine.h"
#include "devices/nvml.h"
#include "options/values.h"

namespace lockstep::cli {

OptionTable devices_options(DevicesOptions& options) {
  OptionTable table(
      "devices", "Shows this machine's GPUs, who uses them, and its CPU. Values that a card does not report are N/A.");
  table.group("Flags");
  table.add({.name = "json",
             .kind = options::OptionKind::kFlag,
             .help = "print one JSON object instead of the table",
             .value = options::boolean(options.json)});
  table.add(
      {.name = "measure",
       .kind = options::OptionKind::kFlag,
       .help = "also measure each device's copy bandwidth and its rate of matrix products, about a second per device",
       .value = options::boolean(options.measure)});
  options::add_config_option(table);
  return table;
}

int devices_command(const Sources& sources, const ForeignFlags& foreign) {
  DevicesOptions options;
  const OptionTable table = devices_options(options);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  devices::Machine machine{.gpus = devices::read_gpus(devices::Detail::kAll), .cpu = devices::read_cpu()};
  if (options.measure)
    machine.measured =
        bench::measure_machine(nn::obtainable_threads(threads_within(cpu_quota(), devices::expected_cores(1))));
  std::fputs((options.json ? devices::json_of(machine) + "\n" : devices::table_of(machine)).c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli
