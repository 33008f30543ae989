// The results of a collective, in nccl-tests' columns, as JSON and as CSV.
#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "bench/collectives.h"

namespace lockstep::bench {
namespace {

const char* name_of(Pattern pattern) {
  switch (pattern) {
    case Pattern::kRing: return "ring";
    case Pattern::kLatency: return "latency";
    case Pattern::kBandwidth: return "bandwidth";
    case Pattern::kBidirectional: return "bidirectional";
  }
  return "?";
}

std::string ranks_text(int ranks) { return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"); }

/// What the numbers are of, beside size and count.
struct What {
  std::string dtype, op, root;
};
What what_of(const CollectiveOptions& options) {
  const CollectiveFamily& family = family_of(options.collective);
  const bool barrier = options.collective == Collective::kBarrier;
  return {barrier ? "none" : lockstep::name_of(options.dtype), family.reduces ? comm::name_of(options.op) : "none",
          family.has_root ? fmt::to_string(options.root) : "-1"};
}

std::string wrong_text(const Speed& speed) { return speed.wrong < 0 ? "N/A" : fmt::to_string(speed.wrong); }

std::string cells(const std::optional<Speed>& speed) {
  if (!speed) return fmt::format("   {:>9} {:>7} {:>7} {:>6}", "N/A", "N/A", "N/A", "N/A");
  return fmt::format("   {:>9.2f} {:>7.2f} {:>7.2f} {:>6}", speed->time_us, speed->algbw_gbs, speed->busbw_gbs,
                     wrong_text(*speed));
}

/// Keys and values of one column, each key after `prefix`.
std::string fields(const Speed& speed, const char* prefix) {
  return fmt::format(
      R"("{0}time_us":{1:.3f},"{0}min_us":{2:.3f},"{0}p99_us":{3:.3f},"{0}algbw_gbs":{4:.4f},"{0}busbw_gbs":{5:.4f},"{0}cpu_us":{6:.3f},"{0}wrong":{7})",
      prefix, speed.time_us, speed.min_us, speed.p99_us, speed.algbw_gbs, speed.busbw_gbs, speed.cpu_us, speed.wrong);
}

std::string csv_cells(const std::optional<Speed>& speed) {
  if (!speed) return ",,,,,";
  return fmt::format("{:.3f},{:.3f},{:.3f},{:.4f},{:.4f},{}", speed->time_us, speed->min_us, speed->p99_us,
                     speed->algbw_gbs, speed->busbw_gbs, speed->wrong);
}

std::string csv_names(const std::string& prefix) {
  std::string names;
  for (const char* name : {"time_us", "min_us", "p99_us", "algbw_gbs", "busbw_gbs", "wrong"})
    names += (names.empty() ? "" : ",") + prefix + name;
  return names;
}

}  // namespace

std::string heading_of(const CollectiveOptions& options, int ranks, const std::string& backend) {
  if (options.format == Format::kJson) return "";
  if (options.format == Format::kCsv) {
    std::string text = "collective,bytes,count,dtype,op,root," + csv_names("out_of_place_") + "," + csv_names("");
    for (const auto& rival : options.compare) text += "," + csv_names(rival + "_");
    return text + ",world_size,backend\n";
  }
  std::string text = fmt::format(
      "# {}{}: {}, {}{}{}; a time is the median of rounds, a round's the slowest rank's\n",
      family_of(options.collective).name,
      options.collective == Collective::kSendRecv ? fmt::format(" ({})", name_of(options.pattern)) : std::string(),
      ranks_text(ranks), backend, options.own_memory ? ", in the caller's memory" : "",
      options.in_flight > 1 ? fmt::format(", {} in flight", options.in_flight) : "");
  text += fmt::format("#{:>12} {:>12} {:>5} {:>6} {:>5}   {:^32}   {:^32}   {:^19}", "", "", "", "", "", "out-of-place",
                      "in-place", "rounds");
  for (const auto& rival : options.compare) text += fmt::format("   {:^40}", rival);
  text += fmt::format("\n#{:>12} {:>12} {:>5} {:>6} {:>5}", "size", "count", "type", "redop", "root");
  const std::string names = fmt::format("   {:>9} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong");
  const std::string units = fmt::format("   {:>9} {:>7} {:>7} {:>6}", "(us)", "(GB/s)", "(GB/s)", "");
  text += names + names + fmt::format("   {:>9} {:>9}", "min", "p99");
  for (std::size_t i = 0; i < options.compare.size(); ++i) text += names + fmt::format(" {:>7}", "ratio");
  text += fmt::format("\n#{:>12} {:>12} {:>5} {:>6} {:>5}", "(B)", "(elements)", "", "", "");
  text += units + units + fmt::format("   {:>9} {:>9}", "(us)", "(us)");
  for (std::size_t i = 0; i < options.compare.size(); ++i) text += units + fmt::format(" {:>7}", "");
  return text + "\n";
}

std::string line_of(const CollectiveResult& result, const CollectiveOptions& options, int ranks,
                    const std::string& backend) {
  const What what = what_of(options);
  const char* const name = family_of(options.collective).name;
  if (options.format == Format::kJson) {
    std::string text = fmt::format(R"({{"collective":"{}",)", name);
    if (options.collective == Collective::kSendRecv)
      text += fmt::format(R"("pattern":"{}",)", name_of(options.pattern));
    text += fmt::format(R"("bytes":{},{},)", result.bytes, fields(result.speed(), ""));
    if (result.in_place && result.out_of_place) text += fields(*result.out_of_place, "out_of_place_") + ",";
    for (std::size_t i = 0; i < options.compare.size(); ++i)
      text += fields(result.rivals[i], (options.compare[i] + "_").c_str()) + ",";
    return text +
           fmt::format(
               R"("count":{},"dtype":"{}","op":"{}","root":{},"memory":"{}","in_flight":{},"world_size":{},"backend":"{}"}})"
               "\n",
               result.count, what.dtype, what.op, what.root, options.own_memory ? "own" : "arena", options.in_flight,
               ranks, backend);
  }
  if (options.format == Format::kCsv) {
    std::string text = fmt::format("{},{},{},{},{},{},{},{}", name, result.bytes, result.count, what.dtype, what.op,
                                   what.root, csv_cells(result.out_of_place), csv_cells(result.in_place));
    for (const Speed& rival : result.rivals) text += "," + csv_cells(rival);
    return text + fmt::format(",{},{}\n", ranks, backend);
  }
  std::string text = fmt::format(" {:>12} {:>12} {:>5} {:>6} {:>5}{}{}   {:>9.2f} {:>9.2f}", result.bytes, result.count,
                                 what.dtype, what.op, what.root, cells(result.out_of_place), cells(result.in_place),
                                 result.speed().min_us, result.speed().p99_us);
  for (const Speed& rival : result.rivals)
    text += cells(rival) + fmt::format(" {:>7.2f}", rival.time_us / result.speed().time_us);
  return text + "\n";
}

std::string summary_of(const std::vector<CollectiveResult>& results, const CollectiveOptions& options,
                       std::optional<double> copy_bytes_per_s) {
  double best = 0;
  for (const CollectiveResult& result : results)
    for (const auto& speed : {result.out_of_place, result.in_place})
      if (speed) best = std::max(best, speed->busbw_gbs);
  if (options.format == Format::kJson && copy_bytes_per_s)
    return JsonObject{{"best_busbw_gbs", best}, {"copy_bytes_per_s", *copy_bytes_per_s}}.text() + "\n";
  if (options.format != Format::kTable) return "";
  double bus = 0;
  std::int64_t wrong = 0, columns = 0;
  for (const CollectiveResult& result : results)
    for (const auto& speed : {result.out_of_place, result.in_place}) {
      if (!speed) continue;
      bus += speed->busbw_gbs;
      wrong += std::max<std::int64_t>(0, speed->wrong);
      ++columns;
    }
  std::string text;
  if (options.check && options.collective != Collective::kBarrier)
    text = fmt::format("# Out of bounds values : {} {}\n", wrong, wrong == 0 ? "OK" : "FAILED");
  text += fmt::format("# Avg bus bandwidth    : {:g}\n", columns == 0 ? 0 : bus / static_cast<double>(columns));
  if (copy_bytes_per_s)
    text +=
        fmt::format("# Best bus bandwidth   : {:.4g}, {:.0f} % of what a rank copies, {:.4g} GB/s read and written\n",
                    best, 1e11 * best / *copy_bytes_per_s, 1e-9 * *copy_bytes_per_s);
  return text;
}

}  // namespace lockstep::bench
