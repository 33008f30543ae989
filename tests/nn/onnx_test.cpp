// Exports to ONNX on the CPU and on a GPU in software: what is in the file, and what is refused. What onnxruntime
// computes of it, tests/parity/onnx_check.py compares.
#include "lockstep/nn/io/onnx.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "tests/nn/gradient_backend.h"
#include "tests/nn/onnx_cases.h"
#include "tests/nn/onnx_file.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using lockstep::testing::refusal_of;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

class Onnx : public ::testing::Test {
 protected:
  std::unique_ptr<Module> built(const OnnxCase& one) {
    auto module = one.build(context);
    const auto inputs = make_inputs(*backend, one, 2, 5, 1);
    Tape tape(*backend);
    tape.set_recording(false);
    Vars given;
    for (const Tensor& input : inputs) given.push_back(tape.input(input));
    (*module)(tape, given);  // a module of a function makes its parameters now
    return module;
  }
  OnnxFile exported(Module& module, const std::vector<OnnxInput>& inputs, const OnnxOptions& options = {}) {
    report = export_onnx(*backend, module, inputs, path, options);
    text = lockstep::testing::read_file(path);
    EXPECT_EQ(report.bytes, text.size());
    OnnxFile file = read_onnx(text);
    EXPECT_EQ(report.nodes, file.nodes.size());
    expect_sound(file);
    return file;
  }
  OnnxFile exported(const OnnxCase& one) { return exported(*built(one), plain_inputs(one), {.outputs = one.outputs}); }
  OnnxFile exported(FunctionModule::Function function, std::vector<OnnxCase::Input> inputs = {rows()}) {
    return exported(function_case("one", std::move(inputs), std::move(function)));
  }
  /// Of the model's own operators nothing is computed before.
  std::string refusal(FunctionModule::Function function, std::vector<OnnxCase::Input> inputs = {rows()}) {
    const OnnxCase one = function_case("one", std::move(inputs), std::move(function));
    const auto module = one.build(context);
    return refusal_of([&] { export_onnx(*backend, *module, plain_inputs(one), path, {.outputs = one.outputs}); });
  }
  static OnnxCase::Input rows() { return numbers_input("x", {1, 6}); }
  static OnnxCase::Input sequence() { return numbers_input("x", {1, 24, 6}, /*any_length=*/true); }

  const lockstep::testing::TemporaryDirectory directory;
  const std::string path = directory.path("m.onnx");
  std::unique_ptr<Backend> backend = make_gradient_backend();
  Generator generator{1};
  Context context{*backend, generator};
  OnnxReport report;
  std::string text;
};

TEST_F(Onnx, EveryOperatorIsExported) {
  for (const OnnxCase& one : onnx_operator_cases()) {
    SCOPED_TRACE(one.name);
    const OnnxFile file = exported(one);
    EXPECT_EQ(file.outputs.size(), one.outputs.size());
    for (const auto& [name, type] : file.inputs) EXPECT_THAT(type, HasSubstr("[batch"));
  }
}

TEST_F(Onnx, EveryFunctionOfTheHeaderHasACase) {
  std::ifstream header(LOCKSTEP_SOURCE_DIR "/include/lockstep/nn/autograd/functions.h");
  std::set<std::string> cases;
  for (const OnnxCase& one : onnx_operator_cases()) cases.insert(one.name);
  // What has no place in an evaluation, or is another one's name.
  const std::set<std::string> without = {"dropout", "randn", "apply", "recompute"};
  std::string line;
  int functions = 0;
  while (std::getline(header, line)) {
    const std::size_t begin = line.starts_with("Var ") ? 4 : line.starts_with("inline Var ") ? 11 : std::string::npos;
    if (begin == std::string::npos || line.find("(Tape& tape") == std::string::npos) continue;
    const std::string name = line.substr(begin, line.find('(') - begin);
    ++functions;
    const auto first = cases.lower_bound(name);
    EXPECT_TRUE(without.contains(name) || (first != cases.end() && first->starts_with(name))) << name;
  }
  EXPECT_GT(functions, 60);
}

