#include "cli/commands.h"

#include <cstdio>

#include "devices/machine.h"
#include "devices/read_gpus.h"
#include "options/values.h"

namespace lockstep::cli {

OptionTable devices_options(bool& json) {
  OptionTable table(
      "devices", "Shows this machine's GPUs, who uses them, and its CPU. Values that a card does not report are N/A.");
  table.group("Flags");
  table.add({.name = "json",
             .kind = options::OptionKind::kFlag,
             .help = "print one JSON object instead of the table",
             .value = options::boolean(json)});
  options::add_config_option(table);
  return table;
}

int devices_command(const Sources& sources, const ForeignFlags& foreign) {
  bool json = false;
  const OptionTable table = devices_options(json);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  const devices::Machine machine{.gpus = devices::read_gpus(devices::Detail::kAll), .cpu = devices::read_cpu()};
  std::fputs((json ? devices::json_of(machine) + "\n" : devices::table_of(machine)).c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli
