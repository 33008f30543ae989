#include "cli/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/error.h"
#include "base/text.h"
#include "inference/infer.h"
#include "launcher/launch.h"
#include "trainer/options.h"

namespace lockstep::cli {
namespace {

struct Subcommand {
  const char* name;
  const char* summary;
  int (*run)(const Sources& sources, const ForeignFlags& foreign);
  std::vector<std::string> (*flags)();
  bool computes = false;  // with OpenMP's threads, for long
};

// The tables' setters point into configurations that end with these functions: only names leave them.
std::vector<std::string> launch_flags() {
  launcher::LaunchOptions options;
  return launch_options(options).names();
}
std::vector<std::string> train_flags() {
  trainer::TrainConfig config;
  return trainer::train_options(config).names();
}
std::vector<std::string> eval_flags() {
  trainer::TrainConfig config;
  return trainer::eval_options(config).names();
}
std::vector<std::string> infer_flags() {
  inference::InferConfig config;
  return inference::infer_options(config).names();
}
std::vector<std::string> checkpoint_flags() {
  std::string action, path;
  return checkpoint_options(action, path).names();
}
std::vector<std::string> devices_flags() {
  bool json = false;
  return devices_options(json).names();
}
std::vector<std::string> version_flags() { return version_options().names(); }

constexpr std::array kSubcommands = {
    Subcommand{"launch", "start a program as several ranks, here or on several hosts", launch_command, launch_flags},
    Subcommand{"train", "train a model, as one of the ranks or alone", train_command, train_flags, true},
    Subcommand{"eval", "evaluate the weights of a file", eval_command, eval_flags, true},
    Subcommand{"infer", "classify images or generate text with the weights of a file", infer_command, infer_flags,
               true},
    Subcommand{"devices", "show this machine's GPUs, their processes, and its CPU", devices_command, devices_flags},
    Subcommand{"bench", "measure collectives or training steps", bench_command, bench_flags, true},
    Subcommand{"checkpoint", "show a checkpoint of training, or check its bytes", checkpoint_command, checkpoint_flags},
    Subcommand{"version", "print this build, its backends and library versions", version_command, version_flags},
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
    for (auto& flag : other.flags()) foreign.emplace(std::move(flag), other.name);
  }
  return chosen.run(options::process_sources({args.begin(), args.end()}), foreign);
}

}  // namespace

bool computes(std::string_view subcommand) {
  return std::ranges::any_of(kSubcommands,
                             [&](const Subcommand& each) { return each.name == subcommand && each.computes; });
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
  if (first == "_rsh") return launcher::remote_start({rest.begin(), rest.end()});
  if (first == "--version") return run_subcommand("version", rest);
  const bool help = first == "help" || first == "--help" || first == "-h";
  if (help && !rest.empty()) return run_subcommand(rest.front(), std::vector<std::string>{"--help"});
  if (!help) return run_subcommand(first, rest);
  std::fputs(overview().c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli
