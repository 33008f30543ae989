// A multilayer perceptron.
#include <algorithm>

#include "base/error.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

constexpr const char* kHidden = "hidden";

// fc1 – ReLU – fc2 – ReLU – … – fcN
class Mlp final : public Module {
 public:
  Mlp(Context& context, const ModelSpec& spec) {
    std::int64_t in = features_of(spec);
    auto widths = spec.settings.integers(kHidden);
    widths.push_back(spec.classes);
    for (const auto out : widths) {
      layers_.push_back(
          &register_module("fc" + std::to_string(layers_.size() + 1), std::make_unique<Linear>(context, in, out)));
      in = out;
    }
  }
  Var forward(Tape& tape, Var x) override {
    x = flatten(tape, x);
    for (std::size_t i = 0; i + 1 < layers_.size(); ++i) x = layers_[i]->forward(tape, x, Epilogue::kRelu);
    return layers_.back()->logits(tape, x);
  }

  std::string type_name() const override { return "Mlp"; }

 private:
  std::vector<Linear*> layers_;
};

std::vector<MatrixProduct> mlp_products(const ModelSpec& spec) {
  std::vector<MatrixProduct> all;
  std::int64_t in = features_of(spec);
  for (const auto width : spec.settings.integers(kHidden)) {
    all.push_back({.in = in, .out = width, .reads_data = all.empty()});
    in = width;
  }
  all.push_back({.in = in, .out = spec.classes, .reads_data = all.empty()});
  return all;
}

void read_mlp_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  if (const auto* first = tensors.shape("fc1.weight", 2)) spec.sample_shape = {(*first)[1]};
  std::vector<std::int64_t> widths;
  while (const auto* layer = tensors.shape(fmt::format("fc{}.weight", widths.size() + 1), 2))
    widths.push_back((*layer)[0]);
  if (widths.empty()) {  // other names: an nn.Sequential has its layers in their order
    const auto matrices = tensors.with_dims(2);
    for (const HostTensor* matrix : matrices) {
      if (!widths.empty() && widths.back() != matrix->shape[1]) return;
      widths.push_back(matrix->shape[0]);
    }
    if (!matrices.empty()) spec.sample_shape = {matrices.front()->shape[1]};
  }
  if (widths.empty()) return;
  spec.classes = widths.back();
  widths.pop_back();
  spec.settings.set(kHidden, widths);
}

}  // namespace

const ModelFamily& mlp_family() {
  static const ModelFamily family = {
      .variants = {{.name = "mlp", .sample_shape = {28, 28, 1}}},
      .settings = {hidden_setting({1024, 1024})},
      .takes_vectors = true,
      .takes_images = true,
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        return std::make_unique<Mlp>(context, spec);
      },
      .products = mlp_products,
      .read_tensors = read_mlp_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
