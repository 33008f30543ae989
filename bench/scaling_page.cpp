// What bench scaling draws: a page for a browser, and the figure of a README.
#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "bench/scaling.h"
#include "plot/page.h"
#include "plot/plot.h"

namespace lockstep::bench {
namespace {

using plot::Axis;
using plot::BarPlot;
using plot::facts_of;
using plot::figure;
using plot::LinePlot;
using plot::Rows;
using plot::Series;
using plot::svg_file;
using plot::table_of;
using plot::xml_escaped;

const std::optional<Interval>& gain_of(const ScalingPoint& point, ScalingMode mode) {
  return mode == ScalingMode::kWeak ? point.efficiency : point.speedup;
}

std::string shown_gain(const ScalingPoint& point, ScalingMode mode) {
  const bool weak = mode == ScalingMode::kWeak;
  return shown(gain_of(point, mode), weak ? 100 : 1, weak ? " %" : " ×");
}

std::string ranks_of(const ScalingPoint& point) { return fmt::format("{}{}", point.ranks, point.crowded ? "*" : ""); }

std::string of_ranks(int ranks) { return ranks == 1 ? "1 rank" : fmt::format("{} ranks", ranks); }

std::vector<const ScalingSeries*> series_in(const ScalingReport& report, ScalingMode mode) {
  std::vector<const ScalingSeries*> all;
  for (const auto& series : report.series)
    if (series.mode == mode) all.push_back(&series);
  return all;
}

/// The x axis, and where more threads than cores begin.
void set_ranks(LinePlot& plot, const std::vector<ScalingPoint>& points, const std::string& places) {
  plot.x = {.label = "ranks (processes)", .scale = Axis::Scale::kLog2};
  for (const auto& point : points) plot.x.ticks.push_back(point.ranks);
  const auto crowd = std::ranges::find_if(points, &ScalingPoint::crowded);
  if (crowd == points.end()) return;
  plot.shaded_from = crowd == points.begin() ? crowd->ranks : std::sqrt(1.0 * crowd->ranks * std::prev(crowd)->ranks);
  plot.shaded_label = "more than " + places;
}

/// Efficiency of all models, or speed-up.
LinePlot gains_plot(const ScalingReport& report, ScalingMode mode) {
  const bool weak = mode == ScalingMode::kWeak;
  const auto all = series_in(report, mode);
  LinePlot plot;
  plot.title = weak ? "Weak scaling: each rank keeps its batch" : "Strong scaling: all share one batch";
  set_ranks(plot, all.front()->points, report.places_are);
  const double first = all.front()->points.front().ranks, last = all.front()->points.back().ranks;
  plot.series.push_back({.name = "ideal",
                         .points = {{.x = first, .y = weak ? 100 : 1.0}, {.x = last, .y = weak ? 100 : last / first}},
                         .style = Series::Style::kReference});
  // Of what is measured; wide error bars are cut.
  double least = 1, most = weak ? 100 : std::max(2.0, last / first);
  std::vector<std::string> words;
  for (const ScalingSeries* series : all) {
    Series line = {.name = series->model, .points = {}};
    std::vector<std::string> points;
    for (const auto& point : series->points) {
      const auto& gain = gain_of(point, mode);
      if (!gain) continue;
      const double scale = weak ? 100 : 1;
      line.points.push_back({.x = static_cast<double>(point.ranks),
                             .y = scale * gain->middle,
                             .low = scale * gain->low,
                             .high = scale * gain->high,
                             .hollow = point.crowded});
      least = std::min(least, scale * std::max(gain->low, gain->middle / 1.5));
      most = std::max(most, scale * std::min(gain->high, gain->middle * 1.5));
      points.push_back(fmt::format("{} on {}", shown_gain(point, mode), of_ranks(point.ranks)));
    }
    words.push_back(series->model + ": " + join(points, ", "));
    plot.series.push_back(std::move(line));
  }
  if (weak)
    plot.y = {.label = "efficiency (%)",
              .low = 0,
              .high = std::max(110.0, 10 * std::ceil(most / 10)),
              .ticks = {0, 20, 40, 60, 80, 100}};
  else
    plot.y = {.label = "speed-up (×)", .scale = Axis::Scale::kLog2, .low = least / 1.08, .high = most * 1.04};
  plot.alt = fmt::format("{} by number of ranks. {}.", weak ? "Weak efficiency" : "Strong speed-up", join(words, "; "));
  return plot;
}

LinePlot throughput_plot(const ScalingReport& report, const ScalingSeries& series) {
  LinePlot plot;
  plot.title = series.model + ": throughput";
  set_ranks(plot, series.points, report.places_are);
  plot.y = {.label = "samples/s, all ranks"};
  Series line = {.name = series.model, .points = {}};
  std::vector<std::string> words;
  for (const auto& point : series.points) {
    if (point.rounds == 0) continue;
    Series::Point drawn = {.x = static_cast<double>(point.ranks), .y = point.total, .hollow = point.crowded};
    if (point.rounds > 1) {
      drawn.low = point.total - point.total_deviation;
      drawn.high = point.total + point.total_deviation;
    }
    line.points.push_back(drawn);
    words.push_back(fmt::format("{:.0f} on {}", point.total, of_ranks(point.ranks)));
  }
  if (!line.points.empty()) {
    const auto& first = line.points.front();
    const double last = line.points.back().x;
    plot.series.push_back({.name = "ideal",
                           .points = {{.x = first.x, .y = first.y}, {.x = last, .y = first.y * last / first.x}},
                           .style = Series::Style::kReference});
    // A line that is straight where doublings are evenly spaced.
    plot.y.scale = Axis::Scale::kLog2;
    plot.y.low = std::ranges::min(line.points, {}, &Series::Point::y).y / 1.3;
    plot.y.high = 1.15 * std::max(first.y * last / first.x, std::ranges::max(line.points, {}, &Series::Point::y).y);
    for (double tick = first.y; tick <= *plot.y.high; tick *= 2) plot.y.ticks.push_back(std::round(tick));
  }
  plot.alt = fmt::format("Samples per second of {} by number of ranks: {}.", series.model, join(words, ", "));
  plot.series.push_back(std::move(line));
  return plot;
}

BarPlot time_plot(const ScalingSeries& series) {
  BarPlot plot = {.title = series.model + ": time of a step",
                  .alt = {},
                  .x_label = "ranks (processes)",
                  .y = {.label = "ms"},
                  .parts = {"computation", "exposed communication"},
                  .bars = {}};
  std::vector<std::string> words;
  for (const auto& point : series.points) {
    if (point.rounds == 0) continue;
    plot.bars.push_back({ranks_of(point), {point.compute_ms, point.exposed_comm_ms}});
    words.push_back(
        fmt::format("{:.2f} and {:.2f} on {}", point.compute_ms, point.exposed_comm_ms, of_ranks(point.ranks)));
  }
  plot.alt = fmt::format("Milliseconds of a step of {} that compute, and that communication adds: {}.", series.model,
                         join(words, ", "));
  return plot;
}

std::string gains_figure(const ScalingReport& report, ScalingMode mode) {
  const auto all = series_in(report, mode);
  Rows rows = {{"ranks"}};
  for (const ScalingSeries* series : all) rows.front().push_back(series->model);
  for (std::size_t i = 0; i < all.front()->points.size(); ++i) {
    rows.push_back({ranks_of(all.front()->points[i])});
    for (const ScalingSeries* series : all) rows.back().push_back(shown_gain(series->points[i], mode));
  }
  return figure(svg_of(gains_plot(report, mode)), rows);
}

std::string model_figures(const ScalingReport& report, const ScalingSeries& series) {
  Rows rates = {{"ranks", "samples/s per rank", "in total"}};
  Rows times = {{"ranks", "step", "computation", "exposed", "memory of a rank"}};
  for (const auto& point : series.points) {
    if (point.rounds == 0) {
      rates.push_back({ranks_of(point), point.failed.empty() ? "not measured" : "failed: " + point.failed, ""});
      times.push_back({ranks_of(point), "–", "–", "–", "–"});
      continue;
    }
    rates.push_back({ranks_of(point), with_deviation(point.per_rank, point.per_rank_deviation, point.rounds),
                     with_deviation(point.total, point.total_deviation, point.rounds)});
    times.push_back({ranks_of(point), fmt::format("{:.3f} ms", point.step_ms),
                     fmt::format("{:.3f} ms", point.compute_ms), fmt::format("{:.3f} ms", point.exposed_comm_ms),
                     human_bytes(static_cast<double>(point.peak_memory_bytes))});
  }
  return figure(svg_of(throughput_plot(report, series)), rates) + figure(svg_of(time_plot(series)), times);
}

/// What whoever pays wants to know first, of the largest number of ranks that have a core each.
std::string summary_of(const ScalingReport& report) {
  std::string html = "<ul class=\"summary\">\n";
  for (const auto& series : report.series) {
    const ScalingPoint* last = nullptr;
    for (const auto& point : series.points)
      if (point.rounds > 0 && (!point.crowded || last == nullptr)) last = &point;
    if (last == nullptr || last->ranks == series.points.front().ranks || !gain_of(*last, series.mode)) continue;
    const std::string gain = xml_escaped(shown_gain(*last, series.mode)), model = xml_escaped(series.model);
    const std::string ranks = of_ranks(last->ranks), first = of_ranks(series.points.front().ranks);
    html +=
        series.mode == ScalingMode::kWeak
            ? fmt::format("<li><b>{}, growing work:</b> {} keep {} of the speed that each has on {}.</li>\n", model,
                          ranks, gain, first)
            : fmt::format("<li><b>{}, the same work:</b> {} are {} as fast as {}.</li>\n", model, ranks, gain, first);
  }
  return html + "</ul>\n";
}

std::string section_of(const ScalingReport& report, ScalingMode mode) {
  const auto all = series_in(report, mode);
  if (all.empty()) return {};
  const bool weak = mode == ScalingMode::kWeak;
  std::string html = fmt::format(
      "<section>\n<h2>{}</h2>\n<p>{}</p>\n<div class=\"plots\">\n{}</div>\n", weak ? "Weak scaling" : "Strong scaling",
      weak ? fmt::format("Each rank keeps its batch of {} samples, so the work grows with the ranks. Efficiency is the "
                         "throughput of a rank divided by the throughput of a rank among the fewest.",
                         xml_escaped(value_of(report.settings, "batch")))
           : fmt::format("All ranks share one batch of {} samples, so the work stays and each rank has less of it. "
                         "Speed-up is the throughput divided by the throughput of the fewest ranks.",
                         xml_escaped(value_of(report.settings, "global-batch"))),
      gains_figure(report, mode));
  for (const ScalingSeries* series : all)
    html += fmt::format("<h3>{}</h3>\n<div class=\"plots\">\n{}</div>\n", xml_escaped(series->model),
                        model_figures(report, *series));
  return html + "</section>\n";
}

std::string changes_of(const ScalingReport& report) {
  if (report.baseline.empty()) return {};
  Rows rows = {{"case", "before", "now", "change", "p", "outcome"}};
  for (const auto& change : report.changes) {
    if (change.outcome == ScalingChange::Outcome::kMissing)
      rows.push_back({text_of(change.one), "–", "–", "–", "–", name_of(change.outcome)});
    else
      rows.push_back({text_of(change.one), fmt::format("{:.3f} ms", change.before_ms),
                      fmt::format("{:.3f} ms", change.now_ms), fmt::format("{:+.1f} %", change.percent()),
                      fmt::format("{:.3g}", change.p), name_of(change.outcome)});
  }
  return fmt::format(
      "<section>\n<h2>Against an earlier run</h2>\n<p>{}, measured {} with lockstep {}. {}.</p>\n{}"
      "</section>\n",
      xml_escaped(report.baseline), xml_escaped(value_of(report.baseline_machine, "date")),
      xml_escaped(value_of(report.baseline_machine, "lockstep")), xml_escaped(test_in_words(report.slower_by)),
      table_of(rows));
}

}  // namespace

std::string page_of(const ScalingReport& report) {
  const std::string host = value_of(report.machine, "host");
  const std::string where = host.empty() ? value_of(report.machine, "CPU") : host;
  const std::string title = fmt::format("Scaling of {} on {}", value_of(report.settings, "models"), where);
  bool crowded = false;
  for (const auto& series : report.series)
    crowded = crowded || std::ranges::any_of(series.points, &ScalingPoint::crowded);
  std::string html;
  if (const std::string busy = busy_in_words(report.machine); !busy.empty())
    html += fmt::format("<p><b>{}</b></p>\n", xml_escaped(busy));
  html += summary_of(report);
  for (const ScalingMode mode : {ScalingMode::kWeak, ScalingMode::kStrong}) html += section_of(report, mode);
  if (crowded) html += fmt::format("<p class=\"faint\">* more threads than {}</p>\n", xml_escaped(report.places_are));
  html += changes_of(report);
  html += "<section>\n<h2>Where it was measured</h2>\n" + facts_of(report.machine) + "</section>\n";
  html += fmt::format(
      "<section>\n<h2>How it was measured</h2>\n<p>Each number of ranks is a job of its own. All jobs run once in each "
      "of {} "
      "rounds, in an order that alternates, and ratios are taken within a round. ± is {}. In brackets is the {}; error "
      "bars "
      "show both. Exposed communication is a step minus the same step without communication: noise may make it "
      "negative. "
      "Memory is the peak of the rank that needs most.</p>\n{}</section>\n",
      report.rounds, xml_escaped(kDeviationInWords), xml_escaped(kIntervalInWords), facts_of(report.settings));
  return plot::page_of(
      title, fmt::format("{}, lockstep {}", value_of(report.machine, "date"), value_of(report.machine, "lockstep")),
      html);
}

std::string figure_of(const ScalingReport& report) {
  std::vector<LinePlot> plots;
  std::string alt;
  for (const ScalingMode mode : {ScalingMode::kWeak, ScalingMode::kStrong}) {
    if (series_in(report, mode).empty()) continue;
    plots.push_back(gains_plot(report, mode));
    alt += (alt.empty() ? "" : " ") + plots.back().alt;
  }
  const std::string threads = value_of(report.settings, "threads");
  return svg_file(
      plots, alt,
      fmt::format("{}, cores: {}, {} per rank. Means of {} rounds with 95 % confidence intervals; lockstep {}, {}.",
                  value_of(report.machine, "CPU"), value_of(report.machine, "cores"),
                  threads == "1" ? "1 thread" : threads + " threads", report.rounds,
                  value_of(report.machine, "lockstep"), value_of(report.machine, "date")));
}

}  // namespace lockstep::bench
