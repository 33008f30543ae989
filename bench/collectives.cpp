#include "bench/collectives.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>

#include "base/error.h"
#include "base/kernel.h"
#include "base/signals.h"
#include "base/text.h"
#include "bench/ceilings.h"
#include "bench/collective_case.h"
#include "bench/rivals/rivals.h"
#include "comm/agree.h"
#include "session/opening.h"

namespace lockstep::bench {
namespace {

constexpr double kRoundUs = 50;  // a round of small operations takes about this long: its clock is read twice
constexpr int kFewestRounds = 5, kMostRounds = 1000;
constexpr int kWarmups = 3;

using Way = CollectiveCase::Way;

/// A column of the results: something that the ranks do together, and how long rounds of it took.
struct Column {
  std::function<void()> run;
  std::int64_t wrong = -1;
  double units = 1;        // that run() does at a time
  Rival* rival = nullptr;  // whose it is
  int repeats = 1;         // in a round
  std::vector<double> times_us = {};
  double cpu_us = 0;  // of its rounds
};

class CollectiveBenchmark {
 public:
  CollectiveBenchmark(session::Session& session, const CollectiveOptions& options)
      : options_(options),
        family_(family_of(options.collective)),
        host_(*session.group),
        case_(session.gradients(), host_, options) {
    for (const auto& name : options.compare)
      rivals_.push_back(make_rival(name, session.world, host_, session.gradients().device().kind));
    comm::run_collectively(host_, [&] {
      for (std::size_t i = 0; i < rivals_.size(); ++i)
        if (!rivals_[i]->has(options))
          throw UsageError(
              fmt::format("--compare {}: it has no {} of this type and operation", options.compare[i], family_.name),
              "leave it out, or choose --dtype and --op that it has");
    });
  }

  CollectiveResult run(std::int64_t bytes) {
    case_.resize(bytes);
    CollectiveResult result{.bytes = bytes, .count = 0, .out_of_place = {}, .in_place = {}, .rivals = {}};
    const auto parts = family_.in_parts ? static_cast<std::int64_t>(host_.size()) : 1;
    result.count = bytes / static_cast<std::int64_t>(size_of(options_.dtype)) / parts;
    std::vector<Column> columns;
    const auto add = [&](Way way) {
      columns.push_back({.run = [this, way] { case_.run(way); },
                         .wrong = options_.check ? case_.count_wrong(way) : -1,
                         .units = case_.units()});
    };
    const bool twice =
        family_.in_place && options_.collective != Collective::kBarrier && !(options_.own_memory && family_.in_parts);
    if (twice) add(Way::kOutOfPlace);
    add(family_.in_place ? Way::kInPlace : Way::kOutOfPlace);
    for (const auto& rival : rivals_) {
      case_.put(*rival);
      columns.push_back({.run = [this, one = rival.get()] { case_.run(*one); },
                         .wrong = options_.check ? case_.count_wrong(*rival) : -1,
                         .units = case_.units(),
                         .rival = rival.get()});
    }
    time(columns);
    std::vector<Speed> speeds;
    for (const Column& column : columns) {
      speeds.push_back(speed_of(column.times_us, case_.bytes_moved(), family_.bus_factor(host_.size())));
      speeds.back().wrong = column.wrong;
      speeds.back().cpu_us = column.cpu_us;
    }
    std::size_t next = 0;
    if (twice) result.out_of_place = speeds[next++];
    (family_.in_place ? result.in_place : result.out_of_place) = speeds[next++];
    result.rivals.assign(speeds.begin() + static_cast<std::ptrdiff_t>(next), speeds.end());
    return result;
  }

  void shutdown() {
    for (const auto& rival : rivals_) rival->shutdown();
  }

