#include "nn/onnx/model_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <ranges>
#include <set>

#include "base/error.h"
#include "base/version.h"
#include "nn/onnx/protobuf.h"

namespace lockstep::nn::onnx {
namespace {

// The numbers of fields, and of types, in https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
constexpr std::int64_t kIrVersion = 8, kOpset = 17;
namespace model_field {
constexpr int kIrVersion = 1, kProducer = 2, kProducerVersion = 3, kGraph = 7, kOpset = 8, kMetadata = 14;
}
namespace graph_field {
constexpr int kNode = 1, kName = 2, kInitializer = 5, kInput = 11, kOutput = 12;
}
namespace node_field {
constexpr int kInput = 1, kOutput = 2, kName = 3, kOp = 4, kAttribute = 5;
}
namespace attribute_field {
constexpr int kName = 1, kFloat = 2, kInt = 3, kString = 4, kInts = 8, kStrings = 9, kType = 20;
}
namespace tensor_field {
constexpr int kDims = 1, kType = 2, kName = 8, kRaw = 9, kExternal = 13, kLocation = 14;
}

Message pair_of(const std::string& key, const std::string& value) {
  Message pair;
  pair.text(1, key);
  pair.text(2, value);
  return pair;
}

Message message_of(const std::string& name, const Attribute& attribute) {
  using namespace attribute_field;
  Message made;
  made.text(kName, name);
  const auto typed = [&](std::int64_t type) { made.number(kType, type); };
  struct {
    Message& made;
    decltype(typed)& type;
    void operator()(float value) const {
      made.real(kFloat, value);
      type(1);
    }
    void operator()(std::int64_t value) const {
      made.number(kInt, value);
      type(2);
    }
    void operator()(const std::string& value) const {
      made.text(kString, value);
      type(3);
    }
    void operator()(const std::vector<std::int64_t>& values) const {
      for (const std::int64_t value : values) made.number(kInts, value);
      type(7);
    }
    void operator()(const std::vector<std::string>& values) const {
      for (const std::string& value : values) made.text(kStrings, value);
      type(8);
    }
  } const put = {made, typed};
  std::visit(put, attribute);
  return made;
}

Message node_message(const std::string& op, const std::string& name, const std::vector<std::string>& inputs,
                     const std::string& output, const Attributes& attributes) {
  Message node;
  for (const std::string& input : inputs) node.text(node_field::kInput, input);
  node.text(node_field::kOutput, output);
  node.text(node_field::kName, name);
  node.text(node_field::kOp, op);
  for (const auto& [key, value] : attributes) node.message(node_field::kAttribute, message_of(key, value));
  return node;
}

// Without its values.
Message tensor_header(const std::string& name, Element type, const Extents& shape) {
  Message tensor;
  for (const std::int64_t extent : shape) tensor.number(tensor_field::kDims, extent);
  tensor.number(tensor_field::kType, static_cast<std::int64_t>(type));
  tensor.text(tensor_field::kName, name);
  return tensor;
}

std::uint64_t bytes_of(const Constant& constant) {
  return constant.entry != nullptr ? constant.entry->value.bytes() : constant.bytes.size();
}

// Whose extents the passes have, for messages.
std::string text_of(const Node& node) {
  std::string text = node.operation.empty() ? node.op : '"' + node.operation + '"';
  if (!node.layer.empty()) text += " of " + node.layer;
  return text;
}

// See Note [Free extents].
class Comparison {
 public:
  explicit Comparison(const std::vector<Pass>& passes) : passes_(passes), first_(passes.front()) {
    for (std::size_t other = 1; other < passes.size(); ++other) check_same(other);
  }

