// One linear layer.
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

// fc
class LinearModel final : public Module {
 public:
  LinearModel(Context& context, const ModelSpec& spec)
      : fc_(register_module("fc", std::make_unique<Linear>(context, features_of(spec), spec.classes))) {}
  Var forward(Tape& tape, Var x) override { return fc_.logits(tape, flatten(tape, x)); }

  std::string type_name() const override { return "LinearModel"; }

 private:
  Linear& fc_;
};

void read_linear_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  const auto* layer = tensors.shape("fc.weight", 2);
  if (const auto matrices = tensors.with_dims(2); layer == nullptr && matrices.size() == 1)
    layer = &matrices.front()->shape;
  if (layer == nullptr) return;
  spec.classes = (*layer)[0];
  spec.sample_shape = {(*layer)[1]};
}

}  // namespace

const ModelFamily& linear_family() {
  // 2 classes and 5 features: the layer of PyTorch's tutorial on data parallelism.
  static const ModelFamily family = {
      .variants = {{.name = "linear", .sample_shape = {5}, .classes_of_random_data = 2}},
      .settings = {size_setting("in", 5, "input features", SettingSpec::Role::kSampleElements),
                   size_setting("out", 2, "output features", SettingSpec::Role::kClasses)},
      .takes_vectors = true,
      .takes_images = true,
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        return std::make_unique<LinearModel>(context, spec);
      },
      .products = [](const ModelSpec& spec) -> std::vector<MatrixProduct> {
        return {{.in = features_of(spec), .out = spec.classes, .reads_data = true}};
      },
      .read_tensors = read_linear_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
