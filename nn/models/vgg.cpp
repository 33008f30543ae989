// Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2015), as torchvision
// has it, with its names and its initial values. (N, H, W, channels) → (N, classes).
#include <string>

#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

constexpr int kPooled = 0;
/// Widths of the 3 × 3 convolutions; kPooled: a pooling, which halves both extents.
constexpr int kPlan[] = {64, kPooled, 128, kPooled, 256, 256, kPooled, 512, 512, kPooled, 512, 512, kPooled};
constexpr std::int64_t kLeast = 32;  // pixels: five poolings halve them
constexpr std::int64_t kSide = 7, kFeatures = 512, kHiddenFeatures = 4096;
constexpr Window kConv = {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}};
constexpr Window kPool = {.kernel = {2, 2}, .stride = {2, 2}, .padding = {0, 0}};

std::unique_ptr<Sequential> vgg_features(Context& context, std::int64_t channels) {
  auto made = std::make_unique<Sequential>();
  for (const int width : kPlan) {
    if (width == kPooled) {
      made->then(std::make_unique<MaxPool2d>(kPool));
      continue;
    }
    made->then(std::make_unique<Conv2d>(context, channels, width, kConv, Conv2d::FanOut{.bias = true}))
        .then(std::make_unique<ReLU>());
    channels = width;
  }
  return made;
}

std::unique_ptr<Sequential> vgg_classifier(Context& context, std::int64_t classes, double dropout) {
  constexpr Linear::Normal kStyle = {.deviation = 0.01};
  auto made = std::make_unique<Sequential>();
  made->then(std::make_unique<Linear>(context, kFeatures * kSide * kSide, kHiddenFeatures, kStyle))
      .then(std::make_unique<ReLU>())
      .then(std::make_unique<Dropout>(dropout, 0))
      .then(std::make_unique<Linear>(context, kHiddenFeatures, kHiddenFeatures, kStyle))
      .then(std::make_unique<ReLU>())
      .then(std::make_unique<Dropout>(dropout, 1))
      .then(std::make_unique<Linear>(context, kHiddenFeatures, classes, kStyle));
  return made;
}

class Vgg final : public Module {
 public:
  Vgg(Context& context, const ModelSpec& spec)
      : features_(register_module("features", vgg_features(context, spec.sample_shape[2]))),
        avgpool_(register_module("avgpool", std::make_unique<AdaptiveAvgPool2d>(kSide, kSide))),
        classifier_(
            register_module("classifier", vgg_classifier(context, spec.classes, spec.settings.number("dropout")))) {}

  Var forward(Tape& tape, Var x) override {
    return classifier_.forward(tape, flatten(tape, avgpool_.forward(tape, features_.forward(tape, x))));
  }

  std::string type_name() const override { return "VGG"; }

 private:
  Sequential& features_;
  AdaptiveAvgPool2d& avgpool_;
  Sequential& classifier_;
};

std::vector<MatrixProduct> vgg_products(const ModelSpec& spec) {
  std::int64_t height = spec.sample_shape[0], width = spec.sample_shape[1], in = spec.sample_shape[2];
  std::vector<MatrixProduct> all;
  for (const int out : kPlan) {
    if (out == kPooled) {
      height /= 2;
      width /= 2;
      continue;
    }
    all.push_back({.rows = height * width, .in = 9 * in, .out = out, .reads_data = all.empty()});
    in = out;
  }
  all.push_back({.in = kFeatures * kSide * kSide, .out = kHiddenFeatures});
  all.push_back({.in = kHiddenFeatures, .out = kHiddenFeatures});
  all.push_back({.in = kHiddenFeatures, .out = spec.classes});
  return all;
}

// Any size of images will do: the usual one stays.
void read_vgg_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  if (const auto* head = tensors.shape("classifier.6.weight", 2)) spec.classes = (*head)[0];
  if (const auto* stem = tensors.shape("features.0.weight", 4)) spec.sample_shape[2] = (*stem)[1];
}

}  // namespace

const ModelFamily& vgg_family() {
  static const ModelFamily family = {
      .variants = {{.name = "vgg11",
                    .defaults = {{"dropout", 0.5}},
                    .sample_shape = {224, 224, 3},
                    .classes_of_weights = 1000}},
      .settings = {dropout_setting()},
      .takes_images = true,
      .any_image_size = true,
      // Those of torchvision's reference training.
      .training = {.optimizer = "sgd", .lr_per_256 = 0.01, .weight_decay = 1e-4},
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        check_images(spec, kLeast);
        return std::make_unique<Vgg>(context, spec);
      },
      .products = vgg_products,
      .read_tensors = read_vgg_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
