// Files whose tensors have other names than the model's.
#include "nn/io/other_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;

TensorHeader header(const std::string& name, std::vector<std::int64_t> shape, DType dtype = DType::kF32) {
  return {.name = name, .dtype = dtype, .shape = std::move(shape), .bytes = 0};
}

TEST(MatchByShape, OneWay) {
  const auto match =
      match_by_shape({header("fc1.weight", {3, 2}), header("fc1.bias", {3}), header("fc2.weight", {4, 3})},
                     {header("a", {3}), header("b", {4, 3}), header("c", {3, 2})});
  EXPECT_THAT(match.pairs, ElementsAre(Pair(0, 2), Pair(1, 0), Pair(2, 1)));
  EXPECT_EQ(match_by_shape({header("w", {3})}, {header("a", {3}, DType::kF64)}).pairs.size(), 1u);
}

TEST(MatchByShape, NoWay) {
  const auto refused = [](const std::vector<TensorHeader>& wanted, const std::vector<TensorHeader>& given) {
    const auto match = match_by_shape(wanted, given);
    EXPECT_THAT(match.why_not, IsEmpty());
    return match.pairs.empty();
  };
  EXPECT_TRUE(refused({header("w", {3, 2})}, {header("a", {2, 3})}));
  EXPECT_TRUE(refused({header("w", {3})}, {header("a", {3}), header("b", {2})}));
  EXPECT_TRUE(refused({header("w", {3}), header("v", {2})}, {header("a", {3}), header("b", {3})}));
  EXPECT_TRUE(refused({header("w", {3})}, {header("a", {3}, DType::kI64)}));
  EXPECT_TRUE(refused({header("norm.weight", {3})}, {header("x.bias", {3})}));
  EXPECT_TRUE(refused({}, {}));
}

TEST(MatchByShape, SeveralWaysAreNamed) {
  const auto two = match_by_shape({header("fc1.weight", {3, 2}), header("fc2.weight", {3, 2})},
                                  {header("a", {3, 2}), header("b", {3, 2})});
  EXPECT_THAT(two.pairs, IsEmpty());
  EXPECT_EQ(two.why_not, R"(the shapes of "a", "b" fit "fc1.weight", "fc2.weight" in more than one way)");
  // Other programs have (in, out).
  const auto square = match_by_shape({header("fc.weight", {3, 3})}, {header("fc.kernel", {3, 3})});
  EXPECT_THAT(square.pairs, IsEmpty());
  EXPECT_EQ(square.why_not, R"("fc.kernel" has the shape of "fc.weight", and may be its transpose)");
  EXPECT_EQ(match_by_shape({header("fc.weight", {3, 3})}, {header("linear.weight", {3, 3})}).pairs.size(), 1u);
  EXPECT_EQ(match_by_shape({header("fc.weight", {1, 1})}, {header("w", {1, 1})}).pairs.size(), 1u);
}

TEST(WithoutCommonParts, AsManyAsThereAre) {
  EXPECT_THAT(without_common_parts({"a.b.x", "a.b.y.z"}),
              ElementsAre(ElementsAre("b.x", "b.y.z"), ElementsAre("x", "y.z")));
  EXPECT_THAT(without_common_parts({"a.x", "b.x"}), IsEmpty());
  EXPECT_THAT(without_common_parts({"x", "y"}), IsEmpty());
  EXPECT_THAT(without_common_parts({"a.", "a.x"}), IsEmpty());
  EXPECT_THAT(without_common_parts({}), IsEmpty());
  EXPECT_EQ(without_common_parts({std::string(1000, '.')}).size(), 3u);
}

class OtherNames : public ::testing::Test {
 protected:
  std::unique_ptr<Module> build(const ModelSpec& spec, std::uint64_t seed) {
    Generator generator(seed);
    Context context{*backend_, generator};
    return make_model(context, spec);
  }
  static std::vector<HostTensor> renamed(std::vector<HostTensor> state, const std::string& from,
                                         const std::string& to) {
    for (auto& tensor : state)
      if (tensor.name.starts_with(from)) tensor.name = to + tensor.name.substr(from.size());
    return state;
  }
  static LoadReport load(Module& module, const std::vector<HostTensor>& state) {
    return load_state(module, state, "f", kOptions);
  }
  // What a load says that has to fail, and to change nothing.
  static std::string refusal(Module& module, const std::vector<HostTensor>& state,
                             const LoadOptions& options = kOptions) {
    const std::string before = parameters_sha256(module);
    try {
      load_state(module, state, "f", options);
    } catch (const UsageError& error) {
      EXPECT_EQ(parameters_sha256(module), before);
      return error.line();
    }
    ADD_FAILURE() << "loaded";
    return "";
  }

  static inline const LoadOptions kOptions = {.match_other_names = true};
  static inline const ModelSpec kMlp = {
      .name = "mlp", .sample_shape = {7}, .classes = 3, .settings = {{"hidden", {5}}}};
  std::unique_ptr<Backend> backend_ = make_cpu_backend(1);
};

