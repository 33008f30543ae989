// Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (2018), as torchvision has it, with its
// names and its initial values. (N, H, W, channels) → (N, classes).
#include <algorithm>
#include <string>

#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

constexpr const char* kMultiplier = "width-multiplier";
constexpr std::int64_t kLeastPixels = 32;  // pixels: five strides halve them
constexpr std::int64_t kFirst = 32, kLast = 1280;

/// Blocks of one width: the first has the stride, and each computes in `expansion` times the width that it is given.
struct MobileStage {
  std::int64_t expansion, width;
  int blocks;
  std::int64_t stride;
};
constexpr MobileStage kMobileStages[] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                                         {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};

// torchvision's: the nearest multiple of 8, at least 8, and one more where that is below nine tenths of it.
std::int64_t scaled_width(std::int64_t width, double multiplier) {
  constexpr std::int64_t kStep = 8;
  const double wanted = static_cast<double>(width) * multiplier;
  const std::int64_t near = std::max(kStep, static_cast<std::int64_t>(wanted + kStep / 2.0) / kStep * kStep);
  return static_cast<double>(near) < 0.9 * wanted ? near + kStep : near;
}

struct MobileBlock {
  std::int64_t in, inner, out, stride;

  bool expands() const { return inner != in; }
  bool adds() const { return stride == 1 && in == out; }
};

struct MobileWidths {
  std::int64_t first, last;
  std::vector<MobileBlock> blocks;
};

MobileWidths widths_of(const ModelSpec& spec) {
  const double multiplier = spec.settings.number(kMultiplier);
  MobileWidths made = {scaled_width(kFirst, multiplier), scaled_width(kLast, std::max(1.0, multiplier)), {}};
  std::int64_t in = made.first;
  for (const MobileStage& stage : kMobileStages)
    for (int i = 0; i < stage.blocks; ++i) {
      const std::int64_t out = scaled_width(stage.width, multiplier);
      made.blocks.push_back({in, stage.expansion * in, out, i == 0 ? stage.stride : 1});
      in = out;
    }
  return made;
}

std::unique_ptr<Conv2d> mobile_convolution(Context& context, std::int64_t in, std::int64_t out, std::int64_t kernel,
                                           std::int64_t stride, std::int64_t groups = 1) {
  const Window window = {.kernel = {kernel, kernel}, .stride = {stride, stride}, .padding = {kernel / 2, kernel / 2}};
  return std::make_unique<Conv2d>(context, in, out, window, Conv2d::FanOut{}, groups);
}

std::unique_ptr<Sequential> activated_convolution(Context& context, std::int64_t in, std::int64_t out,
                                                  std::int64_t kernel, std::int64_t stride, std::int64_t groups = 1) {
  auto made = std::make_unique<Sequential>();
  made->then(mobile_convolution(context, in, out, kernel, stride, groups))
      .then(std::make_unique<BatchNorm>(context, out))
      .then(std::make_unique<ReLU6>());
  return made;
}

class InvertedResidual final : public Module {
 public:
  InvertedResidual(Context& context, const MobileBlock& spec)
      : conv_(register_module("conv", layers_of(context, spec))), adds_(spec.adds()) {}

  Var forward(Tape& tape, Var x) override {
    if (!recomputed()) return compute(tape, x);
    return recompute(tape, {x}, [this](Tape& on, const Vars& again) { return compute(on, again); });
  }
  std::string type_name() const override { return "InvertedResidual"; }

 private:
  static std::unique_ptr<Sequential> layers_of(Context& context, const MobileBlock& spec) {
    auto made = std::make_unique<Sequential>();
    if (spec.expands()) made->then(activated_convolution(context, spec.in, spec.inner, 1, 1));
    made->then(activated_convolution(context, spec.inner, spec.inner, 3, spec.stride, spec.inner))
        .then(mobile_convolution(context, spec.inner, spec.out, 1, 1))
        .then(std::make_unique<BatchNorm>(context, spec.out));
    return made;
  }

  Var compute(Tape& tape, Var x) {
    const Var y = conv_.forward(tape, x);
    return adds_ ? add(tape, x, y) : y;
  }

  Sequential& conv_;
  bool adds_;
};

