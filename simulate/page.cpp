// What lockstep simulate draws.
#include <fmt/format.h>

#include "base/version.h"
#include "plot/page.h"
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

plot::Rows steps_of(const std::vector<Prediction>& predictions) {
  plot::Rows rows = {{"nodes", "ranks", "step, ms", "10 % to 90 %", "communication, ms", "exposed, ms", "efficiency, %",
                      "samples/s", "limit"}};
  for (const auto& p : predictions)
    rows.push_back({fmt::to_string(p.nodes), fmt::to_string(p.ranks), fmt::format("{:.2f}", p.step_ms),
                    fmt::format("{:.2f} to {:.2f}", p.step_ms_p10, p.step_ms_p90),
                    fmt::format("{:.2f}", p.communication_ms), fmt::format("{:.2f}", p.exposed_ms),
                    fmt::format("{:.1f}", 100 * p.efficiency), fmt::format("{:.0f}", p.samples_per_s), p.limit});
  return rows;
}

plot::Rows runs_of(const SimulateOptions& options, const std::vector<Prediction>& predictions) {
  plot::Rows rows = {
      {"nodes", "hours", "price", "minutes between checkpoints", "failures", "lost to checkpoints and failures, %"}};
  const bool fails = options.failures.node_mtbf_s > 0;
  for (const auto& p : predictions) {
    const Economy e = *economy_of(options, p);
    rows.push_back({fmt::to_string(p.nodes), options.samples > 0 ? fmt::format("{:.2f}", e.hours) : "",
                    e.price > 0 ? fmt::format("{:.2f}", e.price) : "",
                    fails ? fmt::format("{:.1f}", e.checkpoint_s / 60) : "",
                    fails ? fmt::format("{:.1f}", e.failures) : "", fails ? fmt::format("{:.2f}", 100 * e.lost) : ""});
  }
  return rows;
}

}  // namespace

std::string page_of(const SimulateOptions& options, const StepProfile& profile,
                    const std::vector<Prediction>& predictions, const std::string& command) {
  std::string html = fmt::format(
      "<p>All numbers are predictions of a model, from one measurement: {} samples per rank, {}, on "
      "{}.</p>\n<p>{}</p>\n"
      "<div class=\"plots\">\n<figure>\n{}</figure>\n<figure>\n{}</figure>\n</div>\n<h2>Steps</h2>\n{}",
      profile.batch, plot::xml_escaped(profile.precision), plot::xml_escaped(profile.device),
      plot::xml_escaped(describe(options)), plot::svg_of(throughput(profile, predictions)),
      plot::svg_of(efficiency(profile, predictions)), plot::table_of(steps_of(predictions)));
  if (economy_of(options, predictions.front()))
    html += "<h2>A whole training</h2>\n" + plot::table_of(runs_of(options, predictions));
  html += fmt::format("<h2>How</h2>\n<p>{}</p>\n", plot::xml_escaped(command));
  return plot::page_of(fmt::format("{} on a described cluster: predicted steps", profile.model),
                       fmt::format("lockstep {} ({})", version(), git_revision()), html);
}

std::string svg_of(const StepProfile& profile, const std::vector<Prediction>& predictions, const std::string& note) {
  const std::vector<LinePlot> plots = {throughput(profile, predictions), efficiency(profile, predictions)};
  return plot::svg_file(plots, "Predicted samples per second and efficiency by the number of ranks", note);
}

}  // namespace lockstep::simulate
