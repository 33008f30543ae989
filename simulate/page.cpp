// What lockstep simulate draws.
#include <fmt/format.h>

#include "base/version.h"
#include "lockstep/base/env.h"
#include "plot/plot.h"
#include "simulate/simulate.h"

namespace lockstep::simulate {
namespace {

using plot::Axis;
using plot::LinePlot;
using plot::Series;

/// The numbers of ranks on the axis, spread by doublings.
Axis ranks_axis() { return {.label = "ranks", .scale = Axis::Scale::kLog2}; }

LinePlot throughput(const StepProfile& profile, const std::vector<Prediction>& predictions) {
  Series predicted{.name = "predicted", .points = {}, .style = Series::Style::kPredicted};
  Series ideal{.name = "ideal", .points = {}, .style = Series::Style::kReference};
  for (const auto& p : predictions) {
    const double samples = p.samples_per_s * p.step_ms;  // a step's, per second and ms
    predicted.points.push_back({.x = static_cast<double>(p.ranks),
                                .y = p.samples_per_s,
                                .low = samples / p.step_ms_p90,
                                .high = samples / p.step_ms_p10});
    ideal.points.push_back({.x = static_cast<double>(p.ranks), .y = samples / p.compute_ms});
  }
  return {.title = profile.model + ": samples per second",
          .alt = "Samples per second by the number of ranks, predicted and ideal; the table has the numbers",
          .x = ranks_axis(),
          .y = {.label = "samples/s", .scale = Axis::Scale::kLog10},
          .series = {predicted, ideal}};
}

LinePlot efficiency(const StepProfile& profile, const std::vector<Prediction>& predictions) {
  Series predicted{.name = "predicted", .points = {}, .style = Series::Style::kPredicted};
  for (const auto& p : predictions)
    predicted.points.push_back({.x = static_cast<double>(p.ranks), .y = 100 * p.efficiency});
  return {.title = profile.model + ": efficiency",
          .alt = "Efficiency by the number of ranks, predicted; the table has the numbers",
          .x = ranks_axis(),
          .y = {.label = "%", .low = 0, .high = 100},
          .series = {predicted}};
}

constexpr const char* kStyle =
    "body{font:16px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 "
    "1rem;background:#fff;color:#111}"
    "figure{display:inline-block;margin:1rem 0}svg{max-width:100%;height:auto}.wide{overflow-x:auto}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8888}"
    "td{white-space:nowrap}th:last-child,td:last-child{text-align:left}pre{white-space:pre-wrap}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#eee}}";

std::string row(const char* cell, const std::vector<std::string>& cells) {
  std::string text = "<tr>";
  for (const auto& each : cells) text += fmt::format("<{0}>{1}</{0}>", cell, plot::xml_escaped(each));
  return text + "</tr>\n";
}

std::string table_of(const std::vector<Prediction>& predictions) {
  std::string text =
      "<div class=\"wide\"><table>\n" + row("th", {"nodes", "ranks", "step, ms", "10 % to 90 %", "communication, ms",
                                                   "exposed, ms", "efficiency, %", "samples/s", "limit"});
  for (const auto& p : predictions)
    text += row("td", {fmt::to_string(p.nodes), fmt::to_string(p.ranks), fmt::format("{:.2f}", p.step_ms),
                       fmt::format("{:.2f} to {:.2f}", p.step_ms_p10, p.step_ms_p90),
                       fmt::format("{:.2f}", p.communication_ms), fmt::format("{:.2f}", p.exposed_ms),
                       fmt::format("{:.1f}", 100 * p.efficiency), fmt::format("{:.0f}", p.samples_per_s), p.limit});
  return text + "</table></div>\n";
}

std::string table_of_runs(const SimulateOptions& options, const std::vector<Prediction>& predictions) {
  if (!economy_of(options, predictions.front())) return "";
  std::string text = "<h2>A whole training</h2>\n<div class=\"wide\"><table>\n" +
                     row("th", {"nodes", "hours", "price", "minutes between checkpoints", "failures",
                                "lost to checkpoints and failures, %"});
  for (const auto& p : predictions) {
    const Economy e = *economy_of(options, p);
    const bool fails = options.failures.node_mtbf_s > 0;
    text +=
        row("td",
            {fmt::to_string(p.nodes), options.samples > 0 ? fmt::format("{:.2f}", e.hours) : "",
             e.price > 0 ? fmt::format("{:.2f}", e.price) : "", fails ? fmt::format("{:.1f}", e.checkpoint_s / 60) : "",
             fails ? fmt::format("{:.1f}", e.failures) : "", fails ? fmt::format("{:.2f}", 100 * e.lost) : ""});
  }
  return text + "</table></div>\n";
}

}  // namespace

std::string page_of(const SimulateOptions& options, const StepProfile& profile,
                    const std::vector<Prediction>& predictions, const std::string& command) {
  const std::string title = fmt::format("{} on a described cluster: predicted steps", profile.model);
  return fmt::format(
             "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
             "<meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n<style>{}\n{}</style>\n</head>\n"
             "<body>\n<h1>{}</h1>\n<p>All numbers are predictions of a model, from one measurement: {} samples per "
             "rank, "
             "{}, on {}.</p>\n<p>{}</p>\n",
             plot::xml_escaped(title), kStyle, plot::plot_style(), plot::xml_escaped(title), profile.batch,
             plot::xml_escaped(profile.precision), plot::xml_escaped(profile.device),
             plot::xml_escaped(describe(options))) +
         "<figure>" + plot::svg_of(throughput(profile, predictions)) + "</figure>\n<figure>" +
         plot::svg_of(efficiency(profile, predictions)) + "</figure>\n<h2>Steps</h2>\n" + table_of(predictions) +
         table_of_runs(options, predictions) +
         fmt::format("<h2>How</h2>\n<pre>{}</pre>\n<p>lockstep {} ({})</p>\n</body>\n</html>\n",
                     plot::xml_escaped(command), version(), git_revision());
}

std::string svg_of(const StepProfile& profile, const std::vector<Prediction>& predictions, const std::string& note) {
  const std::vector<LinePlot> plots = {throughput(profile, predictions), efficiency(profile, predictions)};
  return plot::svg_file(plots, "Predicted samples per second and efficiency by the number of ranks", note);
}

}  // namespace lockstep::simulate
