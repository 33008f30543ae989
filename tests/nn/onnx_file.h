// Reads ONNX files as far as tests look at them, with nothing of the code that writes them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::nn::testing {

/// The fields of a message in protocol buffers' wire format. Throws std::out_of_range where it is cut.
struct ProtoField {
  int number = 0;
  std::uint64_t value = 0;      // of numbers
  std::string_view bytes = {};  // of strings and messages
};
inline std::vector<ProtoField> fields_of(std::string_view message) {
  std::vector<ProtoField> all;
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      if (at >= message.size() || shift > 63) throw std::out_of_range("a number is cut");
      const auto byte = static_cast<unsigned char>(message[at++]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    const std::uint64_t tag = varint();
    ProtoField field = {.number = static_cast<int>(tag >> 3)};
    const auto take = [&](std::uint64_t count) {
      if (count > message.size() - at) throw std::out_of_range("bytes are missing");
      field.bytes = message.substr(at, count);
      at += count;
    };
    switch (tag & 7) {
      case 0: field.value = varint(); break;
      case 2: take(varint()); break;
      case 5: take(4); break;
      default: throw std::out_of_range("a field of a type that ONNX does not have");
    }
    all.push_back(field);
  }
  return all;
}

struct OnnxFile {
  struct Node {
    std::string op, name;
    std::vector<std::string> inputs, outputs, attributes;
  };
  struct Tensor {
    std::int64_t type = 0;
    std::vector<std::int64_t> shape;
    std::string bytes;
    std::map<std::string, std::string> external;
  };
  /// Names, with "float [batch, 3]" and the like.
  std::map<std::string, std::string> inputs, outputs;
  std::vector<Node> nodes;
  std::map<std::string, Tensor> initializers;
  std::map<std::string, std::string> metadata;
  std::string producer;
  std::uint64_t ir_version = 0, opset = 0;

  std::vector<std::string> ops() const {
    std::vector<std::string> all;
    for (const Node& node : nodes) all.push_back(node.op);
    return all;
  }
  std::size_t count(std::string_view op) const {
    std::size_t found = 0;
    for (const Node& node : nodes) found += node.op == op ? 1 : 0;
    return found;
  }
};

inline std::map<std::string, std::string> pair_from(std::string_view message) {
  std::string key, value;
  for (const ProtoField& field : fields_of(message)) (field.number == 1 ? key : value) = field.bytes;
  return {{key, value}};
}

inline std::pair<std::string, std::string> described_from(std::string_view message) {
  std::string name, text;
  for (const ProtoField& field : fields_of(message)) {
    if (field.number == 1) name = field.bytes;
    if (field.number != 2) continue;
    const auto type = fields_of(field.bytes);
    for (const ProtoField& part : fields_of(type.at(0).bytes)) {
      if (part.number == 1) text = part.value == 1 ? "float [" : part.value == 7 ? "int64 [" : "? [";
      if (part.number != 2) continue;
      for (const ProtoField& dim : fields_of(part.bytes)) {
        const auto extent = fields_of(dim.bytes).at(0);
        if (text.back() != '[') text += ", ";
        text += extent.number == 1 ? std::to_string(extent.value) : std::string(extent.bytes);
      }
    }
  }
  return {name, text + "]"};
}

inline OnnxFile read_onnx(std::string_view model) {
  OnnxFile file;
  std::string_view graph;
  for (const ProtoField& field : fields_of(model)) {
    if (field.number == 1) file.ir_version = field.value;
    if (field.number == 2) file.producer = field.bytes;
    if (field.number == 7) graph = field.bytes;
    if (field.number == 8)
      for (const ProtoField& part : fields_of(field.bytes))
        if (part.number == 2) file.opset = part.value;
    if (field.number == 14) file.metadata.merge(pair_from(field.bytes));
  }
  for (const ProtoField& field : fields_of(graph)) {
    if (field.number == 11) file.inputs.insert(described_from(field.bytes));
    if (field.number == 12) file.outputs.insert(described_from(field.bytes));
    if (field.number == 1) {
      OnnxFile::Node& node = file.nodes.emplace_back();
      for (const ProtoField& part : fields_of(field.bytes)) {
        if (part.number == 1) node.inputs.emplace_back(part.bytes);
        if (part.number == 2) node.outputs.emplace_back(part.bytes);
        if (part.number == 3) node.name = part.bytes;
        if (part.number == 4) node.op = part.bytes;
        if (part.number == 5) node.attributes.emplace_back(fields_of(part.bytes).at(0).bytes);
      }
    }
    if (field.number == 5) {
      OnnxFile::Tensor tensor;
      std::string name;
      for (const ProtoField& part : fields_of(field.bytes)) {
        if (part.number == 1) tensor.shape.push_back(static_cast<std::int64_t>(part.value));
        if (part.number == 2) tensor.type = static_cast<std::int64_t>(part.value);
        if (part.number == 8) name = part.bytes;
        if (part.number == 9) tensor.bytes = part.bytes;
        if (part.number == 13) tensor.external.merge(pair_from(part.bytes));
      }
      EXPECT_TRUE(file.initializers.emplace(name, std::move(tensor)).second) << name << " is there twice";
    }
  }
  return file;
}

/// Each node reads what is there before it, each value is made once, and each tensor has as many bytes as its shape
/// says.
inline void expect_sound(const OnnxFile& file) {
  EXPECT_EQ(file.ir_version, 8u);
  EXPECT_EQ(file.opset, 17u);
  EXPECT_EQ(file.producer, "lockstep");
  std::set<std::string> there = {""}, names;
  for (const auto& [name, type] : file.inputs) there.insert(name);
  for (const auto& [name, tensor] : file.initializers) {
    EXPECT_TRUE(there.insert(name).second) << name;
    std::size_t bytes = tensor.type == 7 ? 8 : 4;
    EXPECT_TRUE(tensor.type == 1 || tensor.type == 7) << name;
    for (const std::int64_t extent : tensor.shape) bytes *= static_cast<std::size_t>(extent);
    if (tensor.external.empty()) {
      EXPECT_EQ(tensor.bytes.size(), bytes) << name;
    } else {
      EXPECT_EQ(tensor.external.at("length"), std::to_string(bytes)) << name;
    }
  }
  std::set<std::string> read;
  for (const auto& node : file.nodes) {
    EXPECT_TRUE(names.insert(node.name).second) << node.name << " is there twice";
    for (const std::string& input : node.inputs) {
      EXPECT_TRUE(there.contains(input)) << node.name << " reads " << input;
      read.insert(input);
    }
    for (const std::string& output : node.outputs) EXPECT_TRUE(there.insert(output).second) << output;
  }
  for (const auto& [name, type] : file.outputs) {
    EXPECT_TRUE(there.contains(name)) << name;
    read.insert(name);
  }
  for (const auto& node : file.nodes)
    for (const std::string& output : node.outputs) EXPECT_TRUE(read.contains(output)) << output << " is read by nobody";
  for (const auto& [name, tensor] : file.initializers) EXPECT_TRUE(read.contains(name)) << name << " is read by nobody";
  for (const auto& [name, type] : file.inputs) EXPECT_TRUE(read.contains(name)) << name << " is read by nobody";
}

}  // namespace lockstep::nn::testing
