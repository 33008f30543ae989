#include "inference/workers.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "data/text_file.h"

namespace lockstep::inference {

void check_finite(std::span<const float> results) {
  for (const float result : results)
    if (!std::isfinite(result))
      throw DivergedError(fmt::format("the model's results are {}", std::isnan(result) ? "NaN" : "infinite"),
                          "its weights are corrupt, or its training diverged");
}

std::span<const Ranked> Ranking::of(std::span<const float> logits, int top) {
  check_finite(logits);
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto count = std::min(order_.size(), static_cast<std::size_t>(top));
  const auto logit_of = [&](std::int32_t i) { return logits[static_cast<std::size_t>(i)]; };
  std::ranges::partial_sort(order_, order_.begin() + static_cast<std::ptrdiff_t>(count),
                            [&](std::int32_t a, std::int32_t b) {
                              return logit_of(a) > logit_of(b) || (logit_of(a) == logit_of(b) && a < b);
                            });
  const double largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit} - largest);
  ranked_.clear();
  for (const std::int32_t i : std::span(order_).first(count))
    ranked_.push_back({i, std::exp(double{logit_of(i)} - largest) / sum});
  return ranked_;
}

std::vector<std::string> class_names_of(const InferConfig& config, const InferModel& model) {
  const std::string& path = config.class_names;
  if (path.empty()) return model.metadata ? model.metadata->class_names : std::vector<std::string>();
  const data::TextFile file(path);
  std::vector<std::string> names;
  for (const std::string& line : split(file.text(), '\n')) names.emplace_back(trim(line));
  while (!names.empty() && names.back().empty()) names.pop_back();
  if (std::cmp_not_equal(names.size(), model.spec.classes))
    throw UsageError(fmt::format("{} has {} names, and the model {} classes", path, names.size(), model.spec.classes),
                     "give a file with one name per line, in the classes' order");
  return names;
}

}  // namespace lockstep::inference
