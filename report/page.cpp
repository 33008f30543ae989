// lockstep report: the page.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "base/version.h"
#include "options/sources.h"
#include "options/values.h"
#include "plot/page.h"
#include "plot/plot.h"
#include "report/report.h"

namespace lockstep::report {
namespace {

using plot::Axis;
using plot::LinePlot;
using plot::Rows;
using plot::Series;
using plot::xml_escaped;

constexpr std::size_t kMostMarkers = 40;      // more points are a curve
constexpr std::size_t kMostIncidents = 200;   // of a run, in its table
constexpr std::size_t kMostTracedRanks = 16;  // in the timeline and the bars

/// A series of a plot with what its table says.
struct Drawn {
  Series series;
  Extent extent;
};

/// Of a figure with some curves: `x` are steps.
class CurveFigure {
 public:
  CurveFigure(std::string title, std::string unit) : title_(std::move(title)), unit_(std::move(unit)) {}

  void add(const std::string& name, const std::vector<double>& x, const std::vector<double>& y, std::size_t colour,
           bool few) {
    const Extent extent = extent_of(x, y);
    if (extent.points == 0) return;
    Series series = {.name = name, .points = {}, .style = Series::Style::kCurve, .colour = colour};
    if (few && extent.points <= kMostMarkers) series.style = Series::Style::kPredicted;
    const bool in_bins = extent.points > kMostBins;
    for (const Bin& bin : binned(x, y)) {
      Series::Point point = {.x = bin.x, .y = bin.mean, .hollow = few};
      if (in_bins) {
        point.low = bin.least;
        point.high = bin.most;
      }
      series.points.push_back(point);
    }
    drawn_.push_back({std::move(series), extent});
  }

  std::string html() const {
    if (drawn_.empty()) return {};
    LinePlot plot = {.title = title_, .alt = {}, .x = {.label = "step"}, .y = {.label = unit_}, .series = {}};
    double least = kNone, most = kNone;
    std::vector<std::string> words;
    Rows rows = {{"curve", "points", "first", "least", "greatest", "last"}};
    for (const auto& [series, extent] : drawn_) {
      plot.series.push_back(series);
      least = std::fmin(least, extent.least);
      most = std::fmax(most, extent.most);
      words.push_back(fmt::format("{} from {} to {}", series.name, shown(extent.first), shown(extent.last)));
      rows.push_back({series.name, fmt::to_string(extent.points), shown(extent.first),
                      fmt::format("{} at {}", shown(extent.least), shown(extent.least_at)),
                      fmt::format("{} at {}", shown(extent.most), shown(extent.most_at)), shown(extent.last)});
    }
    constexpr double kWide = 30;  // of which a linear axis would show one end only
    if (least > 0 && most / least > kWide) plot.y.scale = Axis::Scale::kLog10;
    plot.alt = fmt::format("{} by step: {}.", title_, join(words, "; "));
    return plot::figure(svg_of(plot), rows);
  }

 private:
  std::string title_, unit_;
  std::vector<Drawn> drawn_;
};

using Runs = std::vector<RecordedRun>;

/// Of one run its kind of curve is the colour, of several the run.
std::string curve_name(const Runs& runs, const RecordedRun& of, const std::string& kind) {
  return runs.size() == 1 ? kind : fmt::format("{}: {}", of.name, kind);
}

struct SplitOf {
  std::string split;
  bool of_average = false;
  bool operator<(const SplitOf& other) const {
    return std::tie(split, of_average) < std::tie(other.split, other.of_average);
  }
};

std::string words_of(const SplitOf& of) { return split_text(of.split) + (of.of_average ? ", moving average" : ""); }

std::set<SplitOf> splits_of(const Run& run) {
  std::set<SplitOf> splits;
  for (const auto& evaluation : run.evaluations) splits.insert({evaluation.split, evaluation.of_average});
  return splits;
}

/// Of all splits of run `i`.
void add_evaluations(CurveFigure& figure, const Runs& runs, std::size_t i, const std::string& name) {
  std::size_t colour = i;
  for (const auto& of : splits_of(runs[i].run)) {
    const Curve curve = curve_of(runs[i].run, name, of.split, of.of_average);
    figure.add(curve_name(runs, runs[i], words_of(of)), curve.x, curve.y, runs.size() == 1 ? ++colour : i, true);
  }
}

std::string loss_figure(const Runs& runs) {
  CurveFigure figure("Loss", "mean over the global batch");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i].run;
    figure.add(curve_name(runs, runs[i], "training"), run.of(Field::kStep), run.of(Field::kLoss), i, false);
    add_evaluations(figure, runs, i, "loss");
  }
  return figure.html();
}

