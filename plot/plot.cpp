#include "plot/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"

namespace lockstep::plot {
namespace {

constexpr double kWidth = 480, kHeight = 340;                          // of a plot with its labels
constexpr double kLeft = 64, kRight = 464, kBottom = 284, kTick = 18;  // of its frame; of a line of text
constexpr double kLetter = 6.9;                                        // the mean width of one
constexpr double kInset = 22;                                          // points do not lie on the frame
constexpr std::size_t kColours = 6;
constexpr std::array<const char*, kColours> kLight = {"#0072b2", "#d55e00", "#007f5f", "#a8507f", "#8a6200", "#3f7fb8"};
constexpr std::array<const char*, kColours> kDark = {"#56b4e9", "#e6883a", "#2fc49a", "#e39cc3", "#e5b93c", "#9cc9ee"};

std::string theme(const char* paper, const char* ink, const char* faint, const char* grid, const char* shaded,
                  const std::array<const char*, kColours>& colours) {
  std::string rules = fmt::format(
      ".plot text {{ fill: {1}; }} .plot text.faint {{ fill: {2}; }} .plot .paper {{ fill: {0}; }}\n"
      ".plot .shaded {{ fill: {4}; }} .plot .grid {{ stroke: {3}; }} .plot .axis, .plot .ideal {{ stroke: {2}; }}\n",
      paper, ink, faint, grid, shaded);
  for (std::size_t i = 0; i < kColours; ++i)
    rules += fmt::format(".plot .c{0} {{ stroke: {1}; }} .plot .f{0} {{ fill: {1}; }}\n", i, colours[i]);
  return rules + fmt::format(".plot .hollow {{ fill: {0}; }} .plot .bar {{ stroke: {0}; }}\n", paper);
}

/// "2e-4", "0.5", "8192", "16,384", "20k", "1.5M".
std::string label_of(double value) {
  const double size = std::abs(value);
  if (size >= 1e9) return fmt::format("{:g}G", value / 1e9);
  if (size >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (size > 0 && size < 0.01) {
    const auto power = static_cast<int>(std::floor(std::log10(size) + 1e-9));
    return fmt::format("{:.3g}e{}", value / std::pow(10, power), power);
  }
  if (size < 1e4) return fmt::format("{:.4g}", value);
  const auto whole = static_cast<std::int64_t>(std::lround(value));
  if (whole % 1000 == 0) return fmt::format("{}k", whole / 1000);
  return fmt::format("{},{:03}", whole / 1000, std::abs(whole % 1000));
}

double columns(std::string_view text) { return kLetter * columns_of(text); }

std::string text_at(double x, double y, std::string_view words, const char* anchor = "start", const char* kind = "") {
  return fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", kind, x, y, anchor,
                     xml_escaped(words));
}

std::string line_at(const char* kind, double x1, double y1, double x2, double y2) {
  return fmt::format("<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", kind, x1, y1, x2,
                     y2);
}

/// An axis with all that was left to choose, and where its values lie between two ends.
class Scale {
 public:
  Scale(const Axis& axis, const std::vector<double>& values, double begin, double end)
      : scale_(axis.scale), begin_(begin), end_(end) {
    std::vector<double> fit;
    std::ranges::copy_if(values, std::back_inserter(fit), [this](double v) { return can_show(v); });
    double low = fit.empty() ? 1 : std::ranges::min(fit), high = fit.empty() ? 2 : std::ranges::max(fit);
    const bool linear = scale_ == Axis::Scale::kLinear;
    if (linear) low = std::min(low, 0.0);
    low = axis.low.value_or(low);
    high = axis.high.value_or(high);
    if (!(high > low)) high = linear ? low + 1 : low * 2;
    if (linear) {
      const double step = round_step((high - low) / 5);
      if (!axis.high) high = step * std::ceil(high / step - 1e-9);
      if (!axis.low) low = step * std::floor(low / step + 1e-9);
      for (double at = step * std::ceil(low / step - 1e-9); at <= high + step * 1e-9; at += step)
        ticks_.push_back(std::abs(at) < step * 1e-9 ? 0 : at);
    } else {
      const double base = scale_ == Axis::Scale::kLog2 ? 2 : 10;
      const double first = std::ceil(std::log(low) / std::log(base) - 1e-9);
      const double last = std::floor(std::log(high) / std::log(base) + 1e-9);
      const double step = std::max(1.0, std::ceil((last - first) / 8));
      for (double power = first; power <= last; power += step) ticks_.push_back(std::pow(base, power));
    }
    low_ = position(low);
    high_ = position(high);
    if (!axis.ticks.empty()) ticks_ = axis.ticks;
    std::erase_if(ticks_,
                  [&](double v) { return !can_show(v) || position(v) < low_ - 1e-9 || position(v) > high_ + 1e-9; });
  }

  bool can_show(double value) const { return std::isfinite(value) && (scale_ == Axis::Scale::kLinear || value > 0); }
  double at(double value) const {
    const double share = (position(value) - low_) / (high_ - low_);
    return begin_ + std::clamp(share, 0.0, 1.0) * (end_ - begin_);
  }
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  static double round_step(double least) {
    const double decade = std::pow(10, std::floor(std::log10(least)));
    for (const double step : {1.0, 2.0, 5.0})
      if (step * decade >= least * (1 - 1e-9)) return step * decade;
    return 10 * decade;
  }
  double position(double value) const { return scale_ == Axis::Scale::kLinear ? value : std::log(value); }

  Axis::Scale scale_;
  double begin_, end_;
  double low_ = 0, high_ = 1;
  std::vector<double> ticks_;
};

/// What stands above the frame: the title, and one entry for each series, in as many lines as they need.
class Legend {
 public:
  struct Entry {
    std::string name, sign;  // which is 22 wide, at the origin
  };
  Legend(const std::string& title, const std::vector<Entry>& entries, double most = kWidth)
      : svg_(text_at(12, 22, title, "start", "title")) {
    double x = 12;
    for (const auto& entry : entries) {
      const double width = 28 + columns(entry.name) + 18;
      if (x > 12 && x + width > most) {
        x = 12;
        y_ += kTick;
      }
      svg_ += fmt::format("<g transform=\"translate({:.1f} {:.1f})\">{}</g>\n", x, y_ - 4, entry.sign);
      svg_ += text_at(x + 28, y_, entry.name);
      x += width;
    }
    if (entries.empty()) y_ -= kTick;
  }
  const std::string& svg() const { return svg_; }
  double bottom() const { return y_ + 18; }

 private:
  double y_ = 44;
  std::string svg_;
};

std::string marker(std::size_t colour, double x, double y, bool hollow) {
  const std::string kind = fmt::format("dot c{0} {1}", colour, hollow ? "hollow" : fmt::format("f{}", colour));
  switch (colour % 4) {
    case 0: return fmt::format("<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4.5\"/>", kind, x, y);
    case 1:
      return fmt::format("<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"8\" height=\"8\"/>", kind, x - 4, y - 4);
    case 2: return fmt::format("<path class=\"{}\" d=\"M{:.1f} {:.1f}l5 9h-10z\"/>", kind, x, y - 6);
    default:
      return fmt::format("<path class=\"{}\" d=\"M{:.1f} {:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z\"/>", kind, x, y - 5.5);
  }
}

const char* kind_of(Series::Style style) {
  switch (style) {
    case Series::Style::kMeasured:
    case Series::Style::kCurve: return "line";
    case Series::Style::kPredicted: return "line predicted";
    case Series::Style::kReference: break;
  }
  return "ideal";
}

std::string sign_of(const Series& series, std::size_t colour) {
  if (series.style == Series::Style::kReference) return line_at("ideal", 0, 0, 22, 0);
  return line_at(fmt::format("{} c{}", kind_of(series.style), colour).c_str(), 0, 0, 22, 0) +
         marker(colour, 11, 0, series.style == Series::Style::kPredicted);
}

/// The numbers and lines of the axis that goes up, and both labels.
std::string frame(const Scale& y, const std::string& x_label, const std::string& y_label, double top) {
  std::string svg;
  double above = kHeight;
  for (const double tick : y.ticks()) {
    const double at = y.at(tick);
    if (above - at < 12) continue;
    above = at;
    svg += line_at("grid", kLeft, at, kRight, at) + text_at(kLeft - 8, at + 4, label_of(tick), "end", "faint");
  }
  svg += line_at("axis", kLeft, kBottom, kRight, kBottom);
  svg += text_at((kLeft + kRight) / 2, kBottom + 42, x_label, "middle");
  const double middle = (top + kBottom) / 2;
  return svg + fmt::format(
                   "<text x=\"16\" y=\"{0:.1f}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {0:.1f})\">"
                   "{1}</text>\n",
                   middle, xml_escaped(y_label));
}

std::string drawn(const Series& series, std::size_t colour, const Scale& x, const Scale& y) {
  std::string path, marks, band_above, band_below;
  for (const auto& point : series.points) {
    if (!x.can_show(point.x) || !y.can_show(point.y)) continue;
    const double at_x = x.at(point.x), at_y = y.at(point.y);
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", at_x, at_y);
    if (series.style == Series::Style::kReference) continue;
    if (series.style == Series::Style::kCurve) {
      marks = marker(colour, at_x, at_y, point.hollow) + "\n";
      if (!point.low || !point.high || !y.can_show(*point.high)) continue;
      band_above += fmt::format("{}{:.1f} {:.1f}", band_above.empty() ? "M" : "L", at_x, y.at(*point.high));
      band_below.insert(0, fmt::format("L{:.1f} {:.1f}", at_x, y.can_show(*point.low) ? y.at(*point.low) : kBottom));
      continue;
    }
    if (point.low && point.high && std::isfinite(*point.low) && y.can_show(*point.high)) {
      const std::string kind = fmt::format("spread c{}", colour);
      // A logarithmic axis has no end for what is not above 0.
      const double low = y.can_show(*point.low) ? y.at(*point.low) : kBottom, high = y.at(*point.high);
      marks += line_at(kind.c_str(), at_x, low, at_x, high) + line_at(kind.c_str(), at_x - 4, low, at_x + 4, low) +
               line_at(kind.c_str(), at_x - 4, high, at_x + 4, high);
    }
    marks += marker(colour, at_x, at_y, point.hollow || series.style == Series::Style::kPredicted) + "\n";
  }
  if (path.empty()) return {};
  const std::string kind = series.style == Series::Style::kReference
                               ? kind_of(series.style)
                               : fmt::format("{} c{}", kind_of(series.style), colour);
  std::string band;
  if (!band_above.empty())
    band = fmt::format("<path class=\"band f{}\" d=\"{}{}Z\"/>\n", colour, band_above, band_below);
  return fmt::format("{}<path class=\"{}\" d=\"{}\"/>\n{}", band, kind, path, marks);
}

/// All but the <svg> element.
std::string body_of(const LinePlot& plot) {
  std::vector<Legend::Entry> entries;
  std::vector<std::size_t> colours;
  std::vector<double> xs, ys;
  std::size_t next = 0;
  for (const auto& series : plot.series) {
    const bool counts = series.style != Series::Style::kReference;
    colours.push_back(series.colour.value_or(next) % kColours);
    next += counts ? 1 : 0;
    if (!series.name.empty()) entries.push_back({series.name, sign_of(series, colours.back())});
    for (const auto& point : series.points) {
      xs.push_back(point.x);
      ys.insert(ys.end(), {point.y, point.low.value_or(point.y), point.high.value_or(point.y)});
    }
  }
  const Legend legend(plot.title, entries);
  const Scale x(plot.x, xs, kLeft + kInset, kRight - kInset), y(plot.y, ys, kBottom, legend.bottom());
  std::string svg = legend.svg();
  if (plot.shaded_from && x.can_show(*plot.shaded_from)) {
    const double from = x.at(*plot.shaded_from);
    svg += fmt::format("<rect class=\"shaded\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n", from,
                       legend.bottom(), kRight - from, kBottom - legend.bottom());
    svg += text_at(kRight - 6, kBottom - 8, plot.shaded_label, "end", "faint");
  }
  svg += frame(y, plot.x.label, plot.y.label, legend.bottom());
  // From the right: the last one matters most.
  double after = 2 * kWidth;
  for (std::size_t i = x.ticks().size(); i-- > 0;) {
    const std::string label = label_of(x.ticks()[i]);
    const double at = x.at(x.ticks()[i]), half = columns(label) / 2;
    if (at + half > after - 4) continue;
    svg += text_at(at, kBottom + 20, label, "middle", "faint");
    after = at - half;
  }
  for (std::size_t i = 0; i < plot.series.size(); ++i) svg += drawn(plot.series[i], colours[i], x, y);
  return svg;
}

std::string element(const std::string& alt, double width, double height, const std::string& body) {
  return fmt::format(
      "<svg class=\"plot\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" "
      "width=\"{0:g}\" height=\"{1:g}\" role=\"img\" aria-label=\"{2}\">\n{3}</svg>\n",
      width, height, xml_escaped(alt), body);
}

std::string paper(double width, double height) {
  return fmt::format("<rect class=\"paper\" width=\"{:g}\" height=\"{:g}\" rx=\"6\"/>\n", width, height);
}

}  // namespace

std::string xml_escaped(std::string_view text) {
  std::string safe;
  for (const char letter : printable(text)) switch (letter) {
      case '&': safe += "&amp;"; break;
      case '<': safe += "&lt;"; break;
      case '>': safe += "&gt;"; break;
      case '"': safe += "&quot;"; break;
      case '\'': safe += "&#39;"; break;
      default: safe += letter;
    }
  return safe;
}

// Plain classes and no variables: viewers other than browsers do not know those.
std::string plot_style() {
  return std::string(
             ".plot text { font: 13px system-ui, -apple-system, \"Segoe UI\", Helvetica, Arial, sans-serif; }\n"
             ".plot text.title { font-size: 15px; font-weight: 600; } .plot .grid, .plot .axis { stroke-width: 1; }\n"
             ".plot .ideal { stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }\n"
             ".plot .line { stroke-width: 2; fill: none; stroke-linejoin: round; }\n"
             ".plot .predicted { stroke-dasharray: 8 4; } .plot .spread { stroke-width: 1.5; }\n"
             ".plot .dot { stroke-width: 2; } .plot .bar { stroke-width: 1; } .plot .band { fill-opacity: 0.22; }\n"
             ".plot text.small { font-size: 11px; }\n") +
         theme("#ffffff", "#1f2328", "#59636e", "#d8dee4", "#f0f1f3", kLight) +
         "@media screen and (prefers-color-scheme: dark) {\n" +
         theme("#0d1117", "#e6edf3", "#9198a1", "#2a313a", "#1a2028", kDark) + "}\n";
}

std::string svg_of(const LinePlot& plot) {
  return element(plot.alt, kWidth, kHeight, paper(kWidth, kHeight) + body_of(plot));
}

std::string svg_of(const BarPlot& plot) {
  std::vector<Legend::Entry> entries;
  for (std::size_t part = 0; part < plot.parts.size(); ++part)
    entries.push_back({plot.parts[part], fmt::format("<rect class=\"bar f{}\" x=\"4\" y=\"-6\" width=\"14\" "
                                                     "height=\"12\"/>",
                                                     part % kColours)});
  const Legend legend(plot.title, entries);
  std::vector<double> sums;
  for (const auto& bar : plot.bars) {
    sums.push_back(0);
    for (const double value : bar.values) sums.back() += std::isfinite(value) ? std::max(value, 0.0) : 0;
  }
  const Scale y(plot.y, sums, kBottom, legend.bottom());
  std::string svg = paper(kWidth, kHeight) + legend.svg() + frame(y, plot.x_label, plot.y.label, legend.bottom());
  const double width = (kRight - kLeft) / static_cast<double>(std::max<std::size_t>(plot.bars.size(), 1));
  double before = -kWidth;
  for (std::size_t i = 0; i < plot.bars.size(); ++i) {
    const auto& bar = plot.bars[i];
    const double middle = kLeft + (static_cast<double>(i) + 0.5) * width, half = std::min(0.35 * width, 40.0);
    double sum = 0;
    for (std::size_t part = 0; part < bar.values.size(); ++part) {
      if (!std::isfinite(bar.values[part]) || bar.values[part] <= 0) continue;
      const double from = y.at(sum), to = y.at(sum += bar.values[part]);
      svg += fmt::format("<rect class=\"bar f{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n",
                         part % kColours, middle - half, to, 2 * half, from - to);
    }
    if (middle - columns(bar.label) / 2 < before + 4) continue;
    svg += text_at(middle, kBottom + 20, bar.label, "middle", "faint");
    before = middle + columns(bar.label) / 2;
  }
  return element(plot.alt, kWidth, kHeight, svg);
}

std::string svg_of(const Timeline& timeline) {
  constexpr double kWide = 2 * kWidth, kRow = 20, kRowLeft = 128, kRowRight = kWide - 16;
  std::vector<Legend::Entry> entries;
  for (std::size_t part = 0; part < timeline.parts.size(); ++part)
    entries.push_back({timeline.parts[part], fmt::format("<rect class=\"bar f{}\" x=\"4\" y=\"-6\" width=\"14\" "
                                                         "height=\"12\"/>",
                                                         part % kColours)});
  const Legend legend(timeline.title, entries, kWide);
  std::vector<double> ends;
  for (const auto& row : timeline.rows)
    for (const auto& span : row.spans) ends.push_back(span.end);
  const Scale x({}, ends, kRowLeft, kRowRight);
  std::string rows;
  double y = legend.bottom();
  for (const auto& row : timeline.rows) {
    if (row.begins_group) y += 8;
    rows += text_at(kRowLeft - 8, y + 14, row.label, "end", "faint");
    for (const auto& span : row.spans) {
      const double from = x.at(span.begin), width = std::max(0.5, x.at(span.end) - from);
      rows += fmt::format(
          "<rect class=\"bar f{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:g}\">"
          "<title>{}</title></rect>\n",
          span.part % kColours, from, y + 2, width, kRow - 4, xml_escaped(span.label));
    }
    y += kRow;
  }
  std::string axis;
  for (const double tick : x.ticks()) {
    axis += line_at("grid", x.at(tick), legend.bottom(), x.at(tick), y);
    axis += text_at(x.at(tick), y + 18, label_of(tick), "middle", "faint");
  }
  axis += text_at((kRowLeft + kRowRight) / 2, y + 38, timeline.x_label, "middle");
  const double height = y + 50;
  return element(timeline.alt, kWide, height, paper(kWide, height) + legend.svg() + axis + rows);
}

std::string svg_file(std::span<const LinePlot> plots, const std::string& alt, const std::string& note) {
  const double width = kWidth * static_cast<double>(std::max<std::size_t>(plots.size(), 1));
  const std::vector<std::string> lines = wrapped(note, static_cast<int>((width - 32) / kLetter));
  const double height = kHeight + kTick * static_cast<double>(lines.size()) + (lines.empty() ? 0 : 8);
  std::string svg = fmt::format("<style>\n{}</style>\n{}", plot_style(), paper(width, height));
  for (std::size_t i = 0; i < plots.size(); ++i)
    svg += fmt::format("<g transform=\"translate({:g} 0)\">\n{}</g>\n", kWidth * static_cast<double>(i),
                       body_of(plots[i]));
  for (std::size_t i = 0; i < lines.size(); ++i)
    svg += text_at(16, kHeight + kTick * (static_cast<double>(i) + 0.6), lines[i], "start", "faint");
  return element(alt, width, height, svg);
}

}  // namespace lockstep::plot
