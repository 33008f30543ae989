// Every model as an ONNX graph. What onnxruntime computes of it, tests/parity/onnx_check.py compares.
#include "inference/export.h"

#include <gmock/gmock.h>

#include "lockstep/nn/io/state.h"
#include "nn/onnx/passes.h"
#include "tests/nn/onnx_file.h"
#include "tests/support/models.h"

namespace lockstep::inference {
namespace {

using nn::testing::OnnxFile;
using ::testing::ElementsAre;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// Its graph alone: values of the weights are zeros.
OnnxFile graph_of(const nn::ModelSpec& spec) {
  const auto backend = nn::make_cpu_backend(1);
  nn::Generator zeros = nn::Generator::zeros();
  nn::Context context{*backend, zeros};
  const auto module = nn::make_model(context, spec);
  module->train(false);
  const auto entries = nn::entries_of(*module);
  const auto passes = nn::onnx::record_passes(*backend, *module, entries, onnx_inputs_of(spec));
  const auto model = nn::onnx::make_model_file(passes, "m.onnx", {});
  std::string text;
  for (const auto& piece : model.pieces) {
    text += piece.bytes;
    if (piece.weights == nullptr) continue;
    const auto* const entry = piece.weights->entry;
    text.append(entry != nullptr ? entry->value.bytes() : piece.weights->bytes.size(), '\0');
  }
  EXPECT_EQ(text.size(), model.bytes);
  OnnxFile file = nn::testing::read_onnx(text);
  nn::testing::expect_sound(file);
  // Each parameter is read, and there as itself.
  for (const auto& [name, parameter] : module->named_parameters())
    EXPECT_TRUE(file.initializers.contains(name)) << name;
  return file;
}

// What the model's family says that it takes, in sizes that are quick to build.
std::vector<nn::ModelSpec> specs_of(const std::string& name) {
  const nn::ModelFamily& family = nn::model_family(name);
  const Settings settings = lockstep::testing::settings_of(
      name, {{"layers", 2}, {"heads", 2}, {"width", 32}, {"context", 24}, {"max-length", 24}});
  std::vector<nn::ModelSpec> all;
  const auto add = [&](nn::ModelSpec spec) {
    spec.name = name;
    spec.settings = settings;
    all.push_back(nn::complete(spec));
  };
  if (family.takes_images) add({.name = name, .sample_shape = {32, 48, 3}, .classes = 7});
  if (family.takes_vectors) add({.name = name, .sample_shape = {5}, .classes = 3});
  if (family.takes_categories) {
    add({.name = name, .sample_shape = {5}, .classes = 1, .categories = {3, 4}});
    add({.name = name, .sample_shape = {0}, .classes = 1, .categories = {3, 4}});
  }
  if (family.takes_tokens) add({.name = name, .sample_shape = {24}, .classes = 40});
  if (family.word_pieces) add({.name = name, .sample_shape = {24}, .classes = 3, .vocabulary = 40});
  return all;
}

class OnnxModels : public ::testing::TestWithParam<std::string> {};

TEST_P(OnnxModels, AreGraphs) {
  for (const nn::ModelSpec& spec : specs_of(GetParam())) {
    SCOPED_TRACE(spec.sample_shape.size());
    const OnnxFile file = graph_of(spec);
    ASSERT_EQ(file.outputs.size(), 1u);
    const std::string outputs = std::to_string(spec.classes) + "]";
    const bool of_tokens = spec.sample_shape.size() == 1 && nn::model_family(spec.name).takes_tokens;
    EXPECT_EQ(file.outputs.at("logits"),
              (of_tokens && spec.vocabulary == 0 ? "float [batch, length, " : "float [batch, ") + outputs);
    if (spec.sample_shape.size() == 3) {
      EXPECT_THAT(file.inputs, ElementsAre(Pair("input", "float [batch, 3, 32, 48]")));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OnnxModels, ::testing::ValuesIn(nn::model_names()), [](const auto& test) {
  std::string name = test.param;
  for (char& c : name)
    if (c == '-') c = '_';
  return name;
});

TEST(OnnxInputs, FollowFromWhatAModelTakes) {
  EXPECT_THAT(graph_of(specs_of("gpt").front()).inputs, ElementsAre(Pair("input", "int64 [batch, length]")));
  EXPECT_THAT(graph_of(specs_of("bert").front()).inputs,
              UnorderedElementsAre(Pair("input", "int64 [batch, length]"), Pair("token_types", "int64 [batch, length]"),
                                   Pair("lengths", "int64 [batch]")));
  const auto tables = specs_of("tabular");
  ASSERT_EQ(tables.size(), 3u);
  EXPECT_THAT(graph_of(tables[0]).inputs, ElementsAre(Pair("input", "float [batch, 5]")));
  EXPECT_THAT(graph_of(tables[1]).inputs,
              UnorderedElementsAre(Pair("input", "float [batch, 5]"), Pair("categories", "int64 [batch, 2]")));
  EXPECT_THAT(graph_of(tables[2]).inputs, ElementsAre(Pair("categories", "int64 [batch, 2]")))
      << "nothing reads numbers that are not there";
}

// Channels stay second from the first convolution to the last.
TEST(OnnxModel, ConvolutionsFollowEachOther) {
  for (const char* name : {"cnn", "resnet18", "vgg11"}) {
    const OnnxFile file = graph_of(specs_of(name).front());
    EXPECT_EQ(file.count("Transpose"), 0u) << name;
    EXPECT_EQ(file.count("Shape"), 0u) << name;
  }
}

}  // namespace
}  // namespace lockstep::inference