/// The figures of evaluations beside the loss, a plot each.
std::string evaluation_figures(const Runs& runs) {
  std::vector<std::string> names;
  for (const auto& recorded : runs)
    for (const auto& evaluation : recorded.run.evaluations)
      for (const auto& [name, value] : evaluation.figures)
        if (name != "loss" && std::ranges::find(names, name) == names.end()) names.push_back(name);
  std::string html;
  for (const auto& name : names) {
    std::string title = name;
    title[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(title[0])));
    CurveFigure figure(title, name);
    for (std::size_t i = 0; i < runs.size(); ++i) add_evaluations(figure, runs, i, name);
    html += figure.html();
  }
  return html;
}

std::string field_figure(const Runs& runs, const std::string& title, const std::string& unit,
                         const std::vector<std::pair<Field, std::string>>& fields, double scale = 1,
                         std::size_t left_out = 0) {
  CurveFigure figure(title, unit);
  std::size_t colour = 0;
  for (const auto& recorded : runs)
    for (const auto& [field, name] : fields) {
      std::vector<double> values = recorded.run.of(field);
      for (double& value : values) value *= scale;
      std::fill_n(values.begin(), std::min(left_out, values.size()), kNone);
      figure.add(curve_name(runs, recorded, name), recorded.run.of(Field::kStep), values, colour++, false);
    }
  return figure.html();
}

std::string section(const std::string& title, const std::string& body, const std::string& lead = {}) {
  if (body.empty()) return {};
  return fmt::format("<section>\n<h2>{}</h2>\n{}{}</section>\n", xml_escaped(title),
                     lead.empty() ? "" : fmt::format("<p>{}</p>\n", xml_escaped(lead)), body);
}

std::string plots(const std::string& figures) {
  return figures.empty() ? "" : "<div class=\"plots\">\n" + figures + "</div>\n";
}

/// Of each rank, where a step's time went.
std::string phases_figure(const RecordedRun& recorded) {
  const auto means = mean_phases(*recorded.trace);
  plot::BarPlot plot = {
      .title = "Time of a step, by rank", .alt = {}, .x_label = "rank", .y = {.label = "ms"}, .parts = {}, .bars = {}};
  Rows rows = {{"rank"}};
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    plot.parts.emplace_back(name_of(static_cast<Phase>(phase)));
    rows.front().push_back(plot.parts.back() + ", ms");
  }
  for (std::size_t rank = 0; rank < means.size(); ++rank) {
    if (rank < kMostTracedRanks) plot.bars.push_back({fmt::to_string(rank), means[rank]});
    rows.push_back({fmt::to_string(rank)});
    for (const double ms : means[rank]) rows.back().push_back(fmt::format("{:.4g}", ms));
  }
  plot.alt =
      fmt::format("Mean milliseconds of each phase of a step, of {} ranks; the table has the numbers.", means.size());
  return plot::figure(svg_of(plot), rows);
}