TEST_F(Onnx, ParametersHaveTheNamesAndBytesOfWeightFiles) {
  const OnnxCase one = function_case(
      "one", {numbers_input("x", {1, 5, 5, 2})}, [](FunctionModule& self, Tape& tape, const Vars& in) -> Vars {
        const Var y = conv2d(tape, in[0], self.parameter("conv.weight", {3, 2, 2, 2}, FileLayout::kOhwiToOihw), nullptr,
                             {.kernel = {2, 2}});
        return linear(tape, flatten(tape, relu(tape, y)), self.parameter("fc", {4, 48}, FileLayout::kTransposed),
                      &self.parameter("bias", {4}));
      });
  const auto module = built(one);
  const OnnxFile file = exported(*module, plain_inputs(one), {.outputs = {"y"}, .metadata = {{"who", "me"}}});
  EXPECT_THAT(file.ops(), ElementsAre("Conv", "Relu", "Reshape", "Gemm")) << "axes are never exchanged";
  EXPECT_THAT(file.inputs, ElementsAre(Pair("x", "float [batch, 2, 5, 5]")));
  EXPECT_THAT(file.outputs, ElementsAre(Pair("y", "float [batch, 4]")));
  EXPECT_THAT(file.metadata, ElementsAre(Pair("who", "me")));
  std::size_t found = 0;
  for (const HostTensor& tensor : state_of(*module)) {
    const auto& initializer = file.initializers.at(tensor.name);
    EXPECT_EQ(initializer.shape, tensor.shape) << tensor.name;
    EXPECT_EQ(initializer.bytes, std::string(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()));
    ++found;
  }
  EXPECT_EQ(found, 3u);
  EXPECT_EQ(file.initializers.size(), 4u) << "and the shape of the Reshape";
  EXPECT_EQ(file.nodes[0].name, "conv/Conv");
}

TEST_F(Onnx, LengthsAreFreeWhereTheyMayBe) {
  const auto forward = [](FunctionModule& self, Tape& tape, const Vars& in) -> Vars {
    const Var x = add_positions(tape, in[0], self.parameter("positions", {24, 6}));
    return attention(tape, x, x, x, 2, {.causal = true});
  };
  EXPECT_THAT(exported(forward, {sequence()}).outputs, ElementsAre(Pair("y", "float [batch, length, 6]")));
  EXPECT_THAT(exported(forward, {numbers_input("x", {1, 24, 6})}).outputs,
              ElementsAre(Pair("y", "float [batch, 24, 6]")));
  for (const std::int64_t most : {1, 2, 3, 4, 17, 18})
    EXPECT_THAT(
        exported(forward, {numbers_input("x", {1, most, 6}, true)}).outputs,
        ElementsAre(Pair("y", most < 3 ? fmt::format("float [batch, {}, 6]", most) : "float [batch, length, 6]")));
  const OnnxFile turned = exported(
      [](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
        const Shape s = in[0].shape();
        return reshape(tape, transpose(tape, in[0], 0, 1), {s[1], 2, s[0] * 3});
      },
      {sequence()});
  EXPECT_THAT(turned.outputs, ElementsAre(Pair("y", "float [length, 2, 3*batch]")));
}

TEST_F(Onnx, SeveralInputsAndOutputs) {
  lockstep::testing::Fusion module(context);
  module.train(false);
  const OnnxFile file =
      exported(module, {{.name = "x", .shape = {1, 6}}, {.name = "mask", .shape = {1, 8}}}, {.outputs = {"a", "b"}});
  EXPECT_THAT(file.inputs, UnorderedElementsAre(Pair("x", "float [batch, 6]"), Pair("mask", "float [batch, 8]")));
  EXPECT_THAT(file.outputs, UnorderedElementsAre(Pair("a", "float [batch, 3]"), Pair("b", "float [batch, 2]")));
}

TEST_F(Onnx, OutputsMayBeInputsConstantsAndTheSameTwice) {
  const OnnxCase one = function_case("one", {rows()},
                                     [](FunctionModule& self, Tape& tape, const Vars& in) -> Vars {
                                       const Var y = relu(tape, in[0]);
                                       return {in[0], y, y, variable(tape, self.parameter("w", {3}))};
                                     },
                                     {"a", "b", "c", "d"});
  const OnnxFile file = exported(one);
  EXPECT_EQ(file.count("Identity"), 3u);
  EXPECT_THAT(file.outputs, Contains(Pair("d", "float [3]")));
}

