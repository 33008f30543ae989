#include "cli/commands.h"

#include <algorithm>
#include <cctype>
#include <cstdio>

#include "base/error.h"
#include "base/text.h"
#include "cli/build_config.h"
#include "comm/backends.h"
#include "devices/nvml.h"
#include "devices/visible.h"
#include "launcher/launch.h"
#include "launcher/mpirun_command.h"
#include "launcher/own_ranks.h"
#include "launcher/rank_status.h"
#include "lockstep/base/env.h"
#include "options/values.h"
#include "trainer/options.h"

namespace lockstep::cli {
namespace {

using options::boolean;
using options::choice;
using options::Complaint;
using options::integer;
using options::number;
using options::OptionKind;
using options::ParsedOptions;
using options::Setter;
using options::text;

/// "auto" (stored as 0), a number of ranks, or what torchrun calls one for each "gpu" or "cpu".
Setter rank_count(launcher::LaunchOptions& options) {
  return [&options](const std::string& text) -> std::optional<Complaint> {
    std::int64_t value = 0;
    if (text != "auto" && text != "gpu" && text != "cpu") {
      if (auto complaint = options::parse_integer(text, 1, launcher::kMaxRanks, value))
        return Complaint{complaint->what, complaint->remedy + ", or auto, gpu or cpu"};
    }
    options.ranks = static_cast<int>(value);
    options.ranks_for = text == "gpu"   ? launcher::RanksFor::kGpus
                        : text == "cpu" ? launcher::RanksFor::kCores
                                        : launcher::RanksFor::kAny;
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

/// Of the one backend that has processes joined by what has started them: --backend and the launcher's flag for it.
const std::string& mpi_name() {
  const auto& families = comm::backend_families();
  return (*std::ranges::find_if(families, [](const auto* family) { return family->start != nullptr; }))->name;
}

/// As uses_cpu().
bool uses_mpi(std::span<const std::string> program, const EnvLookup& lookup) {
  std::string backend = lookup("LOCKSTEP_BACKEND").value_or("");
  for (std::size_t i = 0; i < program.size(); ++i) {
    if (program[i].starts_with("--backend=")) backend = program[i].substr(program[i].find('=') + 1);
    if (program[i] == "--backend" && i + 1 < program.size()) backend = program[i + 1];
  }
  return backend == mpi_name();
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

void add_restart_options(OptionTable& table, launcher::LaunchOptions& options) {
  table.add({.name = "max-restarts",
             .placeholder = "K",
             .help = "how often to restart the job from its newest checkpoint after a failure",
             .default_text = "0",
             .value = integer(options.max_restarts, 0, launcher::kMaxRestarts)});
  table.add({.name = "in-place",
             .kind = OptionKind::kFlag,
             .help = "with --max-restarts, of lockstep train on CPUs: ranks that others outlive are replaced, and the "
                     "job continues from the others' memory",
             .value = boolean(options.in_place)});
  table.add({.name = "min-ranks",
             .placeholder = "M",
             .help = "after two failures in a row without a new checkpoint, restart with one rank fewer, down to M; "
                     "without this flag always with as many",
             .value = integer(options.min_ranks, 1, launcher::kMaxRanks)});
  table.add({.name = mpi_name(),
             .kind = OptionKind::kFlag,
             .help = "start the ranks by mpirun; all programs but lockstep itself are started by it anyway",
             .value = boolean(options.mpi)});
}

void add_host_options(OptionTable& table, launcher::LaunchOptions& options) {
  add_hosts(table, "a:4,b:4",
            "hosts to run on, and the number of ranks on each; without a number as many as -n auto starts there",
            [&options](std::vector<launcher::HostSpec> hosts) { options.hosts = std::move(hosts); });
  table.add(
      {.name = "host-timeout-seconds",
       .placeholder = "S",
       .help = "seconds without a message from a host before it counts as lost",
       .default_text = fmt::to_string(options.host_seconds),
       .value = number(options.host_seconds, {.low = launcher::kLeastHostSeconds, .high = launcher::kMaxHostSeconds})});
  table.add({.name = "host-return-seconds",
             .placeholder = "S",
             .help = "with --max-restarts, how many seconds to wait for hosts if too few are left for the ranks",
             .default_text = fmt::to_string(launcher::kHostReturnSeconds),
             .value = number(options.host_return_seconds, {.low = 0, .high = launcher::kMaxHostReturnSeconds})});
  table.add({.name = "export",
             .synonyms = {"x"},
             .kind = OptionKind::kRepeatable,
             .placeholder = "NAME[=VALUE],…",
             .help = "environment variables to pass to other hosts, besides LOCKSTEP_*, NCCL_*, OMP_*; with a VALUE, "
                     "they are set here too",
             .value = exports(options.exports)});
}

/// How many there will be; 0 where that is for other hosts to say.
int ranks_of(const launcher::LaunchOptions& options) {
  if (options.ranks > 0) return options.ranks;
  if (options.hosts.empty()) return launcher::usable_cores();
  int slots = 0;
  for (const auto& host : options.hosts) {
    if (host.slots == 0) return 0;
    slots += host.slots;
  }
  return slots;
}

/// What a restart needs: a checkpoint to resume from, by the same command. `train` is what follows `lockstep train`.
void check_restarts_of_train(launcher::LaunchOptions& options, std::vector<std::string> launch_flags,
                             std::vector<std::string> train, ForeignFlags foreign) {
  for (auto& name : launch_flags) foreign.emplace(std::move(name), "launch");
  trainer::TrainConfig config;
  try {
    if (parse_options(trainer::train_options(config), options::process_sources(std::move(train)), foreign).help) return;
  } catch (const UsageError&) {
    return;  // the ranks say it
  }
  const std::string flag = fmt::format("--max-restarts {}", options.max_restarts);
  if (config.checkpoint_dir.empty())
    throw UsageError(flag + ": this lockstep train writes no checkpoint to restart from",
                     "add --checkpoint-dir DIR --resume auto to it, and --checkpoint-every STEPS");
  if (config.resume != "auto")
    throw UsageError(flag + ": this lockstep train does not resume from its newest checkpoint",
                     "add --resume auto to it");
  options.checkpoint_dir = config.checkpoint_dir;
  const int ranks = ranks_of(options);
  if (!options.min_ranks || config.global_batch || config.shards > 0 || (ranks > 0 && *options.min_ranks >= ranks))
    return;
  const bool known = ranks > 0;
  throw UsageError(fmt::format("--min-ranks {}: with fewer{} ranks this lockstep train has another global batch, so it "
                               "cannot resume its checkpoints",
                               *options.min_ranks, known ? fmt::format(" than {}", ranks) : ""),
                   fmt::format("add --global-batch {} to it (with --shards V the result has the same bits, too)",
                               known ? fmt::to_string(trainer::global_batch_of(config, ranks)) : "G"));
}

bool is_one(const std::string& value) { return value == "1" || value == "1:1"; }
bool is_zero(const std::string& value) { return value == "0"; }
bool always(const std::string&) { return true; }

// torchrun's, horovodrun's and mpirun's, which do not exist here.
void add_other_launchers_flags(OptionTable& table) {
  const std::string hosts =
      "name the hosts, and type it on one of them: lockstep launch --hosts a:4,b:4 -- PROGRAM ARGS…";
  table.add(options::OtherProgramsFlag{.names = {"nnodes"},
                                       .why = "one command starts the ranks of all hosts",
                                       .remedy = hosts,
                                       .is_done_anyway = is_one});
  table.add(options::OtherProgramsFlag{.names = {"node-rank"},
                                       .why = "one command starts the ranks of all hosts",
                                       .remedy = hosts,
                                       .is_done_anyway = is_zero});
  table.add(options::OtherProgramsFlag{
      .names = {"master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr"},
      .why = "the ranks of lockstep launch find each other through it",
      .remedy = "leave it out; on several hosts: --hosts a:4,b:4"});
  table.add(options::OtherProgramsFlag{.names = {"standalone"},
                                       .why = "that is so without --hosts",
                                       .remedy = "leave it out",
                                       .takes_value = false,
                                       .is_done_anyway = always});
  table.add(options::OtherProgramsFlag{.names = {"no-python"},
                                       .why = "programs are started as they are",
                                       .remedy = "leave it out",
                                       .takes_value = false,
                                       .is_done_anyway = always});
  table.add(options::OtherProgramsFlag{.names = {"module", "m"},
                                       .why = "programs are started as they are",
                                       .remedy = "lockstep launch -n 2 -- python3 -m MODULE"});
  table.add(options::OtherProgramsFlag{.names = {"redirects", "r", "tee", "t", "output-filename"},
                                       .why = "each line is printed with its rank before it",
                                       .remedy = "--log-dir DIR writes one file per rank, too"});
  table.add(
      options::OtherProgramsFlag{.names = {"max-np", "host-discovery-script"},
                                 .why = "a job has at most the ranks that it has been started with",
                                 .remedy = "start it with -n, and again with another -n: checkpoints fit any number"});
  table.add(options::OtherProgramsFlag{.names = {"min-np"},
                                       .why = "only a job that is restarted may lose ranks",
                                       .remedy = "--max-restarts K --min-ranks M"});
  table.add(options::OtherProgramsFlag{.names = {"network-interface", "network-interfaces", "nics"},
                                       .why = "the network is chosen by the address of the first host",
                                       .remedy = "LOCKSTEP_SOCKET_IFNAME=eth0 chooses another one"});
  table.add(options::OtherProgramsFlag{
      .names = {"gloo"},
      .why = "the program chooses how collectives are carried",
      .remedy = "leave it out, or choose another one: lockstep launch -n 2 -- lockstep train … --backend B",
      .takes_value = false});
  table.add(options::OtherProgramsFlag{.names = {"oversubscribe", "allow-run-as-root", "use-hwthread-cpus"},
                                       .why = "that is allowed without it",
                                       .remedy = "leave it out",
                                       .takes_value = false,
                                       .is_done_anyway = always});
  table.add(options::OtherProgramsFlag{.names = {"map-by", "rank-by", "mca", "npernode", "ppr"},
                                       .why = "it is a flag of mpirun",
                                       .remedy = "--bind-to core|socket|none, and --hosts a:4,b:4 for ranks per host; "
                                                 "or mpirun itself: mpirun -np 2 lockstep train …"});
}

}  // namespace

void add_hosts(OptionTable& table, const std::string& placeholder, const std::string& help,
               const std::function<void(std::vector<launcher::HostSpec> hosts)>& take) {
  table.add({.name = "hosts",
             .synonyms = {"host", "H"},
             .kind = OptionKind::kList,
             .placeholder = placeholder,
             .help = help,
             .value = [take](const std::string& list) {
               take(launcher::parse_hosts(list));
               return std::nullopt;
             }});
  table.add({.name = "hostfile",
             .synonyms = {"machinefile"},
             .placeholder = "FILE",
             .help = "file with one host per line, as HOST, HOST slots=N or HOST:N",
             .value = [take](const std::string& path) {
               take(launcher::read_hostfile(path));
               return std::nullopt;
             }});
  table.exclusive({"hosts", "hostfile"});
}

OptionTable launch_options(launcher::LaunchOptions& options) {
  OptionTable table("launch",
                    "Starts PROGRAM as N ranks on this machine or on several hosts, watches them, and ends with the "
                    "exit code of the rank that failed first.");
  table.takes_program();
  table.group("Flags");
  table.add({.name = "np",
             .synonyms = {"n", "nproc-per-node"},
             .placeholder = "N|auto|gpu|cpu",
             .help =
                 "ranks; auto: one per visible GPU, or per core if there is no GPU or the program has --device cpu; on "
                 "several hosts: one per slot; gpu: one per visible GPU, an error if there is none; cpu: one per core",
             .default_text = "auto",
             .value = rank_count(options)});
  add_host_options(table, options);
  table.add({.name = "bind-to",
             .placeholder = "core|socket|none",
             .help = "what each rank's threads are bound to",
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
       .help = "seconds that ranks have to end by themselves after a request",
       .default_text = fmt::format("{}; {} and two steps if they save a checkpoint",
                                   launcher::RankStatus::kGraceSeconds, launcher::RankStatus::kSavingGraceSeconds),
       .value = number(options.grace_seconds, {.low = 0, .high = launcher::kMaxGraceSeconds})});
  table.add({.name = "no-prefix",
             .kind = OptionKind::kFlag,
             .help = "do not put the rank before each output line",
             .value = boolean(options.no_prefix)});
  add_restart_options(table, options);
  options::add_config_option(table);
  add_other_launchers_flags(table);
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
  options.mpi = options.mpi || uses_mpi(options.program, env);
  // NAME=VALUE is for the ranks here too.
  for (const auto& each : options.exports)
    if (const auto equals = each.find('='); equals != std::string::npos)
      set_env(each.substr(0, equals), each.substr(equals + 1));
  // Set for mpirun by a Kubernetes MPIJob, for example.
  if (const auto file = env("OMPI_MCA_orte_default_hostfile"); file && !file->empty() && options.hosts.empty())
    options.hosts = launcher::read_hostfile(*file);
  const bool is_train = options.program.size() > 1 && options.program[1] == "train" &&
                        launcher::is_own_binary(options.program[0], "/proc/self/exe");
  if (options.max_restarts > 0 && is_train)
    check_restarts_of_train(options, table.names(), {options.program.begin() + 2, options.program.end()}, foreign);
  options.use_gpus = kUsesGpus && !uses_cpu(options.program, env) && options.ranks_for != launcher::RanksFor::kCores;
  options.count_own_gpus = [&options] { return count_gpus(options.program); };
  if (options.ranks == 0 && options.hosts.empty() && options.use_gpus) options.ranks = count_gpus(options.program);
  if (options.ranks_for == launcher::RanksFor::kGpus && options.ranks == 0 && options.hosts.empty())
    throw UsageError("-n gpu: there is no GPU here that the program may use", "give a number of ranks, or -n auto");
  return launcher::launch(options);
}

}  // namespace lockstep::cli
