#include "inference/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/json.h"

namespace lockstep::inference {
namespace {

void append(std::vector<double>& to, const std::vector<double>& from) { to.insert(to.end(), from.begin(), from.end()); }

std::string percentiles_text(std::vector<double>& values) {
  return fmt::format("p50 {:.2f} ms  p90 {:.2f} ms  p99 {:.2f} ms", percentile(values, 50), percentile(values, 90),
                     percentile(values, 99));
}

JsonObject percentiles_json(std::vector<double>& values) {
  return {{"p50", percentile(values, 50)}, {"p90", percentile(values, 90)}, {"p99", percentile(values, 99)}};
}

double rate(std::uint64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; }

const char* name_of(InferReport::Kind kind) {
  switch (kind) {
    case InferReport::Kind::kImages: return "image";
    case InferReport::Kind::kTexts:
    case InferReport::Kind::kReadTexts: return "text";
    case InferReport::Kind::kRows: return "row";
    case InferReport::Kind::kTensors: return "input";
  }
  return "";
}

}  // namespace

void Tally::add(const Tally& other) {
  results += other.results;
  corrupt += other.corrupt;
  tokens += other.tokens;
  append(result_ms, other.result_ms);
  append(first_token_ms, other.first_token_ms);
  append(token_ms, other.token_ms);
}

double percentile(std::vector<double>& values, double percent) {
  LOCKSTEP_ASSERT(percent > 0 && percent <= 100, "percentile {}", percent);
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const auto rank = static_cast<std::size_t>(std::ceil(percent / 100 * static_cast<double>(values.size())));
  return values[std::max<std::size_t>(rank, 1) - 1];
}

std::string text_of(InferReport report) {
  Tally& tally = report.tally;
  const char* const unit = name_of(report.kind);
  const auto plural = [](auto count) { return count == 1 ? "" : "s"; };
  const std::string batch = report.batch > 1 ? fmt::format(", batches of {}", report.batch) : "";
  std::string text =
      fmt::format("{} {}{} in {:.2f} s on {}, {} stream{}{}: ", tally.results, unit, plural(tally.results),
                  report.wall_s, report.device, report.streams, plural(report.streams), batch);
  if (report.kind == InferReport::Kind::kTexts)
    text +=
        fmt::format("{} tokens, {:.1f} tokens/s, first {}, others {}", tally.tokens, rate(tally.tokens, report.wall_s),
                    percentiles_text(tally.first_token_ms), percentiles_text(tally.token_ms));
  else
    text += fmt::format("{:.1f} {}s/s, latency {}", rate(tally.results, report.wall_s), unit,
                        percentiles_text(tally.result_ms));
  if (tally.corrupt > 0) text += fmt::format(", {} corrupt", tally.corrupt);
  return text;
}

std::string json_of(InferReport report) {
  Tally& tally = report.tally;
  JsonObject json = {{"event", "report"},
                     {"device", report.device},
                     {"streams", report.streams},
                     {"batch", report.batch},
                     {"wall_s", report.wall_s},
                     {"results", tally.results},
                     {"corrupt", tally.corrupt},
                     {"results_per_s", rate(tally.results, report.wall_s)},
                     {"latency_ms", percentiles_json(tally.result_ms)}};
  if (report.kind == InferReport::Kind::kTexts) {
    json.add("tokens", tally.tokens);
    json.add("tokens_per_s", rate(tally.tokens, report.wall_s));
    json.add("first_token_ms", percentiles_json(tally.first_token_ms));
    json.add("token_ms", percentiles_json(tally.token_ms));
  }
  return json.text();
}

}  // namespace lockstep::inference
