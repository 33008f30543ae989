// Plots as SVG, of nothing but text: lines with error bars and stacked bars, for pages and for Markdown. Light and dark
// by the reader's choice; series differ in colour (Okabe and Ito's, which differ for colour-blind readers too) and
// marker.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::plot {

/// `text` as part of XML or HTML, of quoted attributes too. What a terminal would not show becomes '?'.
std::string xml_escaped(std::string_view text);

struct Axis {
  enum class Scale : std::uint8_t { kLinear, kLog2, kLog10 };
  std::string label = {};
  Scale scale = Scale::kLinear;
  std::optional<double> low = {}, high = {};  // default: what the points need; from 0 if the scale is linear
  std::vector<double> ticks = {};             // default: round values. Those without space are left out
};

struct Series {
  enum class Style : std::uint8_t {
    kMeasured,   // a line with filled markers
    kPredicted,  // a broken line with hollow ones
    kReference,  // a broken grey line: what is ideal
    kCurve,      // a line of many points with a marker at its end; between their low and high, a band
  };
  struct Point {
    double x = 0, y = 0;
    std::optional<double> low = {}, high = {};  // ends of its error bar
    bool hollow = false;                        // its marker
  };
  std::string name;
  std::vector<Point> points;  // by x
  Style style = Style::kMeasured;
  std::optional<std::size_t> colour = {};  // default: its place among the series that are no references
};

/// Points that are not finite, or not above 0 on a logarithmic axis, are left out.
struct LinePlot {
  std::string title;
  std::string alt;  // for those who cannot see it
  Axis x = {}, y = {};
  std::vector<Series> series = {};
  std::optional<double> shaded_from = {};  // x, in the middle between two points
  std::string shaded_label = {};
};

/// Bars side by side, each a stack of the same parts. Negative values are drawn as none.
struct BarPlot {
  struct Bar {
    std::string label;
    std::vector<double> values;  // one for each part
  };
  std::string title;
  std::string alt;
  std::string x_label = {};
  Axis y = {};  // linear
  std::vector<std::string> parts = {};
  std::vector<Bar> bars = {};
};

/// What was done when, row by row; rows of one group belong together.
struct Timeline {
  struct Span {
    double begin = 0, end = 0;
    std::size_t part = 0;
    std::string label = {};  // in full where it fits, and for those who point at it
  };
  struct Row {
    std::string label;
    std::vector<Span> spans;
    bool begins_group = false;
  };
  std::string title;
  std::string alt;
  std::string x_label;  // from 0
  std::vector<std::string> parts = {};
  std::vector<Row> rows = {};
};

/// An <svg> element for a page that has plot_style().
std::string svg_of(const LinePlot& plot);
std::string svg_of(const BarPlot& plot);
std::string svg_of(const Timeline& timeline);
/// Rules of CSS.
std::string plot_style();

/// A file of its own: the plots side by side, with a line of text below.
std::string svg_file(std::span<const LinePlot> plots, const std::string& alt, const std::string& note);

}  // namespace lockstep::plot
