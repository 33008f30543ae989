// The settings of lockstep simulate and lockstep plan.
#include <fmt/format.h>

#include "base/text.h"
#include "lockstep/ddp/comm_hook.h"
#include "options/sources.h"
#include "options/values.h"
#include "simulate/simulate.h"

namespace lockstep::simulate {
namespace {

using options::Binding;
using options::Complaint;
using options::integer;
using options::number;
using options::OptionKind;
using options::OptionTable;
using options::Setter;

constexpr int kMostNodes = 1 << 20;
constexpr options::Range kPositive = {.low = 0, .open_low = true};

/// "GBIT,USEC".
Setter link(Link& target, bool& given) {
  return [&](const std::string& text) -> std::optional<Complaint> {
    const auto parts = split(text, ',');
    double gbit = 0, usec = 0;
    if (parts.size() != 2 || options::parse_number(parts[0], kPositive, gbit) ||
        options::parse_number(parts[1], {.low = 0}, usec))
      return Complaint{"not a rate and a latency", "give Gbit/s each way and microseconds, such as 100,5"};
    target = {.bytes_per_s = gbit * 1e9 / 8, .latency_s = 1e-6 * usec};
    given = true;
    return std::nullopt;
  };
}

Setter variation(Variation& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    const Complaint complaint{"no such distribution", "give none, measured, normal:SIGMA or lognormal:SIGMA"};
    const auto colon = text.find(':');
    const std::string name = text.substr(0, colon);
    target.sigma = 0;
    if (name == "none" || name == "measured") {
      if (colon != std::string::npos) return complaint;
      target.kind = name == "none" ? Variation::Kind::kNone : Variation::Kind::kMeasured;
      return std::nullopt;
    }
    if ((name != "normal" && name != "lognormal") || colon == std::string::npos ||
        options::parse_number(text.substr(colon + 1), {.low = 0, .high = 10}, target.sigma))
      return complaint;
    target.kind = name == "normal" ? Variation::Kind::kNormal : Variation::Kind::kLogNormal;
    return std::nullopt;
  };
}

Setter slow_ranks(Variation& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    const auto parts = split(text, ',');
    if (parts.size() != 2 || options::parse_number(parts[0], {.low = 0, .high = 1}, target.slow_share) ||
        options::parse_number(parts[1], {.low = 1, .high = 1000}, target.slow_factor))
      return Complaint{"not a share and a factor",
                       "give a share of all ranks and how many times as long they take, such as 0.001,1.3"};
    return std::nullopt;
  };
}

Setter mebibytes(std::optional<std::size_t>& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    double mib = 0;
    if (auto complaint = options::parse_number(text, {.low = 0, .high = 1 << 20, .open_low = true}, mib))
      return complaint;
    target = std::max<std::size_t>(1, static_cast<std::size_t>(mib * (1 << 20)));
    return std::nullopt;
  };
}

/// A number in another unit than the target's.
Setter scaled(double& target, double unit, options::Range range) {
  return [&target, unit, range](const std::string& text) {
    double value = 0;
    auto complaint = options::parse_number(text, range, value);
    if (!complaint) target = unit * value;
    return complaint;
  };
}

Setter list_of_files(std::vector<std::string>& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    target = split(text, ',');
    for (const auto& name : target)
      if (name.empty()) return Complaint{"a name is empty", "give files with commas between"};
    return std::nullopt;
  };
}

