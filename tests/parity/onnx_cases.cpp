// For onnx_check.py: exports operators and models to ONNX, and writes what they compute here.
//
//   onnx_cases list                 their names, in lines
//   onnx_cases write NAME DIR       DIR/NAME.onnx, and DIR/NAME.0.safetensors and so on: inputs and outputs of a pass
//   each
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "inference/export.h"
#include "lockstep/base/run_main.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/models/models.h"
#include "tests/nn/onnx_cases.h"

namespace lockstep::nn::testing {
namespace {

constexpr std::int64_t kOneLength = 6;

// Values that training would have moved: of parameters and buffers, in proportion.
void nudge(Module& module) {
  std::uint64_t seed = 1000;
  const auto move = [&](Backend& backend, const Tensor& tensor) {
    auto values = values_of(backend, tensor);
    const auto noise = values_of(backend, random_tensor(backend, tensor.shape(), ++seed));
    double squares = 0;
    for (const float value : values) squares += static_cast<double>(value) * static_cast<double>(value);
    const double size = std::sqrt(squares / static_cast<double>(values.size()));
    const auto by = static_cast<float>(size > 0 ? 0.2 * size : 0.1);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += by * noise[i];
    backend.upload(std::as_bytes(std::span(values)), tensor);
  };
  for (const auto& [name, parameter] : module.named_parameters()) {
    move(parameter->backend(), parameter->value());
    parameter->changed();
  }
  for (const auto& [name, tensor, backend] : module.named_buffers())
    if (tensor->dtype() == DType::kF32) move(*backend, *tensor);
}

OnnxCase model_case(const std::string& name, const ModelSpec& given) {
  const ModelSpec spec = complete(given);
  OnnxCase made = {.name = name,
                   .build =
                       [spec](Context& context) {
                         auto module = make_model(context, spec);
                         nudge(*module);
                         module->train(false);
                         return module;
                       },
                   .inputs = {},
                   .outputs = {"logits"}};
  std::int64_t codes = spec.vocabulary > 0 ? spec.vocabulary : spec.classes;
  if (!spec.categories.empty()) {
    codes = 0;
    for (const std::int64_t some : spec.categories) codes += some;
  }
  for (const OnnxInput& input : inference::onnx_inputs_of(spec)) {
    OnnxCase::Input one{input};
    one.below = static_cast<std::int32_t>(input.name == "token_types" ? 2 : codes);
    if (input.name == "lengths") {
      one.from = 1;
      one.below = OnnxCase::Input::kOfLength;
    }
    made.inputs.push_back(one);
  }
  return made;
}

std::vector<OnnxCase> model_cases() {
  std::vector<OnnxCase> all;
  const auto add = [&](const ModelSpec& spec, const std::string& variant = "") {
    all.push_back(model_case(spec.name + variant, spec));
  };
  add({.name = "linear", .sample_shape = {5}, .classes = 2});
  add({.name = "linear", .sample_shape = {4, 3, 2}, .classes = 3}, ".images");
  add({.name = "mlp", .sample_shape = {28, 28, 1}});
  add({.name = "mlp", .sample_shape = {6, 5, 3}, .settings = {{"hidden", std::vector<std::int64_t>{9}}}}, ".colours");
  add({.name = "linear", .sample_shape = {1}, .classes = 1}, ".least");
  add({.name = "mlp", .sample_shape = {3}, .classes = 1, .settings = {{"hidden", std::vector<std::int64_t>()}}},
      ".least");
  add({.name = "tabular", .sample_shape = {16}, .classes = 3});
  add({.name = "tabular", .sample_shape = {4}, .classes = 1, .categories = {3, 5}}, ".both");
  add({.name = "tabular", .sample_shape = {0}, .classes = 2, .categories = {3, 5, 2}}, ".categories");
  add({.name = "cnn", .sample_shape = {28, 28, 1}});
  add({.name = "cnn", .sample_shape = {9, 6, 3}}, ".oblong");
  add({.name = "cnn", .sample_shape = {4, 4, 1}, .classes = 1}, ".least");
  for (const char* name : {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"})
    add({.name = name, .sample_shape = {64, 64, 3}, .classes = 7});
  add({.name = "resnet18", .sample_shape = {65, 47, 1}, .classes = 7}, ".oblong");
  add({.name = "resnet18-cifar", .sample_shape = {32, 32, 3}});
  add({.name = "mobilenet-v2", .sample_shape = {96, 64, 3}});
  add({.name = "vgg11", .sample_shape = {64, 96, 3}});
  add({.name = "vgg11", .sample_shape = {224, 224, 3}}, ".usual");
  add({.name = "vit", .sample_shape = {32, 32, 3}});
  add({.name = "vit", .sample_shape = {16, 16, 1}, .classes = 1, .settings = {{"patch", 16}, {"heads", 1}}},
      ".one_patch");
  add({.name = "vit-b16", .sample_shape = {224, 224, 3}});
  add({.name = "gpt", .sample_shape = {16}, .classes = 50, .settings = {{"context", 16}, {"width", 64}}});
  add({.name = "gpt",
       .sample_shape = {16},
       .classes = 50,
       .settings = {{"context", 16}, {"width", 32}, {"tied", false}}},
      ".untied");
  for (const std::int64_t most : {1, 2, 3})
    add({.name = "gpt",
         .sample_shape = {most},
         .classes = 1,
         .settings = {{"context", most}, {"heads", 1}, {"width", 1}, {"layers", 1}}},
        fmt::format(".of_{}", most));
  add({.name = "gpt2", .sample_shape = {1024}, .classes = 50257});
  add({.name = "llama", .sample_shape = {32}, .classes = 60, .settings = {{"context", 32}}});
  add({.name = "llama",
       .sample_shape = {32},
       .classes = 60,
       .settings = {{"context", 32}, {"heads", 6}, {"kv-heads", 2}, {"width", 48}, {"tied", true}}},
      ".grouped");
  const Settings small = {{"layers", 2}, {"heads", 2}, {"width", 32}, {"context", 24}};
  add({.name = "bert", .sample_shape = {24}, .classes = 90, .settings = small});
  add({.name = "bert", .sample_shape = {24}, .classes = 3, .settings = small, .vocabulary = 90}, ".classes");
  add({.name = "bert-base", .sample_shape = {128}, .classes = 30522});
  add({.name = "bert-large", .sample_shape = {128}, .classes = 4, .settings = {{"layers", 3}}, .vocabulary = 3000});
  for (const char* name : {"rnn", "lstm", "gru"}) {
    add({.name = name, .sample_shape = {30}, .classes = 40, .settings = {{"width", 24}}});
    add({.name = name, .sample_shape = {9, 5, 3}, .settings = {{"width", 24}}}, ".images");
    add({.name = name, .sample_shape = {8, 8, 1}, .settings = {{"width", 24}, {"bidirectional", true}}}, ".both");
  }
  add({.name = "rnn", .sample_shape = {30}, .classes = 40, .settings = {{"width", 24}, {"nonlinearity", "relu"}}},
      ".relu");
  return all;
}

std::vector<OnnxCase> all_cases() {
  auto all = onnx_operator_cases();
  for (auto& one : all) one.name = "operator." + one.name;
  for (auto& one : model_cases()) all.push_back(std::move(one));
  return all;
}

HostTensor host_tensor(Backend& backend, const std::string& name, const Tensor& value) {
  HostTensor made{.name = name, .dtype = value.dtype(), .shape = {}, .bytes = std::vector<std::byte>(value.bytes())};
  made.shape.assign(value.shape().dims().begin(), value.shape().dims().end());
  if (value.count() > 0) backend.download(value, made.bytes);
  return made;
}

void write(const OnnxCase& one, const std::string& directory, std::uint64_t most_bytes) {
  const auto backend = make_cpu_backend(1);
  Generator generator(1);
  Context context{*backend, generator};
  const auto module = one.build(context);
  const std::string path = directory + "/" + one.name;
  struct Pass {
    std::int64_t batch, length;
  };
  int number = 0;
  std::int64_t most = 0;  // 0: no length is free
  for (const auto& input : one.inputs)
    if (input.any_length) most = input.shape[1];
  std::vector<Pass> passes = {{1, kOneLength}, {3, kOneLength}};
  if (most > 0 && most < 3) passes = {{1, most}, {3, most}};  // it is one
  if (most >= 3) passes = {{1, std::min(most, kOneLength)}, {3, most < kOneLength ? 2 : 11}, {2, 1}};
  for (const Pass& pass : passes) {
    Tape tape(*backend);
    tape.set_recording(false);
    std::vector<HostTensor> tensors;
    Vars inputs;
    const auto values = make_inputs(*backend, one, pass.batch, pass.length, 7 + static_cast<std::uint64_t>(number));
    for (std::size_t i = 0; i < values.size(); ++i) {
      tensors.push_back(host_tensor(*backend, "in." + one.inputs[i].name, values[i]));
      inputs.push_back(tape.input(values[i]));
    }
    const Vars outputs = (*module)(tape, inputs);
    for (std::size_t i = 0; i < outputs.size(); ++i)
      tensors.push_back(host_tensor(*backend, "out." + one.outputs[i], outputs[i].value()));
    write_safetensors(fmt::format("{}.{}.safetensors", path, number++), tensors);
  }
  OnnxOptions options{.outputs = one.outputs};
  if (most_bytes > 0) options.most_bytes = most_bytes;
  export_onnx(*backend, *module, plain_inputs(one), path + ".onnx", options);
}

int run(const std::vector<std::string>& words) {
  const auto all = all_cases();
  if (words == std::vector<std::string>{"list"}) {
    for (const auto& one : all) std::printf("%s\n", one.name.c_str());
    return 0;
  }
  check_usage(words.size() >= 3 && words[0] == "write", "onnx_cases knows list and write", "say one of them");
  for (const auto& one : all)
    if (one.name == words[1]) {
      write(one, words[2], words.size() > 3 ? std::stoull(words[3]) : 0);
      return 0;
    }
  throw UsageError("there is no case " + words[1], "onnx_cases list names them");
}

}  // namespace
}  // namespace lockstep::nn::testing

int main(int argc, char** argv) {
  return lockstep::run_main([&] { return lockstep::nn::testing::run({argv + 1, argv + argc}); });
}
