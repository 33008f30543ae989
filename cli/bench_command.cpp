#include "cli/commands.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <functional>
#include <optional>

#include "base/error.h"
#include "base/status_report.h"
#include "base/text.h"
#include "bench/rivals/rivals.h"
#include "options/values.h"
#include "session/opening.h"
#include "trainer/options.h"

namespace lockstep::cli {
namespace {

using options::boolean;
using options::choice;
using options::Complaint;
using options::integer;
using options::kMost;
using options::number;
using options::OptionKind;
using options::Setter;

constexpr std::int64_t kMostSteps = std::int64_t{1} << 24;

std::string overview_of_bench() {
  std::string text =
      "Usage: lockstep bench COLLECTIVE [flags]\n"
      "       lockstep bench step MODEL [flags]\n"
      "       lockstep bench dp-vs-ddp MODEL [flags]\n"
      "       lockstep bench scaling MODEL,… [flags] [-- FLAGS of bench step]\n\n";
  for (const auto& family : bench::collective_families())
    text += fmt::format("  {:<15} {}\n", family.name, family.about);
  return text +
         "  step            a training step: time, throughput, exposed communication, memory, start-up\n"
         "  dp-vs-ddp       one process for all devices against one for each: memory, load, step, bytes\n"
         "  scaling         training steps on 1, 2, 4, … ranks: efficiency, speed-up, a page with plots\n\n"
         "Run all but the last two as the ranks of a job: lockstep launch -n 2 -- lockstep bench …\n"
         "lockstep bench allreduce --help, step --help and so on show the flags.\n";
}

/// Bytes: "8", "64K", "1.5M", "2G", powers of 1024 as in nccl-tests.
Setter size_in_bytes(std::int64_t& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    const Complaint complaint{"not a size", "give bytes from 1 to 1T, such as 8, 64K, 25M or 1G"};
    if (text.empty()) return complaint;
    double scale = 1;
    std::string_view digits = text;
    if (const auto unit = std::string_view("KMGT").find(static_cast<char>(std::toupper(digits.back())));
        unit != std::string_view::npos) {
      for (std::size_t i = 0; i <= unit; ++i) scale *= 1024;
      digits.remove_suffix(1);
    }
    const auto value = parse_double(digits);
    constexpr double kLargest = 1099511627776.0;
    if (!value || !(*value * scale >= 1) || *value * scale > kLargest) return complaint;
    target = static_cast<std::int64_t>(*value * scale);
    return std::nullopt;
  };
}

Setter chosen_format(bench::Format& target, bench::Format format) {
  return [&target, format](const std::string& text) {
    bool wanted = false;
    auto complaint = options::parse_bool(text, wanted);
    if (!complaint && wanted) target = format;
    return complaint;
  };
}

void add_format_options(OptionTable& table, bench::Format& format) {
  table.group("Report");
  table.add({.name = "json",
             .kind = OptionKind::kFlag,
             .help = "print JSON",
             .value = chosen_format(format, bench::Format::kJson)});
  table.add({.name = "csv",
             .kind = OptionKind::kFlag,
             .help = "print comma-separated values under a heading",
             .value = chosen_format(format, bench::Format::kCsv)});
  table.exclusive({"json", "csv"});
  options::add_config_option(table);
}

/// `WarmUp` may be optional.
template <class WarmUp>
void add_step_counts(OptionTable& table, const char* help, std::int64_t& steps, WarmUp& warmup_steps,
                     const std::string& default_warmup) {
  table.add({.name = "steps",
             .placeholder = "S",
             .help = help,
             .default_text = fmt::to_string(steps),
             .value = integer(steps, 1, kMostSteps)});
  table.add({.name = "warmup-steps",
             .placeholder = "S",
             .help = "steps before the measured ones",
             .default_text = default_warmup,
             .value = integer(warmup_steps, 1, kMost)});
}

/// A number, or that it is to be measured.
Setter peak(bench::StepOptions& options) {
  return [&options](const std::string& text) -> std::optional<Complaint> {
    options.peak_tflops.reset();
    options.measure_peaks = text == "measured";
    double value = 0;
    if (options.measure_peaks) return std::nullopt;
    if (options::parse_number(text, {.low = 0, .open_low = true}, value))
      return Complaint{"neither a positive number nor 'measured'", "give 10^12 operations per second, such as 989.4"};
    options.peak_tflops = value;
    return std::nullopt;
  };
}

std::vector<std::pair<std::string, DType>> types_of(const bench::CollectiveFamily& family) {
  std::vector<std::pair<std::string, DType>> types;
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kI32, DType::kI64})
    types.emplace_back(name_of(dtype), dtype);
  if (!family.reduces) types.emplace_back(name_of(DType::kU8), DType::kU8);  // its sums overflow
  return types;
}

}  // namespace

