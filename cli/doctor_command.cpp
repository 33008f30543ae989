#include <cstdio>
#include <string_view>

#include "base/status_report.h"
#include "cli/build_config.h"
#include "cli/commands.h"
#include "comm/backends.h"
#include "launcher/launch.h"
#include "options/values.h"

namespace lockstep::cli {

using options::OptionKind;

OptionTable doctor_options(DoctorCommand& command) {
  OptionTable table(
      "doctor",
      "Looks for what would make jobs fail or slow: limits, memory, processors, network, disk, GPUs, and the "
      "environment; with --hosts also at what hosts have in common and at the links between them.");
  table.group("Flags");
  add_hosts(table, "a,b", "hosts to look at, one process on each, as lockstep launch starts them",
            [&command](std::vector<launcher::HostSpec> hosts) { command.hosts = std::move(hosts); });
  table.add({.name = "dir",
             .placeholder = "DIR",
             .help = "directory whose disk is looked at: that of checkpoints and data",
             .default_text = "the working directory",
             .value = options::text(command.doctor.directory)});
  table.add({.name = "timeout-seconds",
             .placeholder = "S",
             .help = "longest wait for another host, in seconds",
             .default_text = fmt::to_string(command.doctor.timeout_seconds),
             .value = options::number(command.doctor.timeout_seconds,
                                      {.low = 0, .high = comm::kMostTimeoutSeconds, .open_low = true})});
  table.add({.name = "all",
             .kind = OptionKind::kFlag,
             .help = "also list what is all right",
             .value = options::boolean(command.doctor.all)});
  table.add({.name = "json",
             .kind = OptionKind::kFlag,
             .help = "print one JSON object",
             .value = options::boolean(command.doctor.json)});
  options::add_config_option(table);
  return table;
}

int doctor_command(const Sources& sources, const ForeignFlags& foreign) {
  DoctorCommand command;
  const OptionTable table = doctor_options(command);
  std::optional<UsageError> refusal;
  if (parse_or_refuse(table, sources, foreign, refusal)) return 0;
  const auto& doctor = command.doctor;
  if (!refusal && !command.hosts.empty()) {
    launcher::LaunchOptions launch;
    launch.hosts = command.hosts;
    for (auto& host : launch.hosts) host.slots = 1;
    launch.no_prefix = true;
    launch.program = {
        "lockstep", "doctor", "--dir", doctor.directory, "--timeout-seconds", fmt::to_string(doctor.timeout_seconds)};
    if (doctor.all) launch.program.emplace_back("--all");
    if (doctor.json) launch.program.emplace_back("--json");
    return launcher::launch(launch);
  }
  if (doctor.json) report_status({.kind = StatusReport::Kind::kDataOnStdout});
  return doctor::run_doctor(doctor, !std::string_view(kCudaToolkit).empty(), refusal);
}

}  // namespace lockstep::cli