  // numbers[k]: of pass k.
  Extent extent(const std::vector<std::int64_t>& numbers, const std::string& of) const {
    Extent made = {.scale = numbers[0]};
    const auto power = [&](std::size_t other, std::int64_t here, std::int64_t there) {
      std::int64_t left = numbers[0], right = numbers[other];
      for (int exponent = 0; exponent <= 2; ++exponent, left *= there, right *= here)
        if (left == right) return exponent;
      refuse(other, of);
    };
    made.batches = power(1, first_.batch, passes_[1].batch);
    if (passes_.size() > 2) made.lengths = power(2, first_.length, passes_[2].length);
    const auto divide = [&](std::int64_t by, int times, std::size_t other) {
      for (; times > 0; --times) {
        if (made.scale % by != 0) refuse(other, of);
        made.scale /= by;
      }
    };
    divide(first_.batch, made.batches, 1);
    divide(first_.length, made.lengths, 2);
    return made;
  }
  std::vector<Extent> shape(Id id, const std::string& of) const {
    std::vector<Extent> all;
    for (std::size_t axis = 0; axis < first_.graph.shape(id).size(); ++axis)
      all.push_back(extent(each([&](const Pass& pass) { return pass.graph.shape(id)[axis]; }), of));
    return all;
  }
  std::vector<Extent> numbers(std::size_t node, std::size_t operand) const {
    const auto of = [&](const Pass& pass) -> const Numbers& {
      return std::get<Numbers>(pass.graph.nodes()[node].operands[operand]);
    };
    std::vector<Extent> all;
    for (std::size_t i = 0; i < of(first_).values.size(); ++i)
      all.push_back(
          extent(each([&](const Pass& pass) { return of(pass).values[i]; }), text_of(first_.graph.nodes()[node])));
    return all;
  }

 private:
  template <class Get>
  std::vector<std::int64_t> each(const Get& get) const {
    std::vector<std::int64_t> all;
    for (const Pass& pass : passes_) all.push_back(get(pass));
    return all;
  }

  [[noreturn]] static void refuse(std::size_t other, const std::string& of) {
    const bool length = other == 2;
    throw UsageError(fmt::format("the model cannot be exported to ONNX: what {} computes depends on {}", of,
                                 length ? "the length of the texts" : "the number of samples"),
                     length ? "give its input one length: OnnxInput::any_length"
                            : "compute each sample by itself, in evaluation mode");
  }

  void check_same(std::size_t other) const {
    const Graph &a = first_.graph, &b = passes_[other].graph;
    for (std::size_t i = 0; i < std::min(a.nodes().size(), b.nodes().size()); ++i) {
      const Node &x = a.nodes()[i], &y = b.nodes()[i];
      bool same = x.op == y.op && x.result == y.result && x.attributes == y.attributes &&
                  x.operands.size() == y.operands.size() && a.shape(x.result).size() == b.shape(y.result).size();
      for (std::size_t j = 0; same && j < x.operands.size(); ++j) {
        const auto *left = std::get_if<Numbers>(&x.operands[j]), *right = std::get_if<Numbers>(&y.operands[j]);
        same = left != nullptr && right != nullptr
                   ? left->as == right->as && left->values.size() == right->values.size()
                   : x.operands[j] == y.operands[j];
      }
      if (!same) refuse(other, text_of(x));
    }
    for (std::size_t i = 0; i < std::min(a.constants().size(), b.constants().size()); ++i) {
      const Constant &x = a.constants()[i], &y = b.constants()[i];
      if (x.id == y.id && x.entry == y.entry && x.bytes == y.bytes && a.shape(x.id) == b.shape(y.id)) continue;
      const auto reader = std::ranges::find_if(a.nodes(), [&](const Node& node) {
        return std::ranges::find(node.operands, Operand(x.id)) != node.operands.end();
      });
      refuse(other, reader != a.nodes().end() ? text_of(*reader) : "it");
    }
    if (a.nodes().size() != b.nodes().size() || a.constants().size() != b.constants().size() ||
        a.outputs() != b.outputs())
      refuse(other, "it");
  }

  const std::vector<Pass>& passes_;
  const Pass& first_;
};

class Lowering {
 public:
  Lowering(const std::vector<Pass>& passes, const OnnxOptions& options)
      : extents_(passes), graph_(passes.front().graph), options_(options), names_(graph_.values().size()) {}