Setter names_of(std::vector<std::string>& target, const std::vector<std::string>& all) {
  return [&target, all](const std::string& text) -> std::optional<Complaint> {
    target.clear();
    for (const auto& name : split(text, ',')) {
      if (std::ranges::find(all, name) == all.end()) return Complaint{"not one of those", "give " + join(all, " or ")};
      if (std::ranges::find(target, name) == target.end()) target.push_back(name);
    }
    return std::nullopt;
  };
}

OptionTable bench_collective_options(bench::CollectiveOptions& options) {
  const bench::CollectiveFamily& family = bench::family_of(options.collective);
  const bool moves = options.collective != bench::Collective::kBarrier;
  OptionTable table(
      fmt::format("bench {}", family.name),
      fmt::format("Measures {}{}.", family.about, moves ? ", size by size, with nccl-tests' columns" : ""));
  if (moves) {
    table.group("Sizes");
    table.add({.name = "min",
               .placeholder = "BYTES",
               .help = fmt::format("smallest size{}; K, M and G are powers of 1024",
                                   family.in_parts ? ", of the parts of all ranks together" : ""),
               .default_text = fmt::to_string(options.min_bytes),
               .value = size_in_bytes(options.min_bytes)});
    table.add({.name = "max",
               .placeholder = "BYTES",
               .help = "largest size",
               .default_text = fmt::format("{}M", options.max_bytes >> 20),
               .value = size_in_bytes(options.max_bytes)});
    table.add({.name = "factor",
               .placeholder = "X",
               .help = "factor from each size to the next",
               .default_text = fmt::to_string(options.factor),
               .value = integer(options.factor, 2, 1 << 20)});
  }
  table.group("Operation");
  if (moves) {
    table.add({.name = "dtype",
               .placeholder = family.reduces ? "f32|f64|bf16|f16|i32|i64" : "f32|f64|bf16|f16|i32|i64|u8",
               .help = "type of the elements",
               .default_text = name_of(options.dtype),
               .value = choice(options.dtype, types_of(family))});
  }
  if (family.reduces) {
    table.add({.name = "op",
               .placeholder = "sum|min|max|prod",
               .help = "how the ranks' elements are reduced",
               .default_text = comm::name_of(options.op),
               .value = choice(options.op, {{"sum", comm::ReduceOp::kSum},
                                            {"min", comm::ReduceOp::kMin},
                                            {"max", comm::ReduceOp::kMax},
                                            {"prod", comm::ReduceOp::kProd}})});
  }
  if (family.has_root) {
    table.add({.name = "root",
               .placeholder = "RANK",
               .help = family.reduces ? "the rank that gets the result" : "the rank whose buffer all get",
               .default_text = fmt::to_string(options.root),
               .value = integer(options.root, 0, 1 << 20)});
  }
  if (options.collective == bench::Collective::kSendRecv) {
    table.add({.name = "pattern",
               .placeholder = "ring|latency|bandwidth|bidirectional",
               .help =
                   "ring: each rank to the next one, all at a time; of pairs of ranks, latency: half of one message's "
                   "way there and back; bandwidth: up to 64 messages at a time one way; bidirectional: both ways",
               .default_text = "ring",
               .value = choice(options.pattern, {{"ring", bench::Pattern::kRing},
                                                 {"latency", bench::Pattern::kLatency},
                                                 {"bandwidth", bench::Pattern::kBandwidth},
                                                 {"bidirectional", bench::Pattern::kBidirectional}})});
  }
  if (moves) {
    table.add({.name = "memory",
               .placeholder = "arena|own",
               .help =
                   "where the buffers are: in an arena of the group, as gradients are, or in the caller's own memory, "
                   "which is copied to one and back",
               .default_text = "arena",
               .value = choice(options.own_memory, {{"arena", false}, {"own", true}})});
    table.add({.name = "in-flight",
               .placeholder = "N",
               .help = "operations of one size that are issued before the first is waited for; times are of one",
               .default_text = fmt::to_string(options.in_flight),
               .value = integer(options.in_flight, 1, 1024)});
  }
  table.add({.name = "iterations",
             .placeholder = "N",
             .help = "timed rounds per size",
             .default_text = "as many as --seconds allows",
             .value = integer(options.iterations, 1, kMostSteps)});
  table.add({.name = "seconds",
             .placeholder = "S",
             .help = "longest time per size and column, but for five rounds",
             .default_text = fmt::to_string(options.seconds),
             .value = number(options.seconds, {.low = 0, .high = 3600, .open_low = true})});
  table.exclusive({"iterations", "seconds"});
  if (moves) {
    table.add({.name = "check",
               .placeholder = "yes|no",
               .help = "compare every element with a plain loop's, once per size and column",
               .default_text = "yes",
               .value = boolean(options.check)});
  }
  table.add({.name = "compare",
             .placeholder = join(bench::rival_names(), "|"),
             .help =
                 "beside it, in the same rounds, the same of another library in the caller's own memory; ratio: its "
                 "time divided by lockstep's. mpi needs ranks that mpirun starts (lockstep launch --mpi), nccl GPUs",
             .value = names_of(options.compare, bench::rival_names())});
  if (moves)
    table.add({.name = "peak",
               .placeholder = "none|measured",
               .help = "measured: also the best bus bandwidth as a share of the rate at which each rank copies memory",
               .default_text = "none",
               .value = choice(options.measure_peak, {{"none", false}, {"measured", true}})});
  session::add_rank_options(table, options.session, "collectives");
  add_format_options(table, options.format);
  return table;
}

