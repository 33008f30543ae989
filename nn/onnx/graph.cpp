#include "nn/onnx/graph.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

namespace lockstep::nn::onnx {
namespace {

std::string text_of(const Operand& operand) {
  if (const Id* const id = std::get_if<Id>(&operand)) return fmt::format("v{}", *id);
  const auto& numbers = std::get<Numbers>(operand);
  return fmt::format("{}[{}]", static_cast<int>(numbers.as), fmt::join(numbers.values, ","));
}

std::string text_of(const Attribute& attribute) {
  return std::visit(
      []<class T>(const T& value) {
        if constexpr (std::is_same_v<T, float>)
          return fmt::format("{:a}", value);
        else if constexpr (requires { value.empty() && !std::is_same_v<T, std::string>; } &&
                           !std::is_same_v<T, std::string>)
          return fmt::format("[{}]", fmt::join(value, ","));
        else
          return fmt::format("{}", value);
      },
      attribute);
}

}  // namespace

Id Graph::add_value(Element type, const Extents& shape, int node) {
  values_.push_back({type, shape, node});
  return static_cast<Id>(values_.size()) - 1;
}

Id Graph::add_input(std::string name, Element type, const Extents& shape) {
  const Id id = add_value(type, shape);
  inputs_.emplace_back(std::move(name), id);
  return id;
}

Id Graph::add_parameter(const StateEntry& entry) {
  const Id id = add_value(Element::kF32, entry.header().shape);
  constants_.push_back({.id = id, .entry = &entry});
  return id;
}

Id Graph::add_constant(Element type, const Extents& shape, std::vector<std::byte> bytes) {
  for (const Constant& known : constants_)
    if (known.entry == nullptr && value(known.id).type == type && this->shape(known.id) == shape &&
        known.bytes == bytes)
      return known.id;
  const Id id = add_value(type, shape);
  constants_.push_back({.id = id, .bytes = std::move(bytes)});
  return id;
}

Id Graph::scalar(float value) {
  std::vector<std::byte> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return add_constant(Element::kF32, {}, std::move(bytes));
}

Id Graph::add(std::string op, std::vector<Operand> operands, const Extents& shape, Attributes attributes,
              Element type) {
  std::string key = op;
  for (const Operand& operand : operands) key += " " + text_of(operand);
  for (const auto& [name, attribute] : attributes) key += fmt::format(" {}={}", name, text_of(attribute));
  const auto [known, is_new] = known_.try_emplace(key, kNone);
  if (!is_new) return known->second;
  const Id result = add_value(type, shape, static_cast<int>(nodes_.size()));
  nodes_.push_back({.op = std::move(op),
                    .operands = std::move(operands),
                    .attributes = std::move(attributes),
                    .result = result,
                    .operation = {},
                    .layer = {}});
  return known->second = result;
}

Id Graph::map(std::string op, std::vector<Operand> operands, Attributes attributes) {
  const Value x = value(std::get<Id>(operands.front()));
  return add(std::move(op), std::move(operands), x.shape, std::move(attributes), x.type);
}

Id Graph::reshape(Id x, const Extents& shape) {
  // Of two in a row the last one counts.
  while (value(x).node >= 0 && nodes_[static_cast<std::size_t>(value(x).node)].op == "Reshape")
    x = std::get<Id>(nodes_[static_cast<std::size_t>(value(x).node)].operands.front());
  if (this->shape(x) == shape) return x;
  return add("Reshape", {x, Numbers{shape, Numbers::As::kShape}}, shape, {}, value(x).type);
}

Id Graph::transpose(Id x, const std::vector<int>& axes) {
  if (std::ranges::is_sorted(axes)) return x;
  Extents to;
  for (const int axis : axes) to.push_back(shape(x)[static_cast<std::size_t>(axis)]);
  return add("Transpose", {x}, to, {{"perm", std::vector<std::int64_t>(axes.begin(), axes.end())}}, value(x).type);
}

void Graph::name_nodes(std::size_t first, const std::string& operation, const std::string& layer) {
  for (std::size_t i = first; i < nodes_.size(); ++i) {
    nodes_[i].operation = operation;
    nodes_[i].layer = layer;
  }
}

}  // namespace lockstep::nn::onnx
