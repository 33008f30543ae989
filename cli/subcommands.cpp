#include "cli/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/error.h"
#include "base/text.h"
#include "cli/manual.h"
#include "inference/export.h"
#include "inference/infer.h"
#include "launcher/launch.h"
#include "report/report.h"
#include "simulate/simulate.h"
#include "trainer/options.h"

namespace lockstep::cli {
namespace {

struct Subcommand {
  const char* name;
  const char* summary;
  int (*run)(const Sources& sources, const ForeignFlags& foreign);
  void (*show)(TableVisitor visit);  // its tables of flags
  bool computes = false;             // with OpenMP's threads, for long
};

/// The table's setters point into a configuration that ends with this function.
template <class Options, OptionTable (*kTableOf)(Options&)>
void show(TableVisitor visit) {
  Options options{};
  visit(kTableOf(options));
}
void show_checkpoint(TableVisitor visit) {
  std::string action, path;
  visit(checkpoint_options(action, path));
}

constexpr std::array kSubcommands = {
    Subcommand{"launch", "start a program as several ranks, here or on several hosts", launch_command,
               show<launcher::LaunchOptions, launch_options>},
    Subcommand{"train", "train a model, as one of the ranks or alone", train_command,
               show<trainer::TrainConfig, trainer::train_options>, true},
    Subcommand{"eval", "evaluate the weights of a file", eval_command,
               show<trainer::TrainConfig, trainer::eval_options>, true},
    Subcommand{"infer", "classify images or generate text with the weights of a file", infer_command,
               show<inference::InferConfig, inference::infer_options>, true},
    Subcommand{"export", "write a model with the weights of a file as ONNX", export_command,
               show<inference::ExportConfig, inference::export_onnx_options>},
    Subcommand{"devices", "show this machine's GPUs, their processes, and its CPU", devices_command,
               show<DevicesOptions, devices_options>},
    Subcommand{"doctor", "look for what would make jobs fail or slow, here or on several hosts", doctor_command,
               show<DoctorCommand, doctor_options>},
    Subcommand{"bench", "measure collectives or training steps", bench_command, show_bench, true},
    Subcommand{"simulate", "predict training steps on a cluster that is described", simulate_command,
               show<simulate::SimulateOptions, simulate::simulate_options>, true},
    Subcommand{"plan", "say how a model should communicate on a cluster", plan_command,
               show<simulate::SimulateOptions, simulate::plan_options>, true},
    Subcommand{"report", "write a page about training runs, from their metrics files", report_command,
               show<report::ReportOptions, report::report_options>},
    Subcommand{"compare", "show how two runs differ", compare_command,
               show<report::CompareOptions, report::compare_options>},
    Subcommand{"watch", "draw a run's curves in the terminal while it trains", watch_command,
               show<report::WatchOptions, report::watch_options>},
    Subcommand{"checkpoint", "show a checkpoint of training, or check its bytes", checkpoint_command, show_checkpoint},
    Subcommand{"inspect", "show what the ranks of a job that failed did last", inspect_command,
               show<InspectOptions, inspect_options>},
    Subcommand{"bugreport", "pack what explains a job that failed, without secrets", bugreport_command,
               show<report::BugreportOptions, report::bugreport_options>},
    Subcommand{"version", "print this build, its backends and library versions", version_command,
               show<bool, version_options>},
};

const Subcommand& subcommand(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& candidate : kSubcommands) {
    if (name == candidate.name) return candidate;
    names.emplace_back(candidate.name);
  }
  const auto close = nearest(name, names);
  throw UsageError(fmt::format("unknown subcommand '{}'", name),
                   close ? fmt::format("did you mean lockstep {}?", *close) : "it is one of " + join(names, ", "));
}

int run_subcommand(const std::string& name, std::span<const std::string> args) {
  const Subcommand& chosen = subcommand(name);
  ForeignFlags foreign;
  for (const auto& other : kSubcommands) {
    if (other.name == name) continue;
    other.show([&](const OptionTable& table) {
      for (auto& flag : table.names()) foreign.emplace(std::move(flag), other.name);
    });
  }
  return chosen.run(options::process_sources({args.begin(), args.end()}), foreign);
}

}  // namespace

int print_result(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign,
                 FunctionRef<std::string()> run) {
  const bool help = parse_options(table, sources, foreign).help;
  std::fputs((help ? table.help() : run()).c_str(), stdout);
  return 0;
}

bool computes(std::string_view subcommand) {
  return std::ranges::any_of(kSubcommands,
                             [&](const Subcommand& each) { return each.name == subcommand && each.computes; });
}

std::vector<SubcommandText> texts_of_subcommands() {
  std::vector<SubcommandText> all;
  for (const auto& each : kSubcommands)
    each.show([&](const OptionTable& table) { all.push_back(text_of(table, each.name, each.summary)); });
  return all;
}

std::string overview() {
  std::string text =
      "Usage: lockstep SUBCOMMAND …\n\nData-parallel training: one process per device, all in lockstep.\n\n";
  for (const auto& each : kSubcommands) text += fmt::format("  {:<12}{}\n", each.name, each.summary);
  return text + "\nlockstep SUBCOMMAND --help shows its flags.\n";
}

int run(std::span<const std::string> args) {
  if (args.empty()) throw UsageError("lockstep needs a subcommand", "lockstep --help lists them");
  const std::string& first = args.front();
  const auto rest = args.subspan(1);
  if (first == "_rank") {
    const auto program = rest.subspan(!rest.empty() && rest.front() == "--" ? 1 : 0);
    return launcher::rank_wrapper({program.begin(), program.end()});
  }
  if (first == "_host") return host_command();
  if (first == "_man" || first == "_completion") {
    const std::string shell = rest.empty() ? "" : rest.front();
    const std::string text = first == "_man"   ? manual()
                             : shell == "zsh"  ? zsh_completion()
                             : shell == "fish" ? fish_completion()
                                               : bash_completion();
    std::fputs(text.c_str(), stdout);
    return 0;
  }
  if (first == "_rsh") return launcher::remote_start({rest.begin(), rest.end()});
  if (first == "--version") return run_subcommand("version", rest);
  const bool help = first == "help" || first == "--help" || first == "-h";
  if (help && !rest.empty()) return run_subcommand(rest.front(), std::vector<std::string>{"--help"});
  if (!help) return run_subcommand(first, rest);
  std::fputs(overview().c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli
