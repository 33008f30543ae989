#include "cli/launch_command.h"

#include <algorithm>
#include <cstdio>

#include "base/env.h"
#include "base/error.h"
#include "cli/build_config.h"
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

}  // namespace

int ranks_for_gpus(const devices::Gpus& gpus, std::span<const std::string> program, const EnvLookup& lookup) {
  std::string device = lookup("LOCKSTEP_DEVICE").value_or("");
  for (std::size_t i = 0; i < program.size(); ++i) {
    if (program[i].starts_with("--device=")) device = program[i].substr(program[i].find('=') + 1);
    if (program[i] == "--device" && i + 1 < program.size()) device = program[i + 1];
  }
  if (device == "cpu") return 0;
  const auto visible = devices::visible_gpus(gpus, lookup);
  if (std::ranges::any_of(visible, [](const auto& gpu) { return gpu.mig.has_value(); })) return 1;
  return static_cast<int>(std::ranges::count_if(visible, [](const auto& gpu) { return !gpu.prohibited; }));
}

OptionTable launch_options(launcher::LaunchOptions& options) {
  OptionTable table("launch",
                    "Starts PROGRAM as N ranks on this machine, watches them, and ends with the exit code of the rank "
                    "that failed first.");
  table.takes_program();
  table.group("Flags");
  table.add({.name = "np",
             .synonyms = {"n", "nproc-per-node"},
             .placeholder = "N|auto",
             .help = "ranks; auto: one for each visible GPU, or for each core where there is none or the program "
                     "is told --device cpu",
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
  constexpr bool kUsesGpus = !std::string_view(kCudaToolkit).empty();
  if (options.ranks == 0 && kUsesGpus)
    options.ranks = ranks_for_gpus(devices::read_gpus(devices::Detail::kChoice), options.program, env);
  return launcher::launch(options);
}

}  // namespace lockstep::cli