 private:
  /// Rounds of all columns alternate.
  void time(std::vector<Column>& columns) {
    const auto round = [&](Column& column, int repeats) {
      host_.barrier().wait_host();
      const double cpu_before = cpu_seconds();
      const auto begin = Clock::now();
      for (int i = 0; i < repeats; ++i) column.run();
      const double us = seconds_between(begin, Clock::now()) * 1e6 / repeats;
      column.cpu_us += 1e6 * (cpu_seconds() - cpu_before) / repeats;
      if (column.rival != nullptr) column.rival->settle();
      return us;
    };
    double longest = 0;
    for (Column& column : columns) {
      std::vector<double> tries;
      for (int i = 0; i < kWarmups; ++i) tries.push_back(round(column, 1));
      // The same on every rank: the slowest one's.
      const double about = std::max(1e-3, median(comm::largest_of_ranks(host_, tries)));
      column.repeats = static_cast<int>(std::clamp(kRoundUs / about, 1.0, 1000.0));
      longest = std::max(longest, about * column.repeats);
      column.cpu_us = 0;
    }
    const double rounds = std::clamp<double>(options_.seconds * 1e6 / longest, kFewestRounds, kMostRounds);
    const auto count = static_cast<std::size_t>(options_.iterations > 0 ? options_.iterations : rounds);
    for (std::size_t i = 0; i < count; ++i) {
      throw_if_stopped("measuring");
      for (Column& column : columns) column.times_us.push_back(round(column, column.repeats));
    }
    for (Column& column : columns) {
      column.times_us = comm::largest_of_ranks(host_, column.times_us);
      for (double& time : column.times_us) time /= column.units;
      const double mine = column.cpu_us / static_cast<double>(count) / column.units;
      column.cpu_us = comm::largest_of_ranks(host_, {&mine, 1}).front();
    }
  }