// What nn.Linear, a module with another name for it, and nn.Sequential save.
TEST_F(OtherNames, ALinearLayer) {
  const ModelSpec spec{.name = "linear", .sample_shape = {5}, .classes = 2};
  const auto source = build(spec, 2);
  for (const char* name : {"", "linear.", "0.", "net.layers.0."}) {
    const auto model = build(spec, 1);
    const auto state = renamed(state_of(*source), "fc.", name);
    EXPECT_THAT(refusal(*model, state, {}), HasSubstr("missing \"fc.weight\", \"fc.bias\"; unexpected"));
    const LoadReport report = load(*model, state);
    EXPECT_EQ(parameters_sha256(*model), parameters_sha256(*source)) << name;
    ASSERT_EQ(report.renamed.size(), 2u);
    EXPECT_EQ(report.renamed[0].from, std::string(name) + "weight");
    EXPECT_EQ(report.renamed[0].to, "fc.weight");
  }
}

TEST_F(OtherNames, SizesAreReadUnderOtherNamesToo) {
  const auto sizes = [&](const ModelSpec& spec, const std::string& from, const std::string& to) {
    const auto source = build(spec, 1);
    const auto state = renamed(state_of(*source), from, to);
    const ModelSpec read = spec_of_tensors(spec.name, {}, state);
    EXPECT_EQ(read.sample_shape, spec.sample_shape);
    EXPECT_EQ(read.classes, spec.classes);
    const auto model = build(read, 2);
    load(*model, state);
    EXPECT_EQ(parameters_sha256(*model), parameters_sha256(*source));
  };
  sizes({.name = "linear", .sample_shape = {5}, .classes = 2}, "fc.", "linear.");
  sizes(kMlp, "fc", "layers.");
  sizes({.name = "cnn", .sample_shape = {8, 8, 1}, .classes = 4}, "", "model.");
  sizes({.name = "cnn", .sample_shape = {8, 8, 1}, .classes = 4}, "conv", "convolution");
  auto state = state_of(*build({.name = "cnn", .sample_shape = {8, 8, 3}, .classes = 4}, 1));
  for (std::size_t i = 0; i < state.size(); ++i)
    state[i].name = fmt::format("{}.{}", i, i % 2 == 0 ? "weight" : "bias");
  EXPECT_THAT(spec_of_tensors("cnn", {}, state).sample_shape, ElementsAre(8, 8, 3));
  sizes({.name = "resnet18-cifar", .sample_shape = {32, 32, 3}, .classes = 7}, "fc.", "head.");
}

TEST_F(OtherNames, AFirstPartThatAllNamesHave) {
  const ModelSpec spec{.name = "resnet18-cifar", .sample_shape = {32, 32, 3}, .classes = 10};
  const auto source = build(spec, 2), model = build(spec, 1);
  const LoadReport report = load(*model, renamed(state_of(*source), "", "lit.model."));
  EXPECT_EQ(parameters_sha256(*model), parameters_sha256(*source));
  EXPECT_EQ(report.prefix, "lit.model.");
  EXPECT_THAT(report.renamed, IsEmpty());
}

// Names that are the model's say what they are; the others are found by shape.
TEST_F(OtherNames, AHeadOfAnotherName) {
  const ModelSpec spec{.name = "resnet18-cifar", .sample_shape = {32, 32, 3}, .classes = 10};
  const auto source = build(spec, 2), model = build(spec, 1);
  EXPECT_EQ(load(*model, renamed(state_of(*source), "fc.", "classifier.")).renamed.size(), 2u);
  EXPECT_EQ(parameters_sha256(*model), parameters_sha256(*source));
  // Convolutions of equal shape are ambiguous.
  EXPECT_THAT(refusal(*model, renamed(state_of(*source), "layer1.", "stage1.")),
              HasSubstr("missing \"layer1.0.conv1.weight\""));
  EXPECT_THAT(refusal(*model, renamed(state_of(*source), "layer1.0.conv", "layer1.0.convolution")),
              HasSubstr("in more than one way"));
}

TEST_F(OtherNames, NothingIsGuessed) {
  const ModelSpec alike{.name = "mlp", .sample_shape = {4}, .classes = 4, .settings = {{"hidden", {4}}}};
  const auto model = build(alike, 1);
  EXPECT_THAT(refusal(*model, renamed(state_of(*build(alike, 2)), "fc", "layers.")),
              AllOf(HasSubstr("missing \"fc1.weight\""), HasSubstr("unexpected \"layers.1.weight\""),
                    HasSubstr("in more than one way")));
  auto state = renamed(state_of(*build(kMlp, 2)), "fc", "layers.");
  state.pop_back();
  EXPECT_THAT(refusal(*build(kMlp, 1), state), AllOf(HasSubstr("missing"), Not(HasSubstr("way"))));
  // A name that is the model's, with another shape, is a fault whatever the others are.
  state = renamed(state_of(*build(kMlp, 2)), "fc1", "first");
  state[2].shape = {5, 3};
  EXPECT_THAT(refusal(*build(kMlp, 1), state), HasSubstr("fc2.weight is f32 [5, 3], not f32 [3, 5]"));
}

TEST_F(OtherNames, OnlyWhereItIsAskedFor) {
  const auto state = renamed(state_of(*build(kMlp, 2)), "fc", "layers.");
  const auto model = build(kMlp, 1);
  EXPECT_THAT(refusal(*model, state, {}), HasSubstr("missing"));
  EXPECT_THAT(refusal(*model, state, {.keep_prefix = true, .match_other_names = true}), HasSubstr("missing"));
  const LoadReport report = load_state(*model, state, "f", {.strict = false, .match_other_names = true});
  EXPECT_EQ(report.missing.size(), 4u);
  EXPECT_THAT(report.renamed, IsEmpty());
}

}  // namespace
}  // namespace lockstep::nn
