// A small convolutional network for small images.
#include <cmath>

#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

constexpr std::int64_t kChannels1 = 32, kChannels2 = 64, kFeatures = 128;
constexpr std::int64_t kLeast = 4;  // pixels: two poolings halve them

// conv1 3×3, 32 – ReLU – pool 2 – conv2 3×3, 64 – ReLU – pool 2 – fc1 128 – ReLU – fc2
class Cnn final : public Module {
 public:
  Cnn(Context& context, const ModelSpec& spec)
      : conv1_(register_module("conv1", std::make_unique<Conv2d>(context, spec.sample_shape[2], kChannels1, kConv))),
        conv2_(register_module("conv2", std::make_unique<Conv2d>(context, kChannels1, kChannels2, kConv))),
        fc1_(register_module(
            "fc1", std::make_unique<Linear>(
                       context, kChannels2 * (spec.sample_shape[0] / 4) * (spec.sample_shape[1] / 4), kFeatures))),
        fc2_(register_module("fc2", std::make_unique<Linear>(context, kFeatures, spec.classes))) {}

  Var forward(Tape& tape, Var x) override {
    x = conv1_.forward(tape, x, Epilogue::kRelu, kPool);
    x = conv2_.forward(tape, x, Epilogue::kRelu, kPool);
    x = fc1_.forward(tape, flatten(tape, x), Epilogue::kRelu);
    return fc2_.logits(tape, x);
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

std::vector<MatrixProduct> cnn_products(const ModelSpec& spec) {
  const std::int64_t height = spec.sample_shape[0], width = spec.sample_shape[1];
  return {{.rows = height * width, .in = 9 * spec.sample_shape[2], .out = kChannels1, .reads_data = true},
          {.rows = (height / 2) * (width / 2), .in = 9 * kChannels1, .out = kChannels2},
          {.in = kChannels2 * (height / 4) * (width / 4), .out = kFeatures},
          {.in = kFeatures, .out = spec.classes}};
}

// The images are taken to be squares.
void read_cnn_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  std::int64_t side = 224, channels = 3;
  const auto *head = tensors.shape("fc2.weight", 2), *stem = tensors.shape("conv1.weight", 4),
             *first = tensors.shape("fc1.weight", 2);
  const auto matrices = tensors.with_dims(2), kernels = tensors.with_dims(4);
  // Other names: layers are in their order.
  if (stem == nullptr && kernels.size() == 2) stem = &kernels[0]->shape;
  if (head == nullptr && first == nullptr && matrices.size() == 2)
    first = &matrices[0]->shape, head = &matrices[1]->shape;
  if (head != nullptr) spec.classes = (*head)[0];
  if (stem != nullptr) channels = (*stem)[1];
  if (first != nullptr)
    // NOLINTNEXTLINE(bugprone-integer-division): whole images have a whole number of channels
    side = 4 * std::llround(std::sqrt(static_cast<double>((*first)[1] / kChannels2)));
  spec.sample_shape = {side, side, channels};
}

}  // namespace

const ModelFamily& cnn_family() {
  static const ModelFamily family = {
      .variants = {{.name = "cnn", .sample_shape = {28, 28, 1}}},
      .takes_images = true,
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        check_images(spec, kLeast);
        return std::make_unique<Cnn>(context, spec);
      },
      .products = cnn_products,
      .read_tensors = read_cnn_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