void add_cluster(OptionTable& table, SimulateOptions& o) {
  table.positional({.placeholder = "MODEL|FILE",
                    .help =
                        "a model, which is measured here first, with its defaults and one rank; or a file of lockstep "
                        "bench step MODEL --profile-out FILE",
                    .value = options::text(o.subject)});
  table.group("Cluster");
  table.add({.name = "nodes",
             .kind = OptionKind::kList,
             .placeholder = "A,B",
             .help = "numbers of nodes",
             .default_text = "1,2,4,8,16",
             .value = options::integers(o.nodes, 1, kMostNodes)});
  table.add({.name = "ranks-per-node",
             .placeholder = "N",
             .help = "ranks of each node, one per device",
             .default_text = "1",
             .value = integer(o.cluster.fabric.ranks_per_node, 1, 1 << 16)});
  table.add({.name = "link",
             .placeholder = "GBIT,USEC",
             .help = "between nodes: Gbit/s of a node each way, all its cards together, and latency in microseconds",
             .value = link(o.cluster.fabric.between, o.has_link)});
  table.add({.name = "local-link",
             .placeholder = "GBIT,USEC",
             .help = "inside a node: Gbit/s of a rank each way, and latency",
             .default_text = "on CPUs half of the rate of a copy, 1",
             .value = link(o.cluster.fabric.inside, o.has_local_link)});
  table.add({.name = "switch-nodes",
             .placeholder = "N",
             .help = "nodes on one switch; 0: all",
             .default_text = "0",
             .value = integer(o.cluster.fabric.nodes_per_switch, 0, kMostNodes)});
  table.add({.name = "oversubscription",
             .placeholder = "X",
             .help = "of the links above these switches: the rates below them divided by theirs",
             .default_text = "1",
             .value = number(o.cluster.fabric.oversubscription, {.low = 1, .high = 1000})});
  std::vector<std::pair<std::string, Algorithm>> names;
  std::vector<std::string> placeholder;
  for (const Algorithm each : algorithms()) {
    names.emplace_back(name_of(each), each);
    placeholder.emplace_back(name_of(each));
  }
  table.add({.name = "algorithm",
             .placeholder = join(placeholder, "|"),
             .help = "of allreduces; auto: the fastest of ring, tree and two-level for each size, as NCCL chooses; "
                     "direct: lockstep's own on CPUs",
             .default_text = "direct on CPUs, auto on GPUs",
             .value = [&o, set = options::choice(o.cluster.algorithm, names).set](const std::string& text) {
               o.has_algorithm = true;
               return set(text);
             }});
  table.add({.name = "collectives",
             .kind = OptionKind::kList,
             .placeholder = "FILE[:NODES]",
             .help =
                 "measured times in place of computed ones, where ranks and nodes are the same: what lockstep bench "
                 "allreduce --json prints",
             .value = list_of_files(o.collectives)});
  table.add({.name = "thread-gbit",
             .placeholder = "X",
             .help = "what a rank's thread moves between nodes on the CPU, in Gbit/s; 0: it moves nothing, as on GPUs",
             .default_text = fmt::format("{:g} on CPUs, 0 on GPUs", kThreadGbit),
             .value = number(o.thread_gbit, {.low = 0})});
  table.add({.name = "contention",
             .placeholder = "X",
             .help = "share by which computation is slower while a collective runs beside it",
             .default_text = "0",
             .value = number(o.cluster.contention, {.low = 0, .high = 0.9})});
  table.add({.name = "variation",
             .placeholder = "none|measured|normal:S|lognormal:S",
             .help = "how ranks' times differ from step to step; measured: as the profile's steps do",
             .default_text = "measured",
             .value = variation(o.cluster.variation)});
  table.add({.name = "slow-ranks",
             .placeholder = "SHARE,FACTOR",
             .help = "so many of all ranks always take so many times as long",
             .value = slow_ranks(o.cluster.variation)});
  table.add({.name = "profiles",
             .kind = OptionKind::kList,
             .placeholder = "FILE",
             .help = "more profiles of the same model, measured with other numbers of ranks on a host: the nearest to "
                     "--ranks-per-node counts",
             .value = list_of_files(o.more_profiles)});
  table.add({.name = "step-ms",
             .placeholder = "X",
             .help = "scale the profile's times to steps of so many ms on one rank: those of another device",
             .default_text = "as measured",
             .value = scaled(o.step_ms, 1, {.low = 0, .high = 1e9, .open_low = true})});
  table.group("Job");
  table.add({.name = "bucket-mb",
             .placeholder = "X",
             .help = "size of a gradient bucket in MiB",
             .default_text = "25; 4 between nodes on CPUs",
             .value = mebibytes(o.job.bucket_bytes)});
  table.add({.name = "first-bucket-mb",
             .placeholder = "X",
             .help = "size of the first bucket to be ready, in MiB",
             .default_text = "1",
             .value = mebibytes(o.job.first_bucket_bytes)});
  table.add({.name = "comm-hook",
             .placeholder = ddp::comm_hook_placeholder(),
             .help = "how gradients are sent",
             .default_text = o.job.comm_hook,
             .value = options::parsed_text(o.job.comm_hook, ddp::make_comm_hook, "none")});
  table.add({.name = "zero",
             .placeholder = "0|1",
             .help = "1: each rank updates its share of the parameters",
             .default_text = "0",
             .value = integer(o.job.zero, 0, 1)});
  table.add({.name = "accumulate",
             .placeholder = "A",
             .help = "parts of a step, of the profile's batch each",
             .default_text = "1",
             .value = integer(o.job.accumulate, 1, 1 << 20)});
  table.add({.name = "data-ms",
             .placeholder = "X",
             .help = "time in which a rank has the data of the next step ready, in ms",
             .default_text = "0",
             .value = number(o.job.data_ms, {.low = 0, .high = 1e9})});
  table.group("Trials");
  table.add({.name = "trials",
             .placeholder = "N",
             .help = "steps that are simulated",
             .default_text = fmt::to_string(o.trials.trials),
             .value = integer(o.trials.trials, 1, 1 << 20)});
  table.add({.name = "seed",
             .placeholder = "S",
             .help = "of what is random in them",
             .default_text = fmt::to_string(o.trials.seed),
             .value = integer(o.trials.seed, 0, options::kMost)});
}