  ModelFile make(const std::string& path) {
    find_used();
    name_values();
    for (std::size_t i = 0; i < graph_.nodes().size(); ++i)
      if (is_used(graph_.nodes()[i].result)) add_node(i);
    for (const auto& [id, name] : copies_) put_node("Identity", name, {names_[at(id)]}, name, {});
    const bool beside = inline_bytes() > options_.most_bytes;
    ModelFile file;
    file.nodes = nodes_.size();
    // A message is preceded by its length.
    std::vector<ModelFile::Piece> graph;
    graph.emplace_back();
    for (const Message& node : nodes_) append(graph, graph_field::kNode, node);
    Message name;
    name.text(graph_field::kName, "model");
    graph.back().bytes += name.bytes();
    for (const auto& tensor : tensors_) append(graph, graph_field::kInitializer, tensor);
    for (const Constant& constant : graph_.constants())
      if (is_used(constant.id)) append_constant(graph, constant, beside, path, file);
    for (const auto& [name_of_input, id] : graph_.inputs())
      if (is_used(id)) append(graph, graph_field::kInput, described(names_[at(id)], id));
    for (std::size_t i = 0; i < graph_.outputs().size(); ++i)
      append(graph, graph_field::kOutput, described(options_.outputs[i], graph_.outputs()[i]));
    std::uint64_t bytes = 0;
    for (const auto& piece : graph)
      bytes += piece.bytes.size() + (piece.weights != nullptr ? bytes_of(*piece.weights) : 0);
    Message model = head();
    model.begin_bytes(model_field::kGraph, bytes);
    file.bytes = model.bytes().size() + bytes;
    file.pieces.push_back({model.bytes()});
    std::ranges::move(graph, std::back_inserter(file.pieces));
    return file;
  }

 private:
  static std::size_t at(Id id) { return static_cast<std::size_t>(id); }
  bool is_used(Id id) const { return used_[at(id)]; }

  void find_used() {
    used_.assign(graph_.values().size(), false);
    for (const Id output : graph_.outputs()) used_[at(output)] = true;
    for (const Node& node : std::views::reverse(graph_.nodes())) {
      if (!is_used(node.result)) continue;
      for (const Operand& operand : node.operands)
        if (const Id* const id = std::get_if<Id>(&operand); id != nullptr && *id != kNone) used_[at(*id)] = true;
    }
  }

  std::string unique(const std::string& wanted) {
    std::string name = wanted;
    for (int i = 2; !taken_.insert(name).second; ++i) name = fmt::format("{}_{}", wanted, i);
    return name;
  }
  void take(Id id, const std::string& name) {
    if (!taken_.insert(name).second)
      throw UsageError(fmt::format("two values of the ONNX graph are called '{}'", name),
                       "give inputs, outputs and parameters names of their own");
    names_[at(id)] = name;
  }

  void name_values() {
    if (options_.outputs.size() != graph_.outputs().size())
      throw UsageError(
          fmt::format("{} names for the {} outputs of a module", options_.outputs.size(), graph_.outputs().size()),
          "name each output once: OnnxOptions::outputs");
    for (const auto& [name, id] : graph_.inputs()) take(id, name);
    for (std::size_t i = 0; i < graph_.outputs().size(); ++i) {
      const Id id = graph_.outputs()[i];
      if (graph_.value(id).node >= 0 && names_[at(id)].empty()) {
        take(id, options_.outputs[i]);
      } else {
        copies_.emplace_back(id, options_.outputs[i]);
        static_cast<void>(unique(options_.outputs[i]));
      }
    }
    for (const Constant& constant : graph_.constants())
      if (is_used(constant.id) && constant.entry != nullptr) take(constant.id, constant.entry->name);
    for (const Constant& constant : graph_.constants())
      if (constant.entry == nullptr) names_[at(constant.id)] = unique("constant");
  }

  void put_node(const std::string& op, const std::string& name, const std::vector<std::string>& inputs,
                const std::string& output, const Attributes& attributes) {
    nodes_.push_back(node_message(op, name, inputs, output, attributes));
  }
  /// Of a node that has no value in the recorded graph.
  std::string put_node(const std::string& op, const std::string& wanted, const std::vector<std::string>& inputs,
                       const Attributes& attributes = {}) {
    const std::string name = unique(wanted);
    put_node(op, name, inputs, name, attributes);
    return name;
  }

  void add_node(std::size_t number) {
    const Node& node = graph_.nodes()[number];
    std::vector<std::string> inputs;
    for (std::size_t i = 0; i < node.operands.size(); ++i) {
      if (const Id* const id = std::get_if<Id>(&node.operands[i]))
        inputs.push_back(*id == kNone ? std::string() : names_[at(*id)]);
      else
        inputs.push_back(numbers_operand(number, i));
    }
    const std::string& place = !node.layer.empty() ? node.layer : node.operation;
    std::string& output = names_[at(node.result)];
    const std::string name = unique(place.empty() ? node.op : place + "/" + node.op);
    if (output.empty()) output = name;
    put_node(node.op, name, inputs, output, node.attributes);
  }