std::string timeline_figure(const RecordedRun& recorded) {
  const auto steps = typical_step(*recorded.trace);
  plot::Timeline timeline = {.title = fmt::format("Step {} on all ranks", steps.front()->step),
                             .alt = {},
                             .x_label = "ms",
                             .parts = {},
                             .rows = {}};
  for (std::size_t phase = 0; phase <= kPhases; ++phase)
    if (phase != static_cast<std::size_t>(Phase::kOther))
      timeline.parts.emplace_back(name_of(static_cast<Phase>(phase)));
  const auto part_of = [](Phase phase) {  // in the legend
    return static_cast<std::size_t>(phase) - (phase > Phase::kOther ? 1 : 0);
  };
  double begin = steps.front()->begin;
  for (const TracedStep* step : steps) begin = std::min(begin, step->begin);
  Rows rows = {{"rank", "step, ms", "collectives, ms", "hidden by computation, ms", "hidden"}};
  std::size_t ranks = 0;
  for (const TracedStep* step : steps) {
    const Overlap overlap = overlap_of(*step);
    rows.push_back(
        {fmt::to_string(step->rank), fmt::format("{:.4g}", step->end - step->begin),
         fmt::format("{:.4g}", overlap.collectives_ms), fmt::format("{:.4g}", overlap.hidden_ms),
         overlap.collectives_ms > 0 ? fmt::format("{:.0f} %", 100 * overlap.hidden_ms / overlap.collectives_ms) : "–"});
    if (ranks++ >= kMostTracedRanks) continue;
    std::map<int, plot::Timeline::Row> by_row;
    for (const auto& span : step->spans) {
      plot::Timeline::Row& row = by_row[span.row];
      row.spans.push_back({span.begin - begin, span.end - begin, part_of(span.phase),
                           fmt::format("{}: {:.4g} ms", span.name, span.end - span.begin)});
    }
    bool first = true;
    for (auto& [number, row] : by_row) {
      row.label = number < 1000 ? fmt::format("rank {}", step->rank) : fmt::format("bucket {}", number - 1000);
      row.begins_group = std::exchange(first, false);
      timeline.rows.push_back(std::move(row));
    }
  }
  timeline.alt =
      fmt::format("What {} ranks did during a step, and their collectives; the table has the numbers.", steps.size());
  return plot::figure(svg_of(timeline), rows);
}

std::string trace_sections(const Runs& runs) {
  std::string html;
  for (const auto& recorded : runs) {
    if (!recorded.trace) continue;
    const std::string of = runs.size() == 1 ? "" : ": " + recorded.name;
    html += section("Where a step's time went" + of, plots(phases_figure(recorded)),
                    fmt::format("Means of {} traced steps. What a rank waits for collectives is what computation does "
                                "not hide of them.",
                                recorded.trace->steps.size() / std::max<std::size_t>(1, recorded.trace->ranks.size())));
    html += section("A step" + of, timeline_figure(recorded),
                    "The step whose time is the median of all. Communication is hidden where a collective runs while "
                    "its rank computes.");
  }
  if (html.empty())
    html = section("Where a step's time went",
                   "<p class=\"faint\">No trace: a run with --trace FILE.json has one, which "
                   "lockstep report takes with --trace FILE.json.</p>\n");
  return html;
}

/// What the end of each run says of its ranks, in words and numbers.
std::string bottlenecks(const Runs& runs) {
  std::string html;
  for (const auto& recorded : runs) {
    const auto facts = facts_of(recorded.run);
    if (!facts) continue;
    if (runs.size() > 1) html += fmt::format("<h3>{}</h3>\n", xml_escaped(recorded.name));
    html += "<ul class=\"summary\">\n";
    for (const auto& line : lines_of(bottlenecks_of(*facts), *facts))
      html += fmt::format("<li>{}</li>\n", xml_escaped(line));
    html += "</ul>\n";
    plot::BarPlot plot = {.title = "Time of a step, by rank",
                          .alt = {},
                          .x_label = "rank",
                          .y = {.label = "ms"},
                          .parts = {"waiting for data", "computing", "waiting for ranks"},
                          .bars = {}};
    Rows rows = {{"rank", "host", "waiting for data, ms", "computing, ms", "waiting for ranks, ms"}};
    for (std::size_t rank = 0; rank < facts->ranks.size(); ++rank) {
      const auto& [host, data, compute, wait] = facts->ranks[rank];
      if (rank < kMostTracedRanks) plot.bars.push_back({fmt::to_string(rank), {data, compute, wait}});
      rows.push_back({fmt::to_string(rank), host, shown(data), shown(compute), shown(wait)});
    }
    plot.alt =
        fmt::format("Mean milliseconds that {} ranks wait and compute; the table has the numbers.", rows.size() - 1);
    html += plots(plot::figure(svg_of(plot), rows));
  }
  return section("Why it takes as long as it does", html, "Means of all steps but the first few.");
}