void add_report(OptionTable& table, SimulateOptions& o) {
  table.add(
      {.name = "json", .kind = OptionKind::kFlag, .help = "print one JSON object", .value = options::boolean(o.json)});
}

}  // namespace

OptionTable simulate_options(SimulateOptions& o) {
  OptionTable table(
      "simulate",
      "Predicts steps of a model on a cluster that is described, from its computation on one rank and the "
      "cost of collectives.");
  add_cluster(table, o);
  table.group("Time and cost");
  table.add({.name = "samples",
             .placeholder = "N",
             .help = "samples of a whole training: reports its hours",
             .value = scaled(o.samples, 1, {.low = 1, .high = 1e18})});
  table.add({.name = "price",
             .placeholder = "X",
             .help = "of a node and hour: reports the price of --samples",
             .value = scaled(o.price, 1, {.low = 0, .high = 1e9})});
  table.add({.name = "node-mtbf-hours",
             .placeholder = "X",
             .help = "mean time between failures of a node",
             .default_text = "none fails",
             .value = scaled(o.failures.node_mtbf_s, 3600, kPositive)});
  table.add({.name = "checkpoint-seconds",
             .placeholder = "S",
             .help = "in which training stands still for a checkpoint",
             .value = scaled(o.failures.checkpoint_s, 1, kPositive)});
  table.add({.name = "restart-seconds",
             .placeholder = "S",
             .help = "from a failure until training continues",
             .default_text = "0",
             .value = scaled(o.failures.restart_s, 1, {.low = 0})});
  table.add({.name = "checkpoint-minutes",
             .placeholder = "M",
             .help = "training between two checkpoints",
             .default_text = "the best, by Daly's formula",
             .value = scaled(o.checkpoint_interval_s, 60, kPositive)});
  table.group("Report");
  add_report(table, o);
  table.add({.name = "html", .placeholder = "FILE", .help = "write a page with plots", .value = options::text(o.html)});
  table.add({.name = "svg", .placeholder = "FILE", .help = "write the plot", .value = options::text(o.svg)});
  options::add_config_option(table);
  return table;
}

OptionTable plan_options(SimulateOptions& o) {
  OptionTable table(
      "plan",
      "Says with which buckets, ZeRO, hook and accumulation steps of a model are shortest on a cluster, as "
      "lockstep simulate predicts them, and whether compression is worth it.");
  add_cluster(table, o);
  table.group("Report");
  add_report(table, o);
  options::add_config_option(table);
  return table;
}

}  // namespace lockstep::simulate
