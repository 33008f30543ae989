#include "data/class_report.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::data {
namespace {

constexpr std::size_t kShown = 6;

std::string shown(const std::string& name) { return printable(cut_columns(name, 24)); }

std::string listed_classes(const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const auto& name : std::span(names).first(std::min(names.size(), kShown)))
    all.push_back("'" + shown(name) + "'");
  if (names.size() > kShown) all.push_back(fmt::format("{} more", names.size() - kShown));
  return listed(all);
}

/// Those with samples, and those without, where both are known.
std::pair<std::vector<std::string>, std::vector<std::string>> by_presence(const Dataset& dataset) {
  std::pair<std::vector<std::string>, std::vector<std::string>> names;
  const auto& counts = dataset.info().class_counts;
  for (std::size_t i = 0; i < std::min(counts.size(), dataset.class_names().size()); ++i)
    (counts[i] > 0 ? names.first : names.second).push_back(dataset.class_names()[i]);
  return names;
}

}  // namespace

bool has_classes(const Dataset& dataset) {
  return !dataset.has_numeric_targets() && dataset.targets_per_sample() == 1 &&
         (!dataset.has_tokens() || dataset.vocabulary() > 0);
}

std::string samples_text(const Dataset& dataset) {
  std::string text = fmt::format("{} sample{}", dataset.size(), dataset.size() == 1 ? "" : "s");
  if (!has_classes(dataset)) return text;
  text += fmt::format(" of {} class{}", dataset.classes(), dataset.classes() == 1 ? "" : "es");
  const auto& names = dataset.class_names();
  const auto& counts = dataset.info().class_counts;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += fmt::format("{} {}", i == 0 ? ":" : ",", shown(names[i]));
    if (i < counts.size()) text += fmt::format(" {}", counts[i]);
  }
  return names.size() > kShown ? text + ", …" : text;
}

std::vector<std::string> class_doubts(const DataSplits& splits) {
  std::vector<std::string> doubts;
  const Dataset& train = *splits.train;
  if (!has_classes(train)) return doubts;
  const auto present = by_presence(train).first;
  if (present.size() == 1)
    doubts.push_back(
        fmt::format("all samples of {} are of one class, '{}': are its classes in other folders, or in another column?",
                    train.name(), shown(present.front())));
  std::map<double, std::string> numbers;
  for (const auto& name : train.class_names())
    if (const auto number = parse_double(name)) {
      const auto [same, is_new] = numbers.emplace(*number, name);
      if (!is_new)
        doubts.push_back(fmt::format("{} has the classes '{}' and '{}', which are one number", train.name(),
                                     shown(same->second), shown(name)));
    }
  if (splits.validation == nullptr) return doubts;
  std::vector<std::string> lacking;
  for (const auto& name : by_presence(*splits.validation).second)
    if (std::ranges::find(present, name) != present.end()) lacking.push_back(name);
  if (!lacking.empty())
    doubts.push_back(fmt::format("{} has no sample of {}, which {} trained on", splits.validation->name(),
                                 listed_classes(lacking), lacking.size() == 1 ? "is" : "are"));
  return doubts;
}

void warn_of_classes(const DataSplits& splits) {
  for (const auto& doubt : class_doubts(splits)) log_warn("{}", doubt);
}

}  // namespace lockstep::data
