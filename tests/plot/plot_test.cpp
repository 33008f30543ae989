#include "plot/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace lockstep::plot {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

LinePlot example_plot() {
  LinePlot plot{.title = "a < b & c", .alt = "the \"alt\""};
  plot.x = {.label = "ranks", .scale = Axis::Scale::kLog2, .ticks = {1, 2, 4}};
  plot.y = {.label = "percent"};
  plot.series.push_back({.name = "ideal", .points = {{1, 100}, {4, 100}}, .style = Series::Style::kReference});
  plot.series.push_back({.name = "cnn", .points = {{1, 100}, {2, 90, 80, 95}, {4, 70, {}, {}, true}}});
  return plot;
}

TEST(LinePlot, HasLinesMarkersErrorBarsAndWords) {
  const std::string svg = svg_of(example_plot());
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, HasSubstr("aria-label=\"the &quot;alt&quot;\""));
  EXPECT_EQ(occurrences(svg, "<circle"), 4u) << "three points and the legend";
  EXPECT_EQ(occurrences(svg, "hollow"), 1u);
  EXPECT_EQ(occurrences(svg, "class=\"spread c0\""), 3u) << "one error bar with its ends";
  EXPECT_EQ(occurrences(svg, "class=\"ideal\""), 2u) << "the line and the legend";
  for (const char* tick : {">1<", ">2<", ">4<", ">0<", ">100<", ">ranks<", ">percent<", ">cnn<"})
    EXPECT_THAT(svg, HasSubstr(tick));
}

TEST(LinePlot, LeavesOutWhatAnAxisCannotShow) {
  LinePlot plot = example_plot();
  plot.y.scale = Axis::Scale::kLog10;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  plot.series.push_back({.name = "odd", .points = {{1, nan}, {2, 0}, {3, -5}, {-1, 10}, {4, HUGE_VAL}}});
  const std::string svg = svg_of(plot);
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
  EXPECT_EQ(occurrences(svg, "<rect class=\"dot"), 1u) << "the legend's alone";
  EXPECT_THAT(svg_of(LinePlot{}), HasSubstr("</svg>")) << "nothing at all";
}

TEST(LinePlot, ErrorBarsBelowZeroEndAtTheFrameOfALogarithmicAxis) {
  LinePlot plot = example_plot();
  plot.y.scale = Axis::Scale::kLog2;
  plot.series[1].points = {{1, 100}, {2, 90, -20, 200}};
  EXPECT_EQ(occurrences(svg_of(plot), "class=\"spread c0\""), 3u);
}

TEST(LinePlot, ManyTicksKeepTheirDistance) {
  LinePlot plot = example_plot();
  plot.x.ticks.clear();
  plot.series[1].points.clear();
  for (int n = 1; n <= 16384; n *= 2) {
    plot.x.ticks.push_back(n);
    plot.series[1].points.push_back({static_cast<double>(n), 50});
  }
  const std::string svg = svg_of(plot);
  EXPECT_THAT(svg, HasSubstr(">16,384<"));
  EXPECT_LT(occurrences(svg, "text-anchor=\"middle\""), 15u + 3);
}

TEST(BarPlot, StacksPartsAndIgnoresWhatIsNegative) {
  BarPlot plot{.title = "step", .alt = "bars", .x_label = "ranks", .y = {.label = "ms"}, .parts = {"a", "b"}};
  plot.bars = {{"1", {10, -0.1}}, {"2", {10, 5}}};
  const std::string svg = svg_of(plot);
  EXPECT_EQ(occurrences(svg, "<rect class=\"bar f0\""), 3u);
  EXPECT_EQ(occurrences(svg, "<rect class=\"bar f1\""), 2u);
}

TEST(SvgFile, StandsAloneAndKnowsDarkPaper) {
  const std::vector<LinePlot> plots = {example_plot(), example_plot()};
  const std::string svg = svg_file(plots, "two", "where and when");
  EXPECT_TRUE(svg.starts_with("<svg"));
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(svg, HasSubstr("where and when"));
  EXPECT_EQ(occurrences(svg, "a &lt; b"), 2u);
}

}  // namespace
}  // namespace lockstep::plot