std::string time_text(double unix_s) {
  constexpr double kYear3000 = 32503680000;
  if (!(unix_s >= 0 && unix_s < kYear3000)) return "–";
  return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(static_cast<std::time_t>(unix_s)));
}

std::string incidents_of(const Runs& runs) {
  std::string html;
  for (const auto& recorded : runs) {
    std::string own;
    const auto& incidents = recorded.run.incidents;
    if (!incidents.empty()) {
      Rows rows = {{"what", "after step", "when", "text"}};
      for (std::size_t i = 0; i < std::min(kMostIncidents, incidents.size()); ++i)
        rows.push_back(
            {incidents[i].kind, shown(incidents[i].step), time_text(incidents[i].unix_s), incidents[i].text});
      own += plot::table_of(rows);
      if (incidents.size() > kMostIncidents)
        own += fmt::format("<p class=\"faint\">{} more are in {}</p>\n", incidents.size() - kMostIncidents,
                           xml_escaped(recorded.run.path));
    }
    if (!recorded.launcher.empty()) {
      Rows rows = {{"the launcher", "said"}};
      for (const auto& incident : recorded.launcher) rows.push_back({incident.kind, incident.text});
      own += "<h3>Attempts</h3>\n" + plot::table_of(rows);
    }
    if (!recorded.flights.empty()) {
      Rows rows = {{"flight record"}};
      for (const auto& text : recorded.flights) rows.push_back({text});
      own += "<h3>What ranks did last</h3>\n" + plot::table_of(rows);
    }
    if (!own.empty() && runs.size() > 1) own.insert(0, fmt::format("<h3>{}</h3>\n", xml_escaped(recorded.name)));
    html += own;
  }
  return section("Warnings, restarts, ends", html.empty() ? "<p>None is on record.</p>\n" : html);
}

std::string checkpoints_of(const Runs& runs) {
  Rows rows = {
      {"run", "checkpoints", "bytes of the last", "write, ms, mean", "training stood still, ms, mean", "most"}};
  for (const auto& recorded : runs) {
    const auto& all = recorded.run.checkpoints;
    if (all.empty()) continue;
    double write = 0, held = 0, most = 0;
    for (const auto& one : all) {
      write += one.write_ms / static_cast<double>(all.size());
      held += one.held_up_ms / static_cast<double>(all.size());
      most = std::max(most, one.held_up_ms);
    }
    rows.push_back({recorded.name, fmt::to_string(all.size()), human_bytes(all.back().bytes), shown(write), shown(held),
                    shown(most)});
  }
  return rows.size() == 1 ? "" : section("Checkpoints", plot::table_of(rows));
}

std::string memory_of(const Runs& runs) {
  std::string figures =
      plots(field_figure(runs, "Memory of rank 0", "MiB", {{Field::kMemoryBytes, "memory"}}, 1.0 / (1 << 20)));
  Rows rows = {{"run", "rank", "host", "device", "peak of resident memory"}};
  for (const auto& recorded : runs) {
    if (!recorded.run.final || recorded.run.starts.empty()) continue;
    const auto& peaks = recorded.run.final->peak_memory_bytes;
    const auto& ranks = recorded.run.starts.back().ranks;
    for (std::size_t rank = 0; rank < std::min(peaks.size(), ranks.size()); ++rank)
      rows.push_back(
          {recorded.name, fmt::to_string(rank), ranks[rank].host, ranks[rank].device, human_bytes(peaks[rank])});
  }
  if (rows.size() > 1) figures += plot::table_of(rows);
  return section("Memory", figures);
}

