// The subcommands, each in the file of its name: the tables of their flags, whose targets must outlive them, and what
// runs them. They return the exit code.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "bench/collectives.h"
#include "bench/dp_vs_ddp.h"
#include "bench/scaling.h"
#include "bench/step.h"
#include "devices/machine.h"
#include "doctor/doctor.h"
#include "launcher/options.h"
#include "lockstep/base/env.h"
#include "lockstep/base/function_ref.h"
#include "options/sources.h"
#include "options/table.h"
#include "simulate/simulate.h"

namespace lockstep::cli {

using options::ForeignFlags;
using options::OptionTable;
using options::Sources;

/// lockstep train, eval, infer and `export onnx`: what they take is the trainer's and inference's to say
/// (trainer/options.h, inference/infer.h, inference/export.h).
int train_command(const Sources& sources, const ForeignFlags& foreign);
int eval_command(const Sources& sources, const ForeignFlags& foreign);
int infer_command(const Sources& sources, const ForeignFlags& foreign);
int export_command(const Sources& sources, const ForeignFlags& foreign);

/// lockstep bench: what the ranks can do, measured. `lockstep bench allreduce …` and other collectives, `lockstep bench
/// step MODEL …`, `lockstep bench dp-vs-ddp MODEL …` or `lockstep bench scaling …`.
OptionTable bench_collective_options(bench::CollectiveOptions& options);
OptionTable bench_step_options(bench::StepOptions& options);
OptionTable bench_dp_vs_ddp_options(bench::DpVsDdpOptions& options);
OptionTable bench_scaling_options(bench::ScalingOptions& options);
int bench_scaling_command(bench::ScalingOptions& options, const OptionTable& table, const Sources& sources,
                          const ForeignFlags& foreign);
/// Some of `all`, with commas.
options::Setter names_of(std::vector<std::string>& target, const std::vector<std::string>& all);
/// Calls `visit` with each of their tables.
using TableVisitor = FunctionRef<void(const OptionTable& table)>;
void show_bench(TableVisitor visit);
int bench_command(const Sources& sources, const ForeignFlags& foreign);

OptionTable launch_options(launcher::LaunchOptions& options);
/// --hosts and --hostfile, as all commands take them that start processes on other hosts.
void add_hosts(OptionTable& table, const std::string& placeholder, const std::string& help,
               const std::function<void(std::vector<launcher::HostSpec> hosts)>& take);
/// How many ranks -n auto starts for these GPUs: as many as CUDA will show a process, which is one where they are split
/// into MIG devices. 0, for as many as there are cores, where there are none, or the program has `--device cpu`, by
/// flag or environment; a launcher cannot know its other settings (a config file). Pure.
int ranks_for_gpus(const devices::Gpus& gpus, std::span<const std::string> program, const EnvLookup& lookup);
int launch_command(const Sources& sources, const ForeignFlags& foreign);
/// `lockstep _host`, the launcher's helper on another host.
int host_command();

/// lockstep checkpoint show|verify PATH
OptionTable checkpoint_options(std::string& action, std::string& path);
int checkpoint_command(const Sources& sources, const ForeignFlags& foreign);

/// lockstep inspect PATH: flight records (launcher/inspect.h).
struct InspectOptions {
  std::string path;
  std::int64_t last = 20;  // operations of each rank
  bool json = false;
};
OptionTable inspect_options(InspectOptions& options);
/// Shows all that can be read; throws IoError for the first record that cannot.
int inspect_command(const Sources& sources, const ForeignFlags& foreign);

/// lockstep devices: what this machine has to compute with. The exit code is 0 also where there is no GPU or it fails:
/// that is an answer.
struct DevicesOptions {
  bool json = false;
  bool measure = false;  // what the devices reach
};
OptionTable devices_options(DevicesOptions& options);
int devices_command(const Sources& sources, const ForeignFlags& foreign);

/// lockstep doctor: what would keep jobs from running here, or on other hosts.
struct DoctorCommand {
  std::vector<launcher::HostSpec> hosts;  // to start it on; empty: this process looks, alone or as a rank of a job
  doctor::DoctorOptions doctor;
};
OptionTable doctor_options(DoctorCommand& command);
int doctor_command(const Sources& sources, const ForeignFlags& foreign);

/// lockstep simulate and lockstep plan, MODEL or a FILE that was measured: what they take is simulate's to say
/// (simulate/simulate.h).
int simulate_command(const Sources& sources, const ForeignFlags& foreign);
int plan_command(const Sources& sources, const ForeignFlags& foreign);

/// lockstep report, compare, watch and bugreport: what they take is report's to say (report/report.h).
int report_command(const Sources& sources, const ForeignFlags& foreign);
int compare_command(const Sources& sources, const ForeignFlags& foreign);
int bugreport_command(const Sources& sources, const ForeignFlags& foreign);
int watch_command(const Sources& sources, const ForeignFlags& foreign);

/// lockstep version: what this build is made of.
OptionTable version_options(bool& json);
/// Name and value of each line.
bench::Facts version_facts();
/// The text that it prints without --json: one "name  value" a line. Starts no MPI, and makes no CUDA context; opens
/// NVIDIA's libraries, if they are there, to ask them for their versions.
std::string version_text();
/// The same as one object, with the program's version and revision apart, and `backends` and `without` as lists.
std::string version_json();
int version_command(const Sources& sources, const ForeignFlags& foreign);

/// parse_options for a subcommand of ranks: prints the help if asked and returns true. Keeps an error in `refusal`, to
/// be thrown once the ranks are connected, so that a flag that is wrong on all of them is reported in one line.
/// `places`: ParsedOptions::places, if they are wanted.
bool parse_or_refuse(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign,
                     std::optional<UsageError>& refusal, std::map<std::string, std::string>* places = nullptr);

/// Of a subcommand that is no rank's: prints its help if asked, else what `run` returns. Returns 0.
int print_result(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign,
                 FunctionRef<std::string()> run);

/// The command for a shell, words quoted where they need it.
std::string as_typed(const std::string& subcommand, const std::vector<std::string>& args);

/// What lockstep --help prints.
std::string overview();

/// Whether the subcommand of that name computes with OpenMP's threads, for long.
bool computes(std::string_view subcommand);

/// Runs `lockstep ARGS…`. Returns the exit code; throws lockstep::Error.
int run(std::span<const std::string> args);

}  // namespace lockstep::cli