  // The name of what an operand of numbers becomes.
  std::string numbers_operand(std::size_t number, std::size_t operand) {
    const Node& node = graph_.nodes()[number];
    const auto as = std::get<Numbers>(node.operands[operand]).as;
    const std::vector<Extent> all = extents_.numbers(number, operand);
    if (as == Numbers::As::kScalar) {
      LOCKSTEP_ASSERT(all.size() == 1);
      if (!all[0].is_free()) return numbers_tensor({all[0].scale}, /*scalar=*/true);
      const auto [known, is_new] = scalars_.try_emplace(all[0]);
      if (is_new) known->second = put_node("Squeeze", extent_name(all[0]), {vector_of(all)});
      return known->second;
    }
    if (as == Numbers::As::kShape) {
      const auto before = extents_.shape(std::get<Id>(node.operands.front()), text_of(node));
      if (const auto target = reshape_target(before, all)) return numbers_tensor(*target, /*scalar=*/false);
    }
    return vector_of(all);
  }

  // With 0 for an extent that stays, and -1 for one other.
  static std::optional<Extents> reshape_target(const std::vector<Extent>& before, const std::vector<Extent>& to) {
    Extents target;
    bool open = false;
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (!to[i].is_free()) {
        target.push_back(to[i].scale);
      } else if (i < before.size() && before[i] == to[i]) {
        target.push_back(0);
      } else {
        if (std::exchange(open, true)) return std::nullopt;
        target.push_back(-1);
      }
    }
    return target;
  }

  std::string numbers_tensor(const Extents& values, bool scalar) {
    const auto [known, is_new] = numbers_.try_emplace({values, scalar});
    if (!is_new) return known->second;
    known->second = unique("numbers");
    Message tensor = tensor_header(known->second, Element::kI64,
                                   scalar ? Extents() : Extents{static_cast<std::int64_t>(values.size())});
    tensor.text(tensor_field::kRaw,
                {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(std::int64_t)});
    tensors_.push_back(std::move(tensor));
    return known->second;
  }

  // "batch", "length", "4*batch"
  static std::string extent_name(const Extent& extent) {
    std::string name;
    const auto add = [&](const std::string& factor) { name += (name.empty() ? "" : "*") + factor; };
    if (extent.scale != 1) add(std::to_string(extent.scale));
    for (int i = 0; i < extent.batches; ++i) add("batch");
    for (int i = 0; i < extent.lengths; ++i) add("length");
    return name;
  }

  std::string vector_of(const std::vector<Extent>& all) {
    std::vector<std::string> parts;
    Extents fixed;
    const auto finish = [&] {
      if (!fixed.empty()) parts.push_back(numbers_tensor(std::exchange(fixed, {}), /*scalar=*/false));
    };
    for (const Extent& extent : all) {
      if (!extent.is_free()) {
        fixed.push_back(extent.scale);
        continue;
      }
      finish();
      parts.push_back(free_extent(extent));
    }
    finish();
    if (parts.size() == 1) return parts[0];
    const auto [known, is_new] = vectors_.try_emplace(all);
    if (is_new) known->second = put_node("Concat", "shape", parts, {{"axis", std::int64_t{0}}});
    return known->second;
  }

  // As a tensor of one number.
  std::string free_extent(const Extent& extent) {
    const auto [known, is_new] = free_.try_emplace(extent);
    if (!is_new) return known->second;
    std::string made;
    const auto multiply = [&](const std::string& factor) {
      made = made.empty() ? factor : put_node("Mul", extent_name(extent), {made, factor});
    };
    for (int i = 0; i < extent.batches; ++i) multiply(size_of_input(0));
    for (int i = 0; i < extent.lengths; ++i) multiply(size_of_input(1));
    if (extent.scale != 1) multiply(numbers_tensor({extent.scale}, /*scalar=*/false));
    return free_[extent] = made;
  }

  std::string size_of_input(int axis) {
    std::string& known = sizes_[axis];
    if (!known.empty()) return known;
    const Extent wanted = {.scale = 1, .batches = axis == 0 ? 1 : 0, .lengths = axis};
    for (const auto& [name, id] : graph_.inputs()) {
      const auto shape = extents_.shape(id, name);
      if (!is_used(id) || std::cmp_less_equal(shape.size(), axis) || shape[static_cast<std::size_t>(axis)] != wanted)
        continue;
      return known = put_node("Shape", extent_name(wanted), {name},
                              {{"start", std::int64_t{axis}}, {"end", std::int64_t{axis + 1}}});
    }
    throw UsageError("the model cannot be exported to ONNX: what it computes does not depend on its inputs",
                     "give it inputs that it reads");
  }