std::string settings_section(const Runs& runs) {
  std::vector<const Run*> all;
  for (const auto& recorded : runs) all.push_back(&recorded.run);
  std::string html;
  if (runs.size() > 1) {
    Rows rows = {{"setting"}};
    for (const auto& recorded : runs) rows.front().push_back(recorded.name);
    for (const auto& name : differing_settings(all)) {
      rows.push_back({name});
      for (const Run* run : all) {
        const auto setting = setting_of(*run, name);
        rows.back().push_back(setting ? setting->value : "–");
      }
    }
    html += rows.size() > 1 ? "<h3>Those that differ</h3>\n" + plot::table_of(rows) : "<p>All are equal.</p>\n";
  }
  for (const auto& recorded : runs) {
    if (recorded.run.starts.empty()) continue;
    Rows given = {{"setting", "value", "from"}};
    std::vector<std::string> defaults;
    for (const auto& [name, value, from] : recorded.run.starts.back().settings) {
      if (from == "default")
        defaults.push_back(fmt::format("{} {}", name, value.empty() ? "–" : value));
      else
        given.push_back({name, value, from});
    }
    html += fmt::format("<h3>{}</h3>\n", runs.size() > 1 ? xml_escaped("Given to " + recorded.name) : "Given");
    html += given.size() > 1 ? plot::table_of(given) : "<p>None.</p>\n";
    if (!defaults.empty())
      html += fmt::format("<p class=\"faint\">Defaults: {}</p>\n", xml_escaped(join(defaults, ", ")));
  }
  return section("Settings", html);
}

std::string environment_of(const Runs& runs) {
  std::string html;
  for (const auto& recorded : runs) {
    if (recorded.run.starts.empty()) continue;
    const Start& start = recorded.run.starts.back();
    if (runs.size() > 1) html += fmt::format("<h3>{}</h3>\n", xml_escaped(recorded.name));
    std::vector<std::string> ranks;
    for (std::size_t i = 0; i < start.ranks.size(); ++i)
      ranks.push_back(fmt::format("{}: {}, {}", i, start.ranks[i].host, start.ranks[i].device));
    std::vector<std::string> parts;
    for (const auto& part : recorded.run.data)
      parts.push_back(fmt::format("{}: {} samples{}", part.name, shown(part.samples),
                                  std::isnan(part.classes) ? "" : fmt::format(", {} classes", shown(part.classes))));
    html += plot::facts_of({{"command", start.command},
                            {"model", fmt::format("{}, {:.0f} parameters, {:.0f} of them trained", start.model,
                                                  start.parameters, start.trained_parameters)},
                            {"data", join(parts, "; ")},
                            {"data_sha256", start.data_sha256},
                            {"ranks", join(ranks, "; ")},
                            {"instruction set", start.instruction_set},
                            {"lockstep", start.version},
                            {"git", start.git},
                            {"began", time_text(start.unix_s)},
                            {"params_sha256", recorded.run.final ? recorded.run.final->params_sha256 : ""}});
  }
  return section("Environment", html);
}

std::string summary_of(const Runs& runs) {
  std::string html = "<ul class=\"summary\">\n";
  for (const auto& recorded : runs) {
    const Run& run = recorded.run;
    const auto& steps = run.of(Field::kStep);
    std::vector<std::string> words;
    const double planned = run.starts.empty() ? kNone : run.starts.back().planned_steps;
    if (run.final)
      words.push_back(fmt::format("{:.0f} steps in {}", run.final->steps, duration_text(run.final->wall_s)));
    else if (!steps.empty())
      words.push_back(fmt::format("{:.0f}{} steps so far, without an end on record", steps.back(),
                                  std::isnan(planned) ? "" : fmt::format(" of {:.0f}", planned)));
    const Extent rates = extent_of(steps, run.of(Field::kSamplesPerS));
    if (rates.points > 0) words.push_back(fmt::format("{:.0f} samples/s in the last step", rates.last));
    if (run.final) {
      for (const auto& [name, value] : run.final->figures)
        if (!std::isnan(value)) words.push_back(fmt::format("{} {}", name, shown(value)));
      if (run.final->best) words.push_back("best " + *run.final->best);
    }
    const auto count = [&](const char* kind) { return std::ranges::count(run.incidents, kind, &Incident::kind); };
    for (const char* kind : {"restart", "warning"})
      if (const auto n = count(kind); n > 0) words.push_back(fmt::format("{} {}{}", n, kind, n == 1 ? "" : "s"));
    html +=
        fmt::format("<li>{}{}</li>\n", runs.size() > 1 ? fmt::format("<b>{}:</b> ", xml_escaped(recorded.name)) : "",
                    xml_escaped(join(words, ", ")));
  }
  return html + "</ul>\n";
}

}  // namespace