class MobileNet final : public Module {
 public:
  MobileNet(Context& context, const ModelSpec& spec) {
    const MobileWidths widths = widths_of(spec);
    auto features = std::make_unique<Sequential>();
    features->then(activated_convolution(context, spec.sample_shape[2], widths.first, 3, 2));
    for (const MobileBlock& block : widths.blocks) {
      auto made = std::make_unique<InvertedResidual>(context, block);
      blocks_.push_back(made.get());
      features->then(std::move(made));
    }
    features->then(activated_convolution(context, widths.blocks.back().out, widths.last, 1, 1));
    features_ = &register_module("features", std::move(features));
    auto classifier = std::make_unique<Sequential>();
    classifier->then(std::make_unique<Dropout>(spec.settings.number("dropout"), 0))
        .then(std::make_unique<Linear>(context, widths.last, spec.classes, Linear::Normal{.deviation = 0.01}));
    classifier_ = &register_module("classifier", std::move(classifier));
  }

  Var forward(Tape& tape, Var x) override {
    x = adaptive_avg_pool2d(tape, features_->forward(tape, x), 1, 1);
    return classifier_->forward(tape, flatten(tape, x));
  }
  std::vector<Module*> blocks() override { return blocks_; }
  std::string type_name() const override { return "MobileNetV2"; }

 private:
  Sequential* features_ = nullptr;
  Sequential* classifier_ = nullptr;
  std::vector<Module*> blocks_;
};

// Paddings are half a kernel: an extent of n becomes ceil(n / stride).
std::vector<MatrixProduct> mobilenet_products(const ModelSpec& spec) {
  const MobileWidths widths = widths_of(spec);
  std::int64_t height = spec.sample_shape[0], width = spec.sample_shape[1];
  const auto shrink = [&](std::int64_t stride) {
    height = (height + stride - 1) / stride;
    width = (width + stride - 1) / stride;
  };
  std::vector<MatrixProduct> all;
  const auto convolve = [&](std::int64_t in, std::int64_t out) {
    all.push_back({.rows = height * width, .in = in, .out = out});
  };
  shrink(2);
  convolve(9 * spec.sample_shape[2], widths.first);
  all[0].reads_data = true;
  for (const MobileBlock& block : widths.blocks) {
    if (block.expands()) convolve(block.in, block.inner);
    shrink(block.stride);
    convolve(9, block.inner);
    convolve(block.inner, block.out);
  }
  convolve(widths.blocks.back().out, widths.last);
  all.push_back({.in = widths.last, .out = spec.classes});
  return all;
}

// Any size of images will do: the usual one stays. Of multipliers the published ones are known by their widths.
void read_mobilenet_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  if (const auto* head = tensors.shape("classifier.1.weight", 2)) spec.classes = (*head)[0];
  const auto* const stem = tensors.shape("features.0.0.weight", 4);
  if (stem == nullptr) return;
  spec.sample_shape[2] = (*stem)[1];
  const auto* const last = tensors.shape("features.17.conv.3.weight", 1);
  for (const double multiplier : {0.35, 0.5, 0.75, 1.0, 1.4})
    if (last != nullptr && scaled_width(kFirst, multiplier) == (*stem)[0] &&
        scaled_width(std::end(kMobileStages)[-1].width, multiplier) == (*last)[0])
      spec.settings.set(kMultiplier, multiplier);
}

}  // namespace

const ModelFamily& mobilenet_family() {
  static const ModelFamily family = {
      .variants = {{.name = "mobilenet-v2",
                    .defaults = {{"dropout", 0.2}},
                    .sample_shape = {224, 224, 3},
                    .classes_of_weights = 1000}},
      .settings = {{.name = kMultiplier,
                    .fallback = 1.0,
                    .help = "all layers' channels, as a multiple of the usual ones",
                    .low = 0,
                    .high = 16,
                    .open_low = true,
                    .placeholder = "X"},
                   dropout_setting()},
      .takes_images = true,
      .blocks = true,
      .batch_norm = true,
      .any_image_size = true,
      // Those of torchvision's reference training.
      .training = {.optimizer = "sgd", .lr_per_256 = 0.045, .weight_decay = 4e-5},
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        check_images(spec, kLeastPixels);
        return std::make_unique<MobileNet>(context, spec);
      },
      .products = mobilenet_products,
      .read_tensors = read_mobilenet_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
