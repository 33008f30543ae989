#include "cli/commands.h"

#include <algorithm>
#include <cctype>
#include <cstdio>

#include "base/error.h"
#include "base/text.h"
#include "cli/build_config.h"
#include "devices/read_gpus.h"
#include "devices/visible.h"
#include "launcher/launch.h"
#include "launcher/rank_status.h"
#include "lockstep/base/env.h"
#include "options/values.h"

namespace lockstep::cli {
namespace {

using options::boolean;
using options::choice;
using options::Complaint;
using options::number;
using options::OptionKind;
using options::ParsedOptions;
using options::Setter;
using options::text;

/// "auto" (stored as 0) or a number of ranks.
Setter rank_count(int& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    std::int64_t value = 0;
    if (text != "auto") {
      if (auto complaint = options::parse_integer(text, 1, launcher::kMaxRanks, value))
        return Complaint{complaint->what, complaint->remedy + ", or auto"};
    }
    target = static_cast<int>(value);
    return std::nullopt;
  };
}

/// By flag or environment; a launcher cannot know the program's other settings (a config file).
bool uses_cpu(std::span<const std::string> program, const EnvLookup& lookup) {
  std::string device = lookup("LOCKSTEP_DEVICE").value_or("");
  for (std::size_t i = 0; i < program.size(); ++i) {
    if (program[i].starts_with("--device=")) device = program[i].substr(program[i].find('=') + 1);
    if (program[i] == "--device" && i + 1 < program.size()) device = program[i + 1];
  }
  return device == "cpu" || device.starts_with("cpu:");
}

/// NAME or NAME=VALUE, separated by commas.
Setter exports(std::vector<std::string>& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    for (auto& word : split(text, ',')) {
      const std::string name = word.substr(0, word.find('='));
      const bool letters =
          std::ranges::all_of(name, [](unsigned char c) { return (std::isalnum(c) != 0 && c < 0x80) || c == '_'; });
      if (name.empty() || !letters || std::isdigit(static_cast<unsigned char>(name[0])) != 0)
        return Complaint{fmt::format("'{}' is no name of a variable", name),
                         "give NAME or NAME=VALUE; where the value has a comma, set it before and give NAME"};
      target.push_back(std::move(word));
    }
    return std::nullopt;
  };
}

constexpr bool kUsesGpus = !std::string_view(kCudaToolkit).empty();

int count_gpus(std::span<const std::string> program) {
  return kUsesGpus ? ranks_for_gpus(devices::read_gpus(devices::Detail::kChoice), program, env) : 0;
}

}  // namespace

int host_command() { return launcher::host_helper(count_gpus({})); }

int ranks_for_gpus(const devices::Gpus& gpus, std::span<const std::string> program, const EnvLookup& lookup) {
  if (uses_cpu(program, lookup)) return 0;
  const auto visible = devices::visible_gpus(gpus, lookup);
  if (std::ranges::any_of(visible, [](const auto& gpu) { return gpu.mig.has_value(); })) return 1;
  return static_cast<int>(std::ranges::count_if(visible, [](const auto& gpu) { return !gpu.prohibited; }));
}

namespace {

void add_host_options(OptionTable& table, launcher::LaunchOptions& options) {
  table.add({.name = "hosts",
             .synonyms = {"host", "H"},
             .kind = OptionKind::kList,
             .placeholder = "a:4,b:4",
             .help = "hosts to run on, and how many ranks each takes; without a number as many as -n auto starts there",
             .value = [&options](const std::string& list) {
               options.hosts = launcher::parse_hosts(list);
               return std::nullopt;
             }});
  table.add({.name = "hostfile",
             .synonyms = {"machinefile"},
             .placeholder = "FILE",
             .help = "file with one host per line, as HOST, HOST slots=N or HOST:N",
             .value = [&options](const std::string& path) {
               options.hosts = launcher::read_hostfile(path);
               return std::nullopt;
             }});
  table.exclusive({"hosts", "hostfile"});
  table.add(
      {.name = "host-timeout-seconds",
       .placeholder = "S",
       .help = "time without a word from a host after which it is taken for lost, in seconds",
       .default_text = fmt::to_string(options.host_seconds),
       .value = number(options.host_seconds, {.low = launcher::kLeastHostSeconds, .high = launcher::kMaxHostSeconds})});
  table.add({.name = "export",
             .synonyms = {"x"},
             .kind = OptionKind::kRepeatable,
             .placeholder = "NAME[=VALUE],…",
             .help =
                 "environment variables that go along to other hosts, besides LOCKSTEP_*, NCCL_*, OMP_*; with a VALUE, "
                 "they are set here too",
             .value = exports(options.exports)});
}

}  // namespace

OptionTable launch_options(launcher::LaunchOptions& options) {
  OptionTable table("launch",
                    "Starts PROGRAM as N ranks on this machine, or on several hosts, watches them, and ends with the "
                    "exit code of the rank that failed first.");
  table.takes_program();
  table.group("Flags");
  table.add({.name = "np",
             .synonyms = {"n", "nproc-per-node"},
             .placeholder = "N|auto",
             .help = "ranks; auto: one for each visible GPU, or for each core where there is none or the program "
                     "has --device cpu; on several hosts: as many as these have slots",
             .default_text = "auto",
             .value = rank_count(options.ranks)});
  add_host_options(table, options);
  table.add({.name = "bind-to",
             .placeholder = "core|socket|none",
             .help = "what each rank's threads stay on",
             .default_text = "core",
             .value = choice(options.bind_to, {{"core", launcher::BindTo::kCore},
                                               {"socket", launcher::BindTo::kSocket},
                                               {"none", launcher::BindTo::kNone}})});
  table.add({.name = "log-dir",
             .placeholder = "DIR",
             .help = "directory for one log file per rank",
             .value = text(options.log_dir)});
  table.add(
      {.name = "grace-seconds",
       .placeholder = "S",
       .help = "time that ranks have to end by themselves once asked to, in seconds",
       .default_text = fmt::format("{}; {} and two steps where they save a checkpoint",
                                   launcher::RankStatus::kGraceSeconds, launcher::RankStatus::kSavingGraceSeconds),
       .value = number(options.grace_seconds, {.low = 0, .high = launcher::kMaxGraceSeconds})});
  table.add({.name = "no-prefix",
             .kind = OptionKind::kFlag,
             .help = "do not put the rank before each output line",
             .value = boolean(options.no_prefix)});
  options::add_config_option(table);
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
  // NAME=VALUE is for the ranks here too.
  for (const auto& each : options.exports)
    if (const auto equals = each.find('='); equals != std::string::npos)
      set_env(each.substr(0, equals), each.substr(equals + 1));
  // Set for mpirun by a Kubernetes MPIJob, for example.
  if (const auto file = env("OMPI_MCA_orte_default_hostfile"); file && !file->empty() && options.hosts.empty())
    options.hosts = launcher::read_hostfile(*file);
  options.use_gpus = kUsesGpus && !uses_cpu(options.program, env);
  options.count_own_gpus = [&options] { return count_gpus(options.program); };
  if (options.ranks == 0 && options.hosts.empty()) options.ranks = count_gpus(options.program);
  return launcher::launch(options);
}

}  // namespace lockstep::cli
