#include "cli/launch_command.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "cli/values.h"
#include "devices/read_gpus.h"
#include "devices/visible.h"
#include "launcher/launch.h"

namespace lockstep::cli {
namespace {

/// "auto" (stored as 0) or a number of ranks.
Setter rank_count(int& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    std::int64_t value = 0;
    if (text != "auto") {
      if (auto complaint = parse_integer(text, 1, launcher::kMaxRanks, value))
        return Complaint{complaint->what, complaint->remedy + ", or auto"};
    }
    target = static_cast<int>(value);
    return std::nullopt;
  };
}

/// GPUs that this environment lets a process see; 0 leaves it to the launcher, which counts cores.
int visible_gpu_count(const EnvLookup& lookup) {
  const auto visible = devices::visible_gpus(devices::read_gpus(devices::Detail::kChoice), lookup);
  return std::min(static_cast<int>(visible.size()), launcher::kMaxRanks);
}

}  // namespace

OptionTable launch_options(launcher::LaunchOptions& options) {
  OptionTable table("launch",
                    "Starts PROGRAM as N ranks on this machine, watches them, and ends with the exit code of the rank "
                    "that failed first.");
  table.takes_program();
  table.group("Flags");
  table.add({.name = "np",
             .synonyms = {"n", "nproc-per-node"},
             .placeholder = "N|auto",
             .help = "ranks; auto: one for each GPU, or for each core where there is none",
             .default_text = "auto",
             .set = rank_count(options.ranks)});
  table.add({.name = "bind-to",
             .placeholder = "core|socket|none",
             .help = "what each rank's threads stay on",
             .default_text = "core",
             .set = choice(options.bind_to, {{"core", launcher::BindTo::kCore},
                                             {"socket", launcher::BindTo::kSocket},
                                             {"none", launcher::BindTo::kNone}})});
  table.add({.name = "log-dir",
             .placeholder = "DIR",
             .help = "directory for one log file a rank",
             .set = text(options.log_dir)});
  table.add({.name = "grace-seconds",
             .placeholder = "S",
             .help = "time that ranks have to end by themselves once asked to, in seconds",
             .default_text = fmt::to_string(options.grace_seconds),
             .set = number(options.grace_seconds, {.low = 0, .high = launcher::kMaxGraceSeconds})});
  table.add({.name = "no-prefix",
             .kind = OptionKind::kFlag,
             .help = "do not put the rank before each output line",
             .set = boolean(options.no_prefix)});
  add_config_option(table);
  return table;
}

int launch_command(const Sources& sources, const ForeignFlags& foreign) {
  launcher::LaunchOptions options;
  const OptionTable table = launch_options(options);
  ParsedOptions parsed = parse_options(table, sources, foreign);
  if (parsed.help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  if (parsed.program.empty())
    throw UsageError("lockstep launch needs a program", "put it after --: lockstep launch -n 2 -- lockstep train …");
  options.program = std::move(parsed.program);
  if (options.ranks == 0) options.ranks = visible_gpu_count(sources.env);
  return launcher::launch(options);
}

}  // namespace lockstep::cli