OptionTable bench_step_options(bench::StepOptions& options) {
  OptionTable table(
      "bench step",
      "Measures training steps of MODEL on one fixed batch. Steps with and without communication alternate.");
  trainer::add_model_options(table, options.train);
  trainer::add_training_options(table, options.train);
  trainer::add_batch_options(table, options.train);
  add_step_counts(table, "measured steps with communication, and as many without", options.steps, options.warmup_steps,
                  fmt::format("{}; on GPUs {}", bench::kWarmUpSteps, bench::kWarmUpStepsOnGpu));
  table.add({.name = "copy-batch",
             .placeholder = "yes|no",
             .help = "copy the batch to the GPU in every step, as training does; otherwise it stays there",
             .default_text = "no",
             .value = boolean(options.copy_batch)});
  trainer::add_update_options(table, options.train);
  session::add_device_options(table, options.train);
  trainer::add_deterministic_option(table, options.train);
  trainer::add_autotune_option(table, options.train);
  trainer::add_graphs_option(table, options.train);
  trainer::add_bucket_options(table, options.train);
  trainer::add_comm_hook_option(table, options.train);
  trainer::add_zero_option(table, options.train);
  add_format_options(table, options.format);
  table.add({.name = "timeline",
             .kind = OptionKind::kFlag,
             .help = "also report when each bucket was ready, started and ended, in one step without a CUDA graph",
             .value = boolean(options.timeline)});
  table.add(
      {.name = "bottlenecks",
       .placeholder = "yes|no",
       .help = "say what holds the step up and what to try; where the batch may be small, a larger one is measured",
       .default_text = "yes in a table",
       .value = boolean(options.bottlenecks)});
  table.add({.name = "profile",
             .kind = OptionKind::kFlag,
             .help = "GPUs: also report each operation of one step without a CUDA graph: its time, its least possible "
                     "time at measured rates, and its share of the memory's peak bandwidth",
             .value = boolean(options.profile)});
  table.add(
      {.name = "profile-out",
       .placeholder = "FILE",
       .help = "write when each gradient was ready without communication: lockstep simulate and plan start from it",
       .value = options::text(options.profile_out)});
  table.add({.name = "peak-tflops",
             .placeholder = "X|measured",
             .help =
                 "peak of the device in this precision, in 10^12 operations per second; the step's share of it is "
                 "reported; measured: also the share of the rate of matrix products here, measured in half a second",
             .default_text = "from the data sheet, if the GPU is known",
             .value = peak(options)});
  table.exclusive({"csv", "timeline"});
  table.exclusive({"csv", "profile"});
  table.exclusive({"csv", "bottlenecks"});
  for (const char* name : {"bucket-mb", "first-bucket-mb", "comm-hook", "zero"})
    table.exclusive({"profile-out", name});  // simulations add them
  return table;
}

