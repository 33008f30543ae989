#include "nn/models/models.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/text.h"
#include "nn/models/resnet.h"

namespace lockstep::nn {
namespace {

std::int64_t features_of(const ModelSpec& spec) {
  std::int64_t features = 1;
  for (const auto d : spec.sample_shape) features *= d;
  return features;
}

// fc
class LinearModel final : public Module {
 public:
  LinearModel(Context& context, const ModelSpec& spec)
      : fc_(register_module("fc", std::make_unique<Linear>(context, features_of(spec), spec.classes))) {}
  Var forward(Tape& tape, Var x) override { return fc_.forward(tape, flatten(tape, x)); }

  std::string type_name() const override { return "LinearModel"; }

 private:
  Linear& fc_;
};

// fc1 – ReLU – fc2 – ReLU – … – fcN
class Mlp final : public Module {
 public:
  Mlp(Context& context, const ModelSpec& spec) {
    std::int64_t in = features_of(spec);
    auto widths = spec.hidden;
    widths.push_back(spec.classes);
    for (const auto out : widths) {
      layers_.push_back(
          &register_module("fc" + std::to_string(layers_.size() + 1), std::make_unique<Linear>(context, in, out)));
      in = out;
    }
  }
  Var forward(Tape& tape, Var x) override {
    x = flatten(tape, x);
    for (std::size_t i = 0; i < layers_.size(); ++i)
      x = layers_[i]->forward(tape, x, i + 1 < layers_.size() ? Epilogue::kRelu : Epilogue::kNone);
    return x;
  }

  std::string type_name() const override { return "Mlp"; }

 private:
  std::vector<Linear*> layers_;
};

// conv1 3×3, 32 – ReLU – pool 2 – conv2 3×3, 64 – ReLU – pool 2 – fc1 128 – ReLU – fc2
class Cnn final : public Module {
 public:
  Cnn(Context& context, const ModelSpec& spec)
      : conv1_(register_module("conv1", std::make_unique<Conv2d>(context, spec.sample_shape[2], 32, kConv))),
        conv2_(register_module("conv2", std::make_unique<Conv2d>(context, 32, 64, kConv))),
        fc1_(register_module("fc1", std::make_unique<Linear>(
                                        context, 64 * (spec.sample_shape[0] / 4) * (spec.sample_shape[1] / 4), 128))),
        fc2_(register_module("fc2", std::make_unique<Linear>(context, 128, spec.classes))) {}

  Var forward(Tape& tape, Var x) override {
    x = conv1_.forward(tape, x, Epilogue::kRelu, kPool);
    x = conv2_.forward(tape, x, Epilogue::kRelu, kPool);
    x = fc1_.forward(tape, flatten(tape, x), Epilogue::kRelu);
    return fc2_.forward(tape, x);
  }

  std::string type_name() const override { return "Cnn"; }

 private:
  static constexpr Window kConv = {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}};
  static constexpr Window kPool = {.kernel = {2, 2}, .stride = {2, 2}, .padding = {0, 0}};
  Conv2d& conv1_;
  Conv2d& conv2_;
  Linear& fc1_;
  Linear& fc2_;
};

std::unique_ptr<Module> made_of(Context& context, const ModelSpec& spec);

}  // namespace

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> names = {"linear",         "mlp",  "cnn", "resnet18", "resnet50",
                                                 "resnet18-cifar", "lstm", "gpt", "gpt2"};
  return names;
}

void check_model_name(const std::string& name) {
  if (std::ranges::find(model_names(), name) != model_names().end()) return;
  const auto near = nearest(name, model_names());
  throw UsageError(
      fmt::format("unknown model '{}'", name),
      near ? fmt::format("did you mean '{}'?", *near) : fmt::format("use one of: {}", join(model_names(), ", ")));
}

GptSpec default_gpt(const std::string& name) {
  if (name == "gpt2") return {.layers = 12, .heads = 12, .width = 768, .context = 1024};
  return {};
}

std::unique_ptr<Module> make_model(Context& context, const ModelSpec& spec) {
  return build_from(context, [spec](Context& other) { return made_of(other, spec); });
}

namespace {

std::unique_ptr<Module> made_of(Context& context, const ModelSpec& spec) {
  check_model_name(spec.name);
  const auto positive = [](std::int64_t d) { return d >= 1; };
  if (spec.classes < 1 || !std::ranges::all_of(spec.sample_shape, positive) ||
      !std::ranges::all_of(spec.hidden, positive))
    throw UsageError(fmt::format("a model with {} classes, inputs of [{}] and hidden layers of [{}]", spec.classes,
                                 fmt::join(spec.sample_shape, ", "), fmt::join(spec.hidden, ", ")),
                     "all sizes are at least 1");
  if (spec.name == "linear") return std::make_unique<LinearModel>(context, spec);
  if (spec.name == "mlp") return std::make_unique<Mlp>(context, spec);
  if (spec.name == "cnn") {
    if (spec.sample_shape.size() != 3 || spec.sample_shape[0] < 4 || spec.sample_shape[1] < 4)
      throw UsageError("cnn takes images of at least 4x4 pixels", "use such data, or the models linear or mlp");
    return std::make_unique<Cnn>(context, spec);
  }
  if (spec.name == "resnet18" || spec.name == "resnet50" || spec.name == "resnet18-cifar") {
    const bool small = spec.name == "resnet18-cifar";
    const std::int64_t least = small ? 8 : 32;
    if (spec.sample_shape.size() != 3 || spec.sample_shape[0] < least || spec.sample_shape[1] < least)
      throw UsageError(fmt::format("{} takes images of at least {}x{} pixels", spec.name, least, least),
                       "use such data, or another model");
    return make_resnet(context, {.depth = spec.name == "resnet50" ? 50 : 18,
                                 .small_images = small,
                                 .zero_init_residual = spec.zero_init_residual,
                                 .channels = spec.sample_shape[2],
                                 .classes = spec.classes});
  }
  if (spec.name == "lstm") {
    if (spec.sample_shape.size() == 3)
      return std::make_unique<LstmClassifier>(context, spec.lstm, spec.sample_shape[1] * spec.sample_shape[2],
                                              spec.classes);
    return std::make_unique<LstmLanguageModel>(context, spec.lstm, spec.classes);
  }
  if (spec.name == "gpt" || spec.name == "gpt2") {
    GptSpec gpt = spec.gpt;
    gpt.vocabulary = spec.classes;
    return std::make_unique<Gpt>(context, gpt);
  }
  LOCKSTEP_ASSERT(false, "model {} has a name and cannot be made", spec.name);
}

}  // namespace
}  // namespace lockstep::nn