// An operator of a program is exported if it uses kernels that have nodes.
Var reversed(Tape& tape, Var x) {
  const Tape::OpScope scope(tape, "reverse_gradient");
  return tape.make_var(x.value(), x.needs_grad());
}
TEST_F(Onnx, OwnOperatorsOfKnownKernels) {
  const OnnxFile file = exported([](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
    const Var x = reversed(tape, sin(tape, in[0]));
    const Tape::OpScope scope(tape, "own_scale");
    const Tensor y = tape.backend().empty(x.shape());
    tape.backend().operators().forward(Affine{2.0f, 1.0f}, x.value(), y);
    return tape.make_var(y, false);
  });
  EXPECT_THAT(file.ops(), ElementsAre("Sin", "Mul", "Add"));
  EXPECT_EQ(file.nodes[1].name, "own_scale/Mul");
}

TEST_F(Onnx, WhatIsNoneOfItsOperatorsIsRefusedByName) {
  const auto own = [](const char* name, auto compute) {
    return [name, compute](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
      const Var x = relu(tape, in[0]);
      Tensor y = tape.backend().empty(x.shape());
      {
        const Tape::OpScope scope(tape, name);
        compute(tape, x.value(), y);
      }
      return exp(tape, tape.make_var(std::move(y), false));
    };
  };
  EXPECT_THAT(refusal(own("own_loop", [](Tape&, const Tensor& x, const Tensor& y) { y.f32()[0] = x.f32()[0]; })),
              AllOf(HasSubstr("operator \"own_loop\" cannot be exported to ONNX"), HasSubstr("looks at numbers")));
  EXPECT_THAT(
      refusal(own("own_look", [](Tape& tape, const Tensor& x, const Tensor&) { values_of(tape.backend(), x); })),
      AllOf(HasSubstr("operator \"own_look\""), HasSubstr("looks at numbers")));
  const auto silent = [](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
    Tensor y;
    {
      const Tape::OpScope scope(tape, "own_kernel");  // of CUDA, perhaps
      y = tape.backend().empty(in[0].shape());
    }
    return exp(tape, tape.make_var(std::move(y), false));
  };
  EXPECT_THAT(refusal(silent),
              AllOf(HasSubstr("operator \"own_kernel\" cannot be exported"), Not(HasSubstr("\"exp\""))));
  const auto unnamed = [](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
    return exp(tape, tape.make_var(tape.backend().empty(in[0].shape()), false));
  };
  EXPECT_THAT(refusal(unnamed), HasSubstr("an operator without a name (Tape::OpScope) cannot be exported"));
  const auto own_reading = [](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
    const Var x = relu(tape, in[0]);
    const Tape::OpScope scope(tape, "own_reading");
    const Tensor y = tape.backend().empty(x.shape()), z = tape.backend().empty(x.shape());
    tape.backend().pointwise().unary(UnaryOp::kRelu, y, z);
    return tape.make_var(z, false);
  };
  EXPECT_THAT(refusal(own_reading), HasSubstr("operator \"own_reading\" cannot be exported"));
  const auto elsewhere = [this](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
    return tape.input(to_device(*backend, in[0].value(), tape.backend()));
  };
  EXPECT_THAT(refusal(elsewhere), HasSubstr("a tensor of shapes alone"));
  // Into memory that held something else before.
  const auto reused = [](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
    { const Tensor gone = relu(tape, in[0]).value(); }
    const Tape::OpScope scope(tape, "own_reuse");
    for (int i = 0; i < 3; ++i) {
      Tensor temporary = tape.backend().empty(in[0].shape());
      if (i < 2) tape.backend().pointwise().copy(in[0].value(), temporary);
      if (i == 2) return tape.make_var(std::move(temporary), false);
    }
    return in;
  };
  EXPECT_THAT(refusal(reused), HasSubstr("operator \"own_reuse\" cannot be exported"));
  const auto part = [](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
    const Tape::OpScope scope(tape, "own_part");
    const Tensor x = in[0].value(), y = tape.backend().empty(x.shape());
    tape.backend().pointwise().copy(x, y);
    tape.backend().pointwise().fill(y.slice(0, 1), 0.0f);
    return tape.make_var(y, false);
  };
  EXPECT_THAT(refusal(part), HasSubstr("operator \"own_part\" cannot be exported"));
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
                const Tensor state = tape.backend().empty({3}, DType::kI64);
                tape.set_dropout_state(state);
                return dropout(tape, in[0], 0.5, 0);
              }),
              AllOf(HasSubstr("operator \"dropout\""), HasSubstr("drops elements")));
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
                tape.set_dropout_state(tape.backend().empty({3}, DType::kI64));
                return add(tape, in[0], randn(tape, in[0].shape(), 0));
              }),
              AllOf(HasSubstr("operator \"randn\""), HasSubstr("random numbers")));
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape, const Vars& in) -> Vars { return sum(tape, in[0], 1.0f).value; }),
              AllOf(HasSubstr("operator \"sum\""), HasSubstr("a loss")));
  EXPECT_THAT(refusal([](FunctionModule& self, Tape& tape, const Vars& in) -> Vars {
                tape.backend().pointwise().copy(in[0].value().slice(0, 1), self.parameter("w", {1, 6}).value());
                return in[0];
              }),
              HasSubstr("writes to memory that stays"));
}

