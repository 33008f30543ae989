// A forward pass as a graph of ONNX's operators (https://onnx.ai/onnx/operators, opset 17), with the extents that this
// one pass had.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/nn/io/state.h"

namespace lockstep::nn::onnx {

enum class Element : std::uint8_t { kF32 = 1, kI32 = 6, kI64 = 7, kBool = 9 };  // as TensorProto numbers them

/// Number of a value in its graph.
using Id = int;
inline constexpr Id kNone = -1;

using Extents = std::vector<std::int64_t>;

/// Whole numbers that an operator takes as a tensor, and which may follow from the extents of the pass.
struct Numbers {
  enum class As : std::uint8_t { kVector, kScalar, kShape };  // kShape: what a Reshape makes of its first operand
  std::vector<std::int64_t> values;
  As as = As::kVector;

  friend bool operator==(const Numbers&, const Numbers&) = default;
};

/// kNone: an optional input that is left out.
using Operand = std::variant<Id, Numbers>;
using Attribute = std::variant<std::int64_t, float, std::string, std::vector<std::int64_t>, std::vector<std::string>>;
using Attributes = std::vector<std::pair<std::string, Attribute>>;

struct Value {
  Element type = Element::kF32;
  Extents shape;
  int node = -1;  // that computes it; -1: an input or a constant
};

struct Node {
  std::string op;
  std::vector<Operand> operands;
  Attributes attributes;
  Id result = kNone;             // its first output; others are not used
  std::string operation, layer;  // the tape's operator and the module that it belongs to, as far as they are known
};

/// What does not depend on the inputs: a parameter or a buffer, or other numbers, which have no name.
struct Constant {
  Id id = kNone;
  const StateEntry* entry = nullptr;
  std::vector<std::byte> bytes = {};  // of others
};

/// Nodes are in an order in which each reads what others have computed before. One that is there already is not added
/// again: all operators that are used are pure functions.
class Graph {
 public:
  Id add_input(std::string name, Element type, const Extents& shape);
  /// In the shape and layout that files have.
  Id add_parameter(const StateEntry& entry);
  Id add_constant(Element type, const Extents& shape, std::vector<std::byte> bytes);
  Id scalar(float value);
  Id add(std::string op, std::vector<Operand> operands, const Extents& shape, Attributes attributes = {},
         Element type = Element::kF32);
  /// Of operators of each element: the result has the first operand's shape and type.
  Id map(std::string op, std::vector<Operand> operands, Attributes attributes = {});
  Id reshape(Id x, const Extents& shape);
  /// Axis i of the result is x's axis axes[i].
  Id transpose(Id x, const std::vector<int>& axes);
  void add_output(Id id) { outputs_.push_back(id); }

  /// What these two refer to is valid as long as the graph.
  const Value& value(Id id) const { return values_[static_cast<std::size_t>(id)]; }
  const Extents& shape(Id id) const { return value(id).shape; }
  const std::deque<Value>& values() const { return values_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<Constant>& constants() const { return constants_; }
  const std::vector<std::pair<std::string, Id>>& inputs() const { return inputs_; }
  const std::vector<Id>& outputs() const { return outputs_; }

  /// Those from number `first` on belong to this operator.
  void name_nodes(std::size_t first, const std::string& operation, const std::string& layer);

 private:
  Id add_value(Element type, const Extents& shape, int node = -1);

  std::deque<Value> values_;  // references to them stay valid when others are added
  std::vector<Node> nodes_;
  std::vector<Constant> constants_;
  std::vector<std::pair<std::string, Id>> inputs_;
  std::vector<Id> outputs_;
  std::map<std::string, Id> known_;  // values by what computes them
};

}  // namespace lockstep::nn::onnx