  // TypeProto and its shape.
  Message described(const std::string& name, Id id) const {
    Message shape;
    for (const Extent& extent : extents_.shape(id, name)) {
      Message dim;
      if (extent.is_free())
        dim.text(2, extent_name(extent));
      else
        dim.number(1, extent.scale);
      shape.message(1, dim);
    }
    Message tensor, type, value;
    tensor.number(1, static_cast<std::int64_t>(graph_.value(id).type));
    tensor.message(2, shape);
    type.message(1, tensor);
    value.text(1, name);
    value.message(2, type);
    return value;
  }

  Message head() const {
    Message model, opset;
    model.number(model_field::kIrVersion, kIrVersion);
    model.text(model_field::kProducer, "lockstep");
    model.text(model_field::kProducerVersion, version());
    opset.text(1, "");
    opset.number(2, kOpset);
    model.message(model_field::kOpset, opset);
    for (const auto& [key, value] : options_.metadata) model.message(model_field::kMetadata, pair_of(key, value));
    return model;
  }

  // With all weights in it.
  std::uint64_t inline_bytes() const {
    std::uint64_t bytes = head().bytes().size();
    for (const Message& node : nodes_) bytes += node.bytes().size();
    for (const Constant& constant : graph_.constants())
      if (is_used(constant.id)) bytes += bytes_of(constant);
    return bytes;
  }

  static void append(std::vector<ModelFile::Piece>& pieces, int field, const Message& message) {
    if (pieces.back().weights != nullptr) pieces.emplace_back();
    Message made;
    made.message(field, message);
    pieces.back().bytes += made.bytes();
  }

  void append_constant(std::vector<ModelFile::Piece>& pieces, const Constant& constant, bool beside,
                       const std::string& path, ModelFile& file) const {
    constexpr std::uint64_t kSmall = 1024;  // stays in the file
    const Value& value = graph_.value(constant.id);
    const std::uint64_t bytes = bytes_of(constant);
    Message tensor = tensor_header(names_[at(constant.id)], value.type, value.shape);
    if (beside && bytes >= kSmall) {
      constexpr std::uint64_t kAlignment = ModelFile::kAlignment;
      const std::uint64_t offset = (file.bytes_beside + kAlignment - 1) / kAlignment * kAlignment;
      const std::string name = std::filesystem::path(data_path(path)).filename().string();
      tensor.message(tensor_field::kExternal, pair_of("location", name));
      tensor.message(tensor_field::kExternal, pair_of("offset", std::to_string(offset)));
      tensor.message(tensor_field::kExternal, pair_of("length", std::to_string(bytes)));
      tensor.number(tensor_field::kLocation, 1);
      append(pieces, graph_field::kInitializer, tensor);
      file.beside.push_back(&constant);
      file.bytes_beside = offset + bytes;
      return;
    }
    tensor.begin_bytes(tensor_field::kRaw, bytes);
    Message field;
    field.begin_bytes(graph_field::kInitializer, tensor.bytes().size() + bytes);
    if (pieces.back().weights != nullptr) pieces.emplace_back();
    pieces.back().bytes += field.bytes() + tensor.bytes();
    pieces.back().weights = &constant;
  }

  Comparison extents_;
  const Graph& graph_;
  const OnnxOptions& options_;
  std::vector<std::string> names_;  // of values
  std::vector<bool> used_;
  std::set<std::string> taken_;
  std::vector<std::pair<Id, std::string>> copies_;  // outputs that are inputs, constants, or other outputs
  std::vector<Message> nodes_, tensors_;
  std::map<std::pair<Extents, bool>, std::string> numbers_;
  std::map<std::vector<Extent>, std::string> vectors_;
  std::map<Extent, std::string> free_, scalars_;
  std::string sizes_[2];
};

}  // namespace

std::string data_path(const std::string& path) { return path + ".data"; }

ModelFile make_model_file(const std::vector<Pass>& passes, const std::string& path, const OnnxOptions& options) {
  return Lowering(passes, options).make(path);
}

}  // namespace lockstep::nn::onnx