  const CollectiveOptions& options_;
  const CollectiveFamily& family_;
  comm::ProcessGroup& host_;
  CollectiveCase case_;
  std::vector<std::unique_ptr<Rival>> rivals_;
};

void validate(const CollectiveOptions& options) {
  check_usage(options.min_bytes <= options.max_bytes, "--min is above --max", "give a range of sizes in bytes");
  check_usage(!options.own_memory || options.in_flight == 1, "--in-flight with --memory own, whose calls block",
              "leave one of them out");
  check_usage(options.compare.empty() || options.in_flight == 1,
              "--in-flight with --compare, of whose calls each waits", "leave one of them out");
  check_usage(options.pattern == Pattern::kRing || options.in_flight == 1,
              "--in-flight with a --pattern that says how many messages are under way", "leave one of them out");
}

void validate_ranks(const CollectiveOptions& options, int ranks) {
  if (options.root >= ranks)
    throw UsageError(fmt::format("--root {}, among {} rank{}", options.root, ranks, ranks == 1 ? "" : "s"),
                     "name one of the ranks, from 0 up");
  check_usage(options.pattern == Pattern::kRing || ranks > 1, "a --pattern of pairs, on one rank",
              "start two ranks or more: lockstep launch -n 2 -- lockstep bench send-recv …");
}

}  // namespace

std::span<const CollectiveFamily> collective_families() {
  static constexpr auto kAll = [](double) { return 1.0; };
  static constexpr auto kAllButOwn = [](double n) { return (n - 1) / n; };
  static constexpr auto kTwice = [](double n) { return 2 * (n - 1) / n; };
  static const CollectiveFamily families[] = {
      {.collective = Collective::kAllReduce,
       .name = "allreduce",
       .about = "the reduction of a buffer over all ranks, which all of them get",
       .reduces = true,
       .bus_factor = kTwice},
      {.collective = Collective::kReduceScatter,
       .name = "reduce-scatter",
       .about = "the reduction of a buffer over all ranks, of which each gets a part",
       .reduces = true,
       .in_parts = true,
       .bus_factor = kAllButOwn},
      {.collective = Collective::kAllGather,
       .name = "all-gather",
       .about = "a part from each rank, which all of them get",
       .in_parts = true,
       .bus_factor = kAllButOwn},
      {.collective = Collective::kBroadcast,
       .name = "broadcast",
       .about = "a buffer of one rank, which all of them get",
       .has_root = true,
       .bus_factor = kAll},
      {.collective = Collective::kReduce,
       .name = "reduce",
       .about = "the reduction of a buffer over all ranks, which one of them gets",
       .reduces = true,
       .has_root = true,
       .bus_factor = kAll},
      {.collective = Collective::kAllToAll,
       .name = "all-to-all",
       .about = "a part of each rank's buffer for each other one",
       .in_place = false,
       .in_parts = true,
       .bus_factor = kAllButOwn},
      {.collective = Collective::kSendRecv,
       .name = "send-recv",
       .about = "messages between two ranks: a ring, latency, bandwidth one way and both ways",
       .in_place = false,
       .bus_factor = kAll},
      {.collective = Collective::kBarrier,
       .name = "barrier",
       .about = "how long the ranks take to know that all have come",
       .bus_factor = [](double) { return 0.0; }}};
  return families;
}

const CollectiveFamily& family_of(Collective collective) {
  return *std::ranges::find(collective_families(), collective, &CollectiveFamily::collective);
}

Speed speed_of(const std::vector<double>& rounds, double bytes, double bus_factor) {
  Speed speed{.time_us = median(rounds), .min_us = quantile(rounds, 0), .p99_us = quantile(rounds, 0.99)};
  speed.algbw_gbs = bytes / std::max(speed.time_us, 1e-3) * 1e-3;
  speed.busbw_gbs = speed.algbw_gbs * bus_factor;
  return speed;
}

std::vector<std::int64_t> sizes_of(const CollectiveOptions& options, int ranks) {
  if (options.collective == Collective::kBarrier) return {0};
  const auto element =
      static_cast<std::int64_t>(size_of(options.dtype)) * (family_of(options.collective).in_parts ? ranks : 1);
  std::vector<std::int64_t> sizes;
  for (double bytes = static_cast<double>(options.min_bytes); bytes <= static_cast<double>(options.max_bytes);
       bytes *= options.factor) {
    const std::int64_t whole = std::max<std::int64_t>(element, static_cast<std::int64_t>(bytes) / element * element);
    if (sizes.empty() || sizes.back() != whole) sizes.push_back(whole);
  }
  return sizes;
}

int bench_collective(const CollectiveOptions& options, const std::optional<UsageError>& refusal) {
  watch_for_stops();
  session::Session session = session::open_session(options.session, {.before = [&] {
                                                     if (refusal) throw *refusal;
                                                     validate(options);
                                                   }});
  comm::ProcessGroup& group = *session.group;
  const int ranks = group.size();
  comm::run_collectively(group, [&] { validate_ranks(options, ranks); });
  comm::compare_manifests(group, {{"min", fmt::to_string(options.min_bytes)},
                                  {"max", fmt::to_string(options.max_bytes)},
                                  {"factor", fmt::to_string(options.factor)},
                                  {"iterations", fmt::to_string(options.iterations)},
                                  {"seconds", fmt::to_string(options.seconds)},
                                  {"in-flight", fmt::to_string(options.in_flight)},
                                  {"dtype", name_of(options.dtype)},
                                  {"op", comm::name_of(options.op)},
                                  {"root", fmt::to_string(options.root)},
                                  {"pattern", fmt::to_string(static_cast<int>(options.pattern))},
                                  {"memory", options.own_memory ? "own" : "arena"},
                                  {"compare", join(options.compare, ",")},
                                  {"peak", fmt::to_string(options.measure_peak)},
                                  {"check", fmt::to_string(options.check)}});

  std::vector<CollectiveResult> results;
  {
    CollectiveBenchmark benchmark(session, options);
    const std::string backend = session.gradients().name();
    const auto print = [&](const std::string& text) {
      if (group.rank() != 0) return;
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
    };
    print(heading_of(options, ranks, backend));
    for (const std::int64_t bytes : sizes_of(options, ranks)) {
      results.push_back(benchmark.run(bytes));
      print(line_of(results.back(), options, ranks, backend));
    }
    std::optional<double> copies;
    if (options.measure_peak) {
      // All ranks at once, as they communicate.
      group.barrier().wait_host();
      comm::run_collectively(
          group, [&] { copies = measure_rates(*session.backend, {}, false, session.threads).copy_bytes_per_s; });
    }
    print(summary_of(results, options, copies));
    benchmark.shutdown();
  }
  std::int64_t wrong = 0;
  for (const CollectiveResult& result : results) {
    for (const auto& speed : {result.out_of_place, result.in_place})
      if (speed) wrong += std::max<std::int64_t>(0, speed->wrong);
    for (const Speed& speed : result.rivals) wrong += std::max<std::int64_t>(0, speed.wrong);
  }
  comm::run_collectively(group, [&] { LOCKSTEP_ASSERT(wrong == 0, "{} elements are wrong", wrong); });
  session.shutdown();
  return 0;
}

}  // namespace lockstep::bench