TEST_F(Onnx, ModulesInOperatorsAreNamed) {
  struct Inner final : Module {
    Var forward(Tape& tape, Var x) override {
      const Tape::OpScope scope(tape, "own_loop");
      return tape.make_var(Tensor::view_of(x.value().f32(), x.shape()), false);
    }
  };
  struct Outer final : Module {
    explicit Outer() : inner(register_module("noise", std::make_unique<Inner>())) {}
    Var forward(Tape& tape, Var x) override { return inner(tape, x); }
    Inner& inner;
  } outer;
  outer.train(false);
  EXPECT_THAT(refusal_of([&] {
                export_onnx(*backend, outer, {{.shape = {1, 2}}}, path);
              }),
              HasSubstr("operator \"own_loop\" cannot be exported to ONNX: noise: "));
}

TEST_F(Onnx, WhatDependsOnTheBatchIsRefused) {
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape, const Vars& in) -> Vars { return mean_over(tape, in[0], {0}); }),
              AllOf(HasSubstr("\"affine\""), HasSubstr("depends on the number of samples")));
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
                return slice(tape, in[0], 0, 0, in[0].shape()[0] - 1);
              }),
              HasSubstr("depends on the number of samples"));
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
                std::vector<float> values(static_cast<std::size_t>(in[0].shape().count()));
                for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
                return add(tape, in[0],
                           tape.input(tape.backend().from_host(values.data(), in[0].shape(), DType::kF32)));
              }),
              HasSubstr("depends on the number of samples"));
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape, const Vars& in) -> Vars {
                return in[0].shape()[0] > 12 ? relu(tape, in[0]) : exp(tape, in[0]);
              }),
              HasSubstr("depends on the number of samples"));
}

TEST_F(Onnx, WhatDependsOnTheLengthIsRefused) {
  const auto mean = [](FunctionModule&, Tape& tape, const Vars& in) -> Vars { return mean_over(tape, in[0], {1}); };
  EXPECT_THAT(refusal(mean, {sequence()}),
              AllOf(HasSubstr("depends on the length of the texts"), HasSubstr("one length")));
  EXPECT_THAT(exported(mean, {numbers_input("x", {1, 24, 6})}).outputs, ElementsAre(Pair("y", "float [batch, 6]")));
  EXPECT_THAT(refusal([](FunctionModule&, Tape& tape,
                         const Vars& in) -> Vars { return slice(tape, in[0], 1, 1, in[0].shape()[1]); },
                      {sequence()}),
              HasSubstr("depends on the length of the texts"));
}

TEST_F(Onnx, MistakesAreRefused) {
  Linear module(context, 6, 2);
  EXPECT_THAT(refusal_of([&] {
                export_onnx(*backend, module, {{.shape = {1, 6}}}, path);
              }),
              HasSubstr("in training mode"));
  module.train(false);
  EXPECT_THAT(refusal_of([&] {
                export_onnx(*backend, module, {{.shape = {1, 5}}}, path);
              }),
              HasSubstr("the last axis has in_features, 6"));
  EXPECT_THAT(refusal_of([&] { export_onnx(*backend, module, {{.shape = {}}}, path); }), HasSubstr("the first axis"));
  EXPECT_THAT(refusal_of([&] { export_onnx(*backend, module, {{.shape = {1}, .any_length = true}}, path); }),
              HasSubstr("the second that of a free length"));
  EXPECT_THAT(refusal_of([&] {
                export_onnx(*backend, module, {{.shape = {1, 6}, .dtype = DType::kI64}}, path);
              }),
              HasSubstr("input 'input' of i64"));
  EXPECT_THAT(refusal_of([&] {
                export_onnx(*backend, module, {{.shape = {1, 6}}}, path, {.outputs = {"a", "b"}});
              }),
              HasSubstr("2 names for the 1 outputs"));
  EXPECT_THAT(refusal_of([&] {
                export_onnx(*backend, module, {{.name = "weight", .shape = {1, 6}}}, path);
              }),
              HasSubstr("two values of the ONNX graph are called 'weight'"));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Onnx, TheOldFileStaysWhereAnExportFails) {
  directory.write("m.onnx", "old");
  Linear module(context, 6, 2);
  module.train(false);
  EXPECT_THROW(export_onnx(*backend, module, {{.shape = {1, 5}}}, path), UsageError);
  EXPECT_EQ(lockstep::testing::read_file(path), "old");
  EXPECT_THROW(export_onnx(*backend, module, {{.shape = {1, 6}}}, directory.path("none/m.onnx")), IoError);
}

