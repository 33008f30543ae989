// Modules for each operator, to be exported to ONNX: what becomes of them is looked at by tests/nn/onnx_test.cpp, and
// computed by onnxruntime in tests/parity/onnx_check.py.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/splitmix.h"
#include "lockstep/nn/io/onnx.h"
#include "lockstep/nn/layers/layers.h"
#include "tests/nn/operator_cases.h"
#include "tests/nn/values.h"

namespace lockstep::nn::testing {

/// A module with one function as its forward pass, and as many parameters as that asks for.
class FunctionModule final : public Module {
 public:
  using Function = std::function<Vars(FunctionModule& self, Tape& tape, const Vars& inputs)>;
  FunctionModule(Context& context, Function function) : context_(context), function_(std::move(function)) {}
  Vars forward_all(Tape& tape, const Vars& inputs) override { return function_(*this, tape, inputs); }

  /// Made when it is first asked for: random numbers around `middle`.
  Parameter& parameter(const std::string& name, const Shape& shape, FileLayout layout = FileLayout::kSame,
                       float middle = 0.0f) {
    for (const auto& known : named_parameters())
      if (known.name == name) return *known.parameter;
    Parameter& made = register_parameter(name, std::make_unique<Parameter>(context_.backend, shape, layout));
    std::vector<float> values(static_cast<std::size_t>(shape.count()));
    context_.generator.uniform(values, static_cast<double>(middle) - 0.5, static_cast<double>(middle) + 0.5);
    context_.backend.upload(std::as_bytes(std::span(values)), made.value());
    return made;
  }
  /// The same for a child.
  template <class M, class... Args>
  M& child(const std::string& name, Args&&... args) {
    for (const auto& [known, module] : named_modules())
      if (known == name) return dynamic_cast<M&>(*module);
    M& made = register_module<M>(name, context_, std::forward<Args>(args)...);
    made.train(false);
    return made;
  }
  Backend& backend() { return context_.backend; }

 private:
  Context context_;  // its backend and generator outlive the module
  Function function_;
};

struct OnnxCase {
  struct Input : OnnxInput {
    std::int32_t from = 0, below = 0;  // of whole numbers; kOfLength: up to the length
    static constexpr std::int32_t kOfLength = std::numeric_limits<std::int32_t>::max();
  };
  std::string name;
  std::function<std::unique_ptr<Module>(Context&)> build;
  std::vector<Input> inputs;
  std::vector<std::string> outputs = {"y"};
};

inline std::vector<OnnxInput> plain_inputs(const OnnxCase& one) { return {one.inputs.begin(), one.inputs.end()}; }

/// Inputs of a case for so many samples of so many tokens, where the length is free.
inline std::vector<Tensor> make_inputs(Backend& backend, const OnnxCase& one, std::int64_t batch, std::int64_t length,
                                       std::uint64_t seed) {
  std::vector<Tensor> made;
  for (const auto& input : one.inputs) {
    Shape shape = input.shape;
    shape[0] = batch;
    if (input.any_length) shape[1] = length;
    if (input.dtype == DType::kF32) {
      made.push_back(shape.count() > 0 ? random_tensor(backend, shape, ++seed) : backend.empty(shape));
      continue;
    }
    SplitMix64 random(++seed);
    const std::int64_t below = input.below == OnnxCase::Input::kOfLength ? length + 1 : input.below;
    std::vector<std::int32_t> values(static_cast<std::size_t>(shape.count()));
    for (auto& value : values)
      value = input.from + static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(below - input.from)));
    made.push_back(backend.from_host(values.data(), shape, DType::kI32));
  }
  return made;
}

inline OnnxCase::Input numbers_input(std::string name, const Shape& shape, bool any_length = false) {
  return {{.name = std::move(name), .shape = shape, .any_length = any_length}};
}
inline OnnxCase::Input whole_input(std::string name, const Shape& shape, std::int32_t below, bool any_length = false,
                                   std::int32_t from = 0) {
  OnnxCase::Input made;
  made.name = std::move(name);
  made.shape = shape;
  made.dtype = DType::kI32;
  made.any_length = any_length;
  made.from = from;
  made.below = below;
  return made;
}

/// For Function: what it takes and returns may be one value.
inline OnnxCase function_case(std::string name, std::vector<OnnxCase::Input> inputs, FunctionModule::Function function,
                              std::vector<std::string> outputs = {"y"}) {
  return {.name = std::move(name),
          .build = [function = std::move(function)](Context& context) -> std::unique_ptr<Module> {
            auto made = std::make_unique<FunctionModule>(context, function);
            made->train(false);
            return made;
          },
          .inputs = std::move(inputs),
          .outputs = std::move(outputs)};
}

/// For each function of lockstep/nn/autograd/functions.h, whose name it begins with.
std::vector<OnnxCase> onnx_operator_cases();

}  // namespace lockstep::nn::testing
