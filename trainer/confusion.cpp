#include "trainer/confusion.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/json.h"
#include "base/text.h"

namespace lockstep::trainer {
namespace {

constexpr std::int64_t kMostShown = 20;  // classes whose counts fit a terminal

double ratio(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : std::numeric_limits<double>::quiet_NaN();
}

double or_zero(double value) { return std::isnan(value) ? 0.0 : value; }

std::string name_of(std::int64_t label, const std::vector<std::string>& names) {
  return label < std::ssize(names) ? names[static_cast<std::size_t>(label)] : fmt::to_string(label);
}

std::string line_of(const std::string& name, std::size_t width, const Confusion::Figures& figures) {
  const auto cell = [](double value) { return std::isnan(value) ? std::string("–") : fmt::format("{:.4f}", value); };
  return fmt::format("{:<{}}  {:>9}  {:>6}  {:>6}  {:>7}\n", name, width, cell(figures.precision), cell(figures.recall),
                     cell(figures.f1), figures.support);
}

}  // namespace

Confusion::Confusion(std::vector<std::int64_t> counts)
    : classes_(std::llround(std::sqrt(static_cast<double>(counts.size())))), counts_(std::move(counts)) {}

void Confusion::count(std::span<const float> logits, std::span<const std::int32_t> labels) {
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] < 0 || labels[i] >= classes_) continue;
    const auto row = logits.subspan(i * static_cast<std::size_t>(classes_), static_cast<std::size_t>(classes_));
    const auto taken = std::ranges::max_element(row) - row.begin();
    ++counts_[static_cast<std::size_t>(labels[i] * classes_ + taken)];
  }
}

Confusion::Figures Confusion::figures_of(std::int64_t label) const {
  std::int64_t support = 0, taken = 0;
  for (std::int64_t other = 0; other < classes_; ++other) {
    support += at(label, other);
    taken += at(other, label);
  }
  const std::int64_t right = at(label, label);
  return {.precision = ratio(right, taken),
          .recall = ratio(right, support),
          .f1 = ratio(2 * right, support + taken),
          .support = support};
}

Confusion::Figures Confusion::mean() const {
  Figures sum;
  std::int64_t classes = 0;
  for (std::int64_t label = 0; label < classes_; ++label) {
    const Figures one = figures_of(label);
    if (std::isnan(one.f1)) continue;
    ++classes;
    sum.precision += or_zero(one.precision);
    sum.recall += or_zero(one.recall);
    sum.f1 += one.f1;
    sum.support += one.support;
  }
  const auto all = static_cast<double>(std::max<std::int64_t>(1, classes));
  return {.precision = sum.precision / all, .recall = sum.recall / all, .f1 = sum.f1 / all, .support = sum.support};
}

std::string table_of(const Confusion& confusion, const std::vector<std::string>& names) {
  std::size_t width = std::string("macro mean").size();
  for (std::int64_t label = 0; label < confusion.classes(); ++label)
    width = std::max(width, name_of(label, names).size());
  std::string text = fmt::format("{:<{}}  precision  recall      F1  support\n", "class", width);
  for (std::int64_t label = 0; label < confusion.classes(); ++label)
    text += line_of(name_of(label, names), width, confusion.figures_of(label));
  text += line_of("macro mean", width, confusion.mean());
  if (confusion.classes() > kMostShown) return text;
  text += "samples of each class (rows), and what they were taken for:\n";
  for (std::int64_t label = 0; label < confusion.classes(); ++label) {
    text += fmt::format("{:<{}} ", name_of(label, names), width);
    for (std::int64_t taken = 0; taken < confusion.classes(); ++taken)
      text += fmt::format(" {:>6}", confusion.at(label, taken));
    text += '\n';
  }
  return text;
}

JsonObject json_of(const Confusion& confusion, const std::vector<std::string>& names) {
  const auto object_of = [](const Confusion::Figures& figures) {
    return JsonObject{
        {"precision", figures.precision}, {"recall", figures.recall}, {"f1", figures.f1}, {"support", figures.support}};
  };
  std::vector<JsonText> classes, rows;
  for (std::int64_t label = 0; label < confusion.classes(); ++label) {
    JsonObject one = object_of(confusion.figures_of(label));
    one.add("name", name_of(label, names));
    classes.emplace_back(one);
    std::vector<std::int64_t> row;
    for (std::int64_t taken = 0; taken < confusion.classes(); ++taken) row.push_back(confusion.at(label, taken));
    rows.emplace_back(row);
  }
  return {{"event", "classes"}, {"classes", classes}, {"macro", object_of(confusion.mean())}, {"confusion", rows}};
}

}  // namespace lockstep::trainer
