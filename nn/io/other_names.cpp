#include "nn/io/other_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "lockstep/nn/io/state.h"

namespace lockstep::nn {
namespace {

// What PyTorch's layers call theirs.
constexpr std::string_view kKinds[] = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"};

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }

bool is_kind(std::string_view part) { return std::ranges::find(kKinds, part) != std::end(kKinds); }

bool contradicts(const std::string& wanted, const std::string& given) {
  const std::string_view a = last_part(wanted), b = last_part(given);
  return is_kind(a) && is_kind(b) && a != b;
}

bool has_exchangeable_axes(const std::vector<std::int64_t>& shape) {
  return shape.size() >= 2 && shape[0] > 1 &&
         std::ranges::all_of(shape, [&](std::int64_t extent) { return extent == shape[0]; });
}

std::vector<std::string> names_of(const std::vector<TensorHeader>& all, const std::vector<std::size_t>& places) {
  std::vector<std::string> names;
  for (const std::size_t place : places) names.push_back(all[place].name);
  return names;
}

}  // namespace

std::vector<std::vector<std::string>> without_common_parts(const std::vector<std::string>& names) {
  constexpr std::size_t kMostParts = 3;
  std::vector<std::vector<std::string>> all;
  const std::vector<std::string>* longer = &names;
  all.reserve(kMostParts);
  while (all.size() < kMostParts && !longer->empty()) {
    const std::string part = longer->front().substr(0, longer->front().find('.') + 1);
    const auto goes_on = [&](const std::string& name) { return name.starts_with(part) && name.size() > part.size(); };
    if (part.empty() || !std::ranges::all_of(*longer, goes_on)) break;
    std::vector<std::string> shorter;
    for (const std::string& name : *longer) shorter.push_back(name.substr(part.size()));
    longer = &all.emplace_back(std::move(shorter));
  }
  return all;
}

ShapeMatch match_by_shape(const std::vector<TensorHeader>& wanted, const std::vector<TensorHeader>& given) {
  if (wanted.size() != given.size()) return {};
  struct Alike {
    std::vector<std::size_t> wanted, given;
  };
  std::map<std::vector<std::int64_t>, Alike> by_shape;
  for (std::size_t i = 0; i < wanted.size(); ++i) by_shape[wanted[i].shape].wanted.push_back(i);
  for (std::size_t i = 0; i < given.size(); ++i) by_shape[given[i].shape].given.push_back(i);
  ShapeMatch match;
  for (const auto& [shape, alike] : by_shape)
    if (alike.wanted.size() != alike.given.size()) return {};
  for (const auto& [shape, alike] : by_shape) {
    const TensorHeader &to = wanted[alike.wanted.front()], &from = given[alike.given.front()];
    if (alike.wanted.size() > 1)
      return {.pairs = {},
              .why_not = fmt::format("the shapes of {} fit {} in more than one way",
                                     few_of(names_of(given, alike.given)), few_of(names_of(wanted, alike.wanted)))};
    if (!converts(from.dtype, to.dtype) || contradicts(to.name, from.name)) return {};
    if (has_exchangeable_axes(shape) && last_part(to.name) != last_part(from.name))
      return {.pairs = {},
              .why_not = fmt::format("\"{}\" has the shape of \"{}\", and may be its transpose", shown_name(from.name),
                                     to.name)};
    match.pairs.emplace_back(alike.wanted.front(), alike.given.front());
  }
  std::ranges::sort(match.pairs);
  return match;
}

bool converts(DType from, DType to) {
  const bool is_float = from == DType::kF32 || from == DType::kF64 || from == DType::kBF16;
  return from == to || (to == DType::kF32 && is_float);
}

}  // namespace lockstep::nn