std::string page_of(const Runs& runs) {
  const Run& first = runs.front().run;
  const std::string model = first.starts.empty() ? "a run" : first.starts.back().model;
  const std::string title = runs.size() > 1        ? fmt::format("{} runs", runs.size())
                            : first.starts.empty() ? runs.front().name
                                                   : fmt::format("{} on {}", model, first.starts.back().data);
  std::string html = summary_of(runs);
  html +=
      section("Learning",
              plots(loss_figure(runs) + evaluation_figures(runs) +
                    field_figure(runs, "Learning rate", "learning rate", {{Field::kLr, "learning rate"}}) +
                    field_figure(runs, "Gradient norm", "L2, before clipping", {{Field::kGradNorm, "gradient norm"}})),
              "Of many steps a curve is the mean of neighbours, and its band reaches from the least to the "
              "greatest of them.");
  html += section("Speed",
                  plots(field_figure(runs, "Throughput", "samples/s, all ranks", {{Field::kSamplesPerS, "samples/s"}}) +
                        field_figure(runs, "Time of a step", "ms",
                                     {{Field::kStepMs, "step"}, {Field::kCommWaitMs, "waiting for collectives"}}, 1,
                                     /*left_out=*/1)),
                  "The first step, which prepares what all others use, is "
                  "not in the figure of times.");
  html += bottlenecks(runs) + trace_sections(runs) + memory_of(runs) + checkpoints_of(runs) + incidents_of(runs) +
          settings_section(runs) + environment_of(runs);
  std::vector<std::string> names;
  for (const auto& recorded : runs) names.push_back(recorded.name);
  return plot::page_of(title, fmt::format("{}, by lockstep {}", join(names, ", "), version()), html);
}

options::OptionTable report_options(ReportOptions& options) {
  options::OptionTable table("report",
                             "Writes a page about training runs: curves, where time went, what happened, settings. It "
                             "is one file that loads nothing.");
  table.positional({.placeholder = "RUN…",
                    .help = "metrics files, or directories with one",
                    .value = options::Setter([&options](const std::string& value) -> std::optional<options::Complaint> {
                      options.runs.push_back(value);
                      return std::nullopt;
                    }),
                    .repeats = true});
  table.group("Flags");
  table.add({.name = "output",
             .synonyms = {"o"},
             .placeholder = "FILE.html",
             .help = "the page",
             .default_text = options.output,
             .value = options::text(options.output)});
  table.add({.name = "trace",
             .placeholder = "FILE.json",
             .help = "what --trace of the run has written: time by phase, and the timeline of a step",
             .value = options::text(options.trace),
             .applies = {.to = "one run", .unless = [&options] {
                           return options::when(options.runs.size() > 1, "there are several");
                         }}});
  table.add({.name = "log-dir",
             .placeholder = "DIR",
             .help = "--log-dir of the launcher: attempts, and what ranks did last",
             .value = options::text(options.log_dir),
             .applies = {.to = "one run", .unless = [&options] {
                           return options::when(options.runs.size() > 1, "there are several");
                         }}});
  options::add_config_option(table);
  return table;
}

std::string report(const ReportOptions& options) {
  Runs runs;
  for (const auto& path : options.runs) {
    for (const auto& other : runs)
      if (is_same_file(other.name, path))
        throw UsageError(fmt::format("report: {} is given twice", path), "give each run once");
    runs.push_back(read_recorded(path, options.trace, options.log_dir));
  }
  for (const auto& recorded : runs)
    for (const std::string& input : {recorded.run.path, options.trace})
      if (!input.empty() && is_same_file(input, options.output))
        throw UsageError(fmt::format("--output {} would overwrite {}", options.output, input), "give another file");
  const std::string page = page_of(runs);
  write_whole_file(options.output, page);
  return fmt::format("{} ({})\n", options.output, human_bytes(static_cast<double>(page.size())));
}

}  // namespace lockstep::report