OptionTable bench_dp_vs_ddp_options(bench::DpVsDdpOptions& options) {
  OptionTable table("bench dp-vs-ddp",
                    "Measures training steps of MODEL on several devices. One process for all of them and one process "
                    "per device alternate.");
  trainer::add_model_options(table, options.train);
  trainer::add_training_options(table, options.train);
  trainer::add_batch_options(table, options.train);
  add_step_counts(table, "measured steps per mode per round", options.steps, options.warmup_steps,
                  fmt::to_string(options.warmup_steps));
  table.add({.name = "rounds",
             .placeholder = "R",
             .help = "rounds; each measures both",
             .default_text = fmt::to_string(options.rounds),
             .value = integer(options.rounds, 1, 1000)});
  trainer::add_update_options(table, options.train);
  session::add_device_options(table, options.train);
  trainer::add_deterministic_option(table, options.train);
  trainer::add_autotune_option(table, options.train);
  trainer::add_graphs_option(table, options.train);
  trainer::add_bucket_options(table, options.train);
  table.group("Report");
  table.add({.name = "json",
             .kind = OptionKind::kFlag,
             .help = "print JSON",
             .value = chosen_format(options.format, bench::Format::kJson)});
  options::add_config_option(table);
  return table;
}

namespace {

/// What can be measured, and where the table of each writes.
class Kinds {
 public:
  struct Kind {
    OptionTable table;
    std::function<int(const OptionTable& table, const Sources& sources, const ForeignFlags& foreign)> run;
  };

  Kinds() {
    for (const auto& family : bench::collective_families()) {
      auto& options = collectives_.emplace_back();
      options.collective = family.collective;
      add(bench_collective_options(options), options, bench::bench_collective);
    }
    add(bench_step_options(step_), step_, bench::bench_step);
    add(bench_dp_vs_ddp_options(dp_vs_ddp_), dp_vs_ddp_, bench::bench_dp_vs_ddp);
    kinds_.push_back(
        {bench_scaling_options(scaling_), [this](const auto& table, const auto& sources, const auto& foreign) {
           return bench_scaling_command(scaling_, table, sources, foreign);
         }});
  }
  Kinds(const Kinds&) = delete;
  Kinds& operator=(const Kinds&) = delete;

  const std::vector<Kind>& list() const { return kinds_; }

 private:
  /// `measure` throws an error of the flags, if any, once the ranks are connected.
  template <class Options, class Measure>
  void add(OptionTable table, Options& options, Measure measure) {
    kinds_.push_back({std::move(table), [&options, measure](const auto& own, const auto& sources, const auto& foreign) {
                        std::optional<UsageError> refusal;
                        if (parse_or_refuse(own, sources, foreign, refusal)) return 0;
                        if (options.format != bench::Format::kTable)
                          report_status({.kind = StatusReport::Kind::kDataOnStdout});
                        return measure(options, refusal);
                      }});
  }

  std::deque<bench::CollectiveOptions> collectives_;  // which stay where they are
  bench::StepOptions step_;
  bench::DpVsDdpOptions dp_vs_ddp_;
  bench::ScalingOptions scaling_;
  std::vector<Kind> kinds_;
};

}  // namespace

void show_bench(TableVisitor visit) {
  const Kinds kinds;
  for (const auto& kind : kinds.list()) visit(kind.table);
}

int bench_command(const Sources& sources, const ForeignFlags& foreign) {
  const std::string wanted = sources.args.empty() ? "" : sources.args.front();
  if (wanted == "--help" || wanted == "-h") {
    std::fputs(overview_of_bench().c_str(), stdout);
    return 0;
  }
  const Kinds kinds;
  std::vector<std::string> names;
  for (const auto& kind : kinds.list()) names.push_back(kind.table.subcommand().substr(std::string("bench ").size()));
  const auto chosen = static_cast<std::size_t>(std::ranges::find(names, wanted) - names.begin());
  if (chosen == names.size()) {
    const auto close = nearest(wanted, names);
    throw UsageError(wanted.empty() ? "lockstep bench needs to know what to measure"
                                    : fmt::format("lockstep bench cannot measure '{}'", wanted),
                     close ? fmt::format("did you mean lockstep bench {}?", *close)
                           : "say allreduce or another collective, step MODEL, dp-vs-ddp MODEL or scaling MODEL");
  }
  // One environment or file may serve all: what only another kind takes is no mistake there.
  ForeignFlags others = foreign;
  for (std::size_t i = 0; i < names.size(); ++i)
    if (i != chosen)
      for (auto& flag : kinds.list()[i].table.names())
        others.emplace(std::move(flag), kinds.list()[i].table.subcommand());
  Sources own = sources;
  own.args.erase(own.args.begin());
  const auto& kind = kinds.list()[chosen];
  return kind.run(kind.table, own, others);
}

}  // namespace lockstep::cli
