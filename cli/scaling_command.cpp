// lockstep bench scaling: its flags, and what is known before the first job.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/text.h"
#include "bench/flops.h"
#include "cli/commands.h"
#include "devices/nvml.h"
#include "launcher/mpirun_command.h"
#include "options/values.h"
#include "session/device_choice.h"

namespace lockstep::cli {
namespace {

using options::Complaint;
using options::integer;
using options::OptionKind;
using options::Setter;

constexpr std::int64_t kMostRounds = 1000, kMostSamples = std::int64_t{1} << 40;

/// As --hosts takes them.
std::string hosts_in_words(const std::vector<launcher::HostSpec>& hosts) {
  std::vector<std::string> words;
  for (const auto& host : hosts) {
    const std::string name = host.name.find(':') == std::string::npos ? host.name : "[" + host.name + "]";
    words.push_back((host.user.empty() ? "" : host.user + "@") + name +
                    (host.slots > 0 ? fmt::format(":{}", host.slots) : ""));
  }
  return join(words, ",");
}

/// For how many ranks there is a core, a GPU or a slot.
void count_places(bench::ScalingOptions& options) {
  if (!options.hosts.empty()) {
    options.places_are = "slots";
    for (const auto& host : launcher::parse_hosts(options.hosts)) {
      if (host.slots == 0) {
        options.places = 0;
        return;
      }
      options.places += host.slots;
    }
    return;
  }
  const auto device = session::parse_device(options.device);
  const std::vector<std::string> program = {"lockstep", "bench", "step", "--device", options.device};
  const bool cpu = device.kind == session::DeviceRequest::Kind::kCpu;
  const int gpus = cpu ? 0 : ranks_for_gpus(devices::read_gpus(devices::Detail::kChoice), program, env);
  options.places_are = gpus > 0 ? "GPUs" : "cores";
  options.places = gpus > 0 ? gpus : launcher::usable_cores();
  if (gpus > 0 && !device.indices.empty()) options.places = static_cast<int>(device.indices.size());
}

/// What a job would refuse, before the first one: names of models, and the flags after "--".
void check_jobs(const bench::ScalingOptions& options, const ForeignFlags& foreign) {
  for (const auto mode : options.modes)
    for (const auto& model : options.models) {
      bench::StepOptions step;
      auto words = bench::command_of(options, {mode, model, options.ranks.empty() ? 1 : options.ranks.back()});
      words.erase(words.begin(), std::ranges::find(words, "step") + 1);
      const Sources job = {
          .args = std::move(words), .env = [](const auto&) { return std::nullopt; }, .environment_names = {}};
      parse_options(bench_step_options(step), job, foreign);
      if (step.train.data.empty())
        step.train.data = bench::synthetic_data(model, trainer::global_batch_of(step.train, 1));
      trainer::validate(step.train);
    }
}

}  // namespace

OptionTable bench_scaling_options(bench::ScalingOptions& options) {
  OptionTable table(
      "bench scaling",
      "Measures training steps of MODEL on 1, 2, 4, … ranks, each number as a job of its own, in rounds. Weak scaling: "
      "each rank keeps its batch. Strong scaling: all share one batch. What follows -- goes to bench step.");
  table.takes_program("FLAGS of bench step");
  table.positional({.placeholder = "MODEL",
                    .help = "as bench step takes it; several with commas",
                    .value = [&options](const std::string& text) -> std::optional<Complaint> {
                      options.models = split(text, ',');
                      for (const auto& model : options.models)
                        if (model.empty() || std::ranges::count(options.models, model) > 1)
                          return Complaint{"not a list of different models", "give each once, with commas between"};
                      return std::nullopt;
                    }});
  table.group("What is measured");
  table.add({.name = "mode",
             .kind = OptionKind::kList,
             .placeholder = "weak,strong",
             .help = "weak, strong or both",
             .default_text = "weak,strong",
             .value = [&options](const std::string& text) -> std::optional<Complaint> {
               std::vector<std::string> names;
               if (auto complaint = names_of(names, {"weak", "strong"})(text)) return complaint;
               options.modes.clear();
               for (const auto& name : names)
                 options.modes.push_back(name == "weak" ? bench::ScalingMode::kWeak : bench::ScalingMode::kStrong);
               return std::nullopt;
             }});
  table.add({.name = "ranks",
             .kind = OptionKind::kList,
             .placeholder = "A,B",
             .help = "numbers of ranks; ratios are against the smallest. More than there are cores are marked",
             .default_text = "1, 2, 4, … up to the GPUs, or to the cores or slots",
             .value = options::integers(options.ranks, 1, launcher::kMaxRanks)});
  add_hosts(table, "a:4,b:4", "hosts to run on, filled in this order, and the number of ranks on each",
            [&options](const std::vector<launcher::HostSpec>& hosts) { options.hosts = hosts_in_words(hosts); });
  table.add({.name = "device",
             .placeholder = "auto|cpu|cuda|cuda:0,3",
             .help = "as of bench step",
             .default_text = options.device,
             .value = [&options](const std::string& text) {
               session::parse_device(text);
               options.device = text;
               return std::nullopt;
             }});
  table.add({.name = "batch",
             .synonyms = {"batch-size"},
             .placeholder = "B",
             .help = "samples per rank, weak",
             .default_text = fmt::to_string(options.batch),
             .value = integer(options.batch, 1, kMostSamples)});
  table.add({.name = "global-batch",
             .placeholder = "G",
             .help = "samples of all ranks together, strong",
             .default_text = fmt::to_string(options.global_batch),
             .value = integer(options.global_batch, 1, kMostSamples)});
  table.add({.name = "threads",
             .placeholder = "N",
             .help = "compute threads per rank",
             .default_text = fmt::to_string(options.threads),
             .value = integer(options.threads, 1, 4096)});
  table.add({.name = "rounds",
             .placeholder = "K",
             .help = "each runs all jobs once; ratios are taken within a round",
             .default_text = fmt::to_string(options.rounds),
             .value = integer(options.rounds, 1, kMostRounds)});
  table.add({.name = "steps",
             .placeholder = "S",
             .help = "measured steps per job with communication, and as many without",
             .default_text = fmt::to_string(options.steps),
             .value = integer(options.steps, 1, std::int64_t{1} << 24)});
  table.add({.name = "warmup-steps",
             .placeholder = "S",
             .help = "steps before the measured ones",
             .default_text = fmt::to_string(options.warmup_steps),
             .value = integer(options.warmup_steps, 1, options::kMost)});
  table.group("Report");
  table.add({.name = "out",
             .placeholder = "FILE",
             .help = "a line for each job: the same command continues what was interrupted, or reports what is there",
             .default_text = options.out,
             .value = options::text(options.out)});
  table.add({.name = "json",
             .kind = OptionKind::kFlag,
             .help = "print one JSON object",
             .value = [&options](const std::string& text) {
               bool wanted = false;
               auto complaint = options::parse_bool(text, wanted);
               if (!complaint && wanted) options.format = bench::Format::kJson;
               return complaint;
             }});
  table.add({.name = "html",
             .placeholder = "FILE",
             .help = "write a page with plots, tables and the machine",
             .value = options::text(options.html)});
  table.add({.name = "svg",
             .placeholder = "FILE",
             .help = "write efficiency and speed-up as one figure",
             .value = options::text(options.svg)});
  table.add({.name = "baseline",
             .placeholder = "FILE",
             .help = "an earlier run's --out file: says what has become slower, with exit code 1 if anything has",
             .value = options::text(options.baseline)});
  table.add({.name = "slower-by",
             .placeholder = "PERCENT",
             .help = "least difference of medians that counts, if it is significant, too",
             .default_text = fmt::format("{:g}", options.slower_by),
             .value = options::number(options.slower_by, {.low = 0, .high = 1000})});
  options::add_config_option(table);
  return table;
}

int bench_scaling_command(bench::ScalingOptions& options, const OptionTable& table, const Sources& sources,
                          const ForeignFlags& foreign) {
  const auto parsed = parse_options(table, sources, foreign);
  if (parsed.help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  options.step_flags = parsed.program;
  count_places(options);
  check_jobs(options, foreign);
  options.versions = version_facts();
  options.command = as_typed("bench scaling", sources.args);
  options.program = std::filesystem::read_symlink("/proc/self/exe");
  return bench::bench_scaling(options);
}

}  // namespace lockstep::cli