TEST_F(Onnx, LargeWeightsLieBesideTheFile) {
  const auto module = std::make_unique<Sequential>();
  module->then(std::make_unique<Linear>(context, 31, 23)).then(std::make_unique<ReLU>());
  module->then(std::make_unique<Linear>(context, 23, 19));
  module->train(false);
  const OnnxFile whole = exported(*module, {{.shape = {1, 31}}});
  EXPECT_EQ(report.data_bytes, 0u);
  EXPECT_FALSE(std::filesystem::exists(path + ".data"));
  const OnnxFile apart = exported(*module, {{.shape = {1, 31}}}, {.most_bytes = 1000});
  const std::string data = lockstep::testing::read_file(path + ".data");
  EXPECT_EQ(report.data_bytes, data.size());
  EXPECT_LT(report.bytes, 1500u);
  int beside = 0;
  for (const auto& [name, tensor] : apart.initializers) {
    if (tensor.external.empty()) {
      EXPECT_EQ(tensor.bytes, whole.initializers.at(name).bytes) << name;
      continue;
    }
    ++beside;
    EXPECT_EQ(tensor.external.at("location"), "m.onnx.data");
    const auto offset = std::stoull(tensor.external.at("offset")), length = std::stoull(tensor.external.at("length"));
    EXPECT_EQ(offset % 64, 0u);
    EXPECT_EQ(data.substr(offset, length), whole.initializers.at(name).bytes) << name;
  }
  EXPECT_EQ(beside, 2);
  EXPECT_EQ(apart.ops(), whole.ops());
}

TEST_F(Onnx, FusedModulesHaveTheBiasesOfTheirNormalisations) {
  const auto module = std::make_unique<Sequential>();
  module->then(std::make_unique<Conv2d>(context, 2, 3, Window{.kernel = {3, 3}}, false));
  module->then(std::make_unique<BatchNorm>(context, 3));
  module->train(false);
  EXPECT_THAT(exported(*module, {{.shape = {1, 5, 5, 2}}}).ops(), Contains("BatchNormalization"));
  module->fuse();
  const OnnxFile fused = exported(*module, {{.shape = {1, 5, 5, 2}}});
  EXPECT_THAT(fused.ops(), ElementsAre("Conv", "Transpose")) << "outputs lie as the module's do";
  EXPECT_TRUE(fused.initializers.contains("0.bias"));
}

// What a module keeps from one pass to the next is not from the pass that was recorded.
TEST_F(Onnx, AModuleComputesTheSameAfterwards) {
  const ModelSpec spec = {.name = "bert",
                          .sample_shape = {8},
                          .classes = 9,
                          .settings = {{"layers", 1}, {"heads", 2}, {"width", 8}, {"context", 40}}};
  const auto module = make_model(context, spec);
  module->train(false);
  const auto output = [&](Module& of) {
    std::vector<std::int32_t> tokens(11 * 19);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i % 9);
    Tape tape(*backend);
    tape.set_recording(false);
    const Tensor x = backend->from_host(tokens.data(), {11, 19}, DType::kI32);
    return values_of(*backend, of.forward(tape, tape.input(x)).value());
  };
  const OnnxFile file = exported(*module, {{.shape = {1, 40}, .dtype = DType::kI32, .any_length = true}});
  EXPECT_THAT(file.inputs, ElementsAre(Pair("input", "int64 [batch, length]")));
  Generator same(1);
  Context again{*backend, same};
  const auto other = make_model(again, spec);
  other->train(false);
  EXPECT_EQ(output(*module), output(*other));
}

}  // namespace
}  // namespace lockstep::nn
