// Vision transformers: torchvision's, with its names and initialisation.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {

const ModelFamily& vit_family();

namespace {

constexpr double kNormEps = 1e-6;
constexpr double kDeviation = 0.02;  // of positions

struct VitSpec {
  std::int64_t layers = 6, heads = 3, width = 192, inner = 768, patch = 4;
  std::int64_t height = 32, image_width = 32, channels = 3, classes = 10;
  double dropout = 0.0;

  std::int64_t patches() const { return (height / patch) * (image_width / patch); }
};

std::unique_ptr<Parameter> drawn(Context& context, const Shape& shape, double deviation, double bound) {
  auto parameter = std::make_unique<Parameter>(context.backend, shape);
  if (!context.generator.makes_values()) return parameter;
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  if (deviation > 0) context.generator.normal(values, 0.0, deviation);
  if (bound > 0) context.generator.uniform(values, -bound, bound);
  context.backend.upload(std::as_bytes(std::span(values)), parameter->value());
  return parameter;
}

class VitAttention final : public Module {
 public:
  VitAttention(Context& context, const VitSpec& spec, std::int64_t index)
      : heads_(spec.heads),
        dropout_(spec.dropout),
        drop_layer_(kFirstOfAttention + index),
        in_weight_(register_parameter("in_proj_weight", drawn(context, {3 * spec.width, spec.width}, 0,
                                                              Linear::xavier_bound(spec.width, 3 * spec.width)))),
        in_bias_(register_parameter("in_proj_bias", drawn(context, {3 * spec.width}, 0, 0))),
        out_(register_module<Linear>("out_proj", context, spec.width, spec.width,
                                     Linear::Uniform{1.0 / std::sqrt(static_cast<double>(spec.width))})) {}

  Var forward(Tape& tape, Var x) override {
    const AttentionOptions options = {.causal = false, .dropout = training() ? dropout_ : 0.0, .layer = drop_layer_};
    return out_(
        tape, name_in_errors([&] { return attention(tape, linear(tape, x, in_weight_, &in_bias_), heads_, options); }));
  }
  std::string type_name() const override { return "MultiheadAttention"; }

 private:
  static constexpr std::int64_t kFirstOfAttention = 1 << 15;  // beside the other dropouts' numbers

  std::int64_t heads_;
  double dropout_;
  std::int64_t drop_layer_;
  Parameter &in_weight_, &in_bias_;
  Linear& out_;
};

class VitFeedForward final : public Module {
 public:
  VitFeedForward(Context& context, const VitSpec& spec)
      : up_(register_module<Linear>("0", context, spec.width, spec.inner,
                                    Linear::Uniform{Linear::xavier_bound(spec.width, spec.inner)})),
        down_(register_module<Linear>("3", context, spec.inner, spec.width,
                                      Linear::Uniform{Linear::xavier_bound(spec.inner, spec.width)})) {}
  Var forward(Tape& tape, Var x) override { return down_(tape, gelu(tape, up_(tape, x))); }
  std::string type_name() const override { return "MLPBlock"; }

 private:
  Linear &up_, &down_;
};

class VitBlock final : public Module {
 public:
  VitBlock(Context& context, const VitSpec& spec, std::int64_t index)
      : norm1_(register_module<LayerNorm>("ln_1", context, spec.width, kNormEps)),
        attention_(register_module<VitAttention>("self_attention", context, spec, index)),
        norm2_(register_module<LayerNorm>("ln_2", context, spec.width, kNormEps)),
        mlp_(register_module<VitFeedForward>("mlp", context, spec)),
        drop1_(register_module("dropout_1", std::make_unique<Dropout>(spec.dropout, 2 * index + 1))),
        drop2_(register_module("dropout_2", std::make_unique<Dropout>(spec.dropout, 2 * index + 2))) {}

  Var forward(Tape& tape, Var x) override {
    if (!recomputed()) return compute(tape, x);
    return recompute(tape, {x}, [this](Tape& on, const Vars& again) { return compute(on, again); });
  }
  std::string type_name() const override { return "EncoderBlock"; }

 private:
  Var compute(Tape& tape, Var x) {
    const auto [sum, normalised] = norm2_.forward_added(tape, x, drop1_(tape, attention_(tape, norm1_(tape, x))));
    return add(tape, sum, drop2_(tape, mlp_(tape, normalised)));
  }

  LayerNorm& norm1_;
  VitAttention& attention_;
  LayerNorm& norm2_;
  VitFeedForward& mlp_;
  Dropout &drop1_, &drop2_;
};

/// Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021. Images (N, H, W, C) of the size that it is built for →
/// classes (N, K), of what becomes of a token beside the patches.
class Vit final : public Module {
 public:
  Vit(Context& context, const VitSpec& spec)
      : spec_(spec),
        class_token_(register_parameter("class_token", drawn(context, {1, 1, spec.width}, 0, 0))),
        patches_(register_module<Conv2d>(
            "conv_proj", context, spec.channels, spec.width,
            Window{.kernel = {spec.patch, spec.patch}, .stride = {spec.patch, spec.patch}},
            Conv2d::Normal{std::sqrt(1.0 / static_cast<double>(spec.channels * spec.patch * spec.patch))})),
        positions_(register_parameter("encoder.pos_embedding",
                                      drawn(context, {1, spec.patches() + 1, spec.width}, kDeviation, 0))),
        drop_(register_module("encoder.dropout", std::make_unique<Dropout>(spec.dropout, 0))) {
    for (std::int64_t i = 0; i < spec.layers; ++i)
      blocks_.push_back(
          &register_module<VitBlock>(fmt::format("encoder.layers.encoder_layer_{}", i), context, spec, i));
    norm_ = &register_module<LayerNorm>("encoder.ln", context, spec.width, kNormEps);
    head_ = &register_module<Linear>("heads.head", context, spec.width, spec.classes, Linear::Uniform{0});
  }

  Var forward(Tape& tape, Var x) override {
    return name_in_errors([&] {
      const Shape& s = x.shape();
      if (s.size() != 4 || s[1] != spec_.height || s[2] != spec_.image_width)
        throw UsageError(fmt::format("a vision transformer for images of {}x{} was given {}", spec_.height,
                                     spec_.image_width, to_string(s)),
                         "its positions are those of one size: give it images of that");
      const Var tokens = reshape(tape, patches_(tape, x), {s[0], spec_.patches(), spec_.width});
      const Var first = broadcast_to(tape, variable(tape, class_token_), {s[0], 1, spec_.width});
      Var h = concat(tape, {first, tokens}, 1);
      h = drop_(tape, add(tape, h, variable(tape, positions_)));
      for (VitBlock* const block : blocks_) h = (*block)(tape, h);
      return head_->logits(tape, take_position(tape, (*norm_)(tape, h), 0));
    });
  }
  std::vector<Module*> blocks() override { return {blocks_.begin(), blocks_.end()}; }
  std::string type_name() const override { return "VisionTransformer"; }

 private:
  VitSpec spec_;
  Parameter& class_token_;
  Conv2d& patches_;
  Parameter& positions_;
  Dropout& drop_;
  std::vector<VitBlock*> blocks_;
  LayerNorm* norm_ = nullptr;
  Linear* head_ = nullptr;
};

VitSpec vit_spec(const ModelSpec& spec) {
  check_images(spec, 1);
  const VitSpec vit = {.layers = spec.settings.integer("layers"),
                       .heads = spec.settings.integer("heads"),
                       .width = spec.settings.integer("width"),
                       .inner = 4 * spec.settings.integer("width"),
                       .patch = spec.settings.integer("patch"),
                       .height = spec.sample_shape[0],
                       .image_width = spec.sample_shape[1],
                       .channels = spec.sample_shape[2],
                       .classes = spec.classes,
                       .dropout = spec.settings.number("dropout")};
  if (vit.width % vit.heads != 0 || vit.height % vit.patch != 0 || vit.image_width % vit.patch != 0)
    throw UsageError(fmt::format("{} with width {}, {} heads and patches of {} for images of {}x{}", spec.name,
                                 vit.width, vit.heads, vit.patch, vit.height, vit.image_width),
                     "--width is a multiple of --heads, and the sides of images are multiples of --patch");
  return vit;
}

std::vector<MatrixProduct> vit_products(const ModelSpec& spec) {
  const VitSpec vit = vit_spec(spec);
  const std::int64_t tokens = vit.patches() + 1, width = vit.width;
  // Every token sees all.
  const MatrixProduct attention = {.rows = vit.heads * tokens * tokens, .in = width / vit.heads, .out = 1};
  std::vector<MatrixProduct> all = {
      {.rows = vit.patches(), .in = vit.patch * vit.patch * vit.channels, .out = width, .reads_data = true}};
  for (std::int64_t layer = 0; layer < vit.layers; ++layer) {
    all.push_back({.rows = tokens, .in = width, .out = 3 * width});
    all.push_back(attention);
    all.push_back(attention);
    all.push_back({.rows = tokens, .in = width, .out = width});
    all.push_back({.rows = tokens, .in = width, .out = vit.inner});
    all.push_back({.rows = tokens, .in = vit.inner, .out = width});
  }
  all.push_back({.in = width, .out = vit.classes});
  return all;
}

void read_vit_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  constexpr std::int64_t kHeadWidth = 64;  // of the published ones
  if (const auto* head = tensors.shape("heads.head.weight", 2)) spec.classes = (*head)[0];
  const auto* const stem = tensors.shape("conv_proj.weight", 4);
  const auto* const positions = tensors.shape("encoder.pos_embedding", 3);
  if (stem != nullptr) {
    spec.settings.set("width", (*stem)[0]);
    spec.settings.set("patch", (*stem)[2]);
    // Heads leave no trace in shapes: torchvision's are known, and so are a model's of the usual width.
    const auto usual = find_setting(vit_family().settings_of(spec.name), "width")->fallback;
    if (spec.name == "vit-b16" && (*stem)[0] % kHeadWidth == 0)
      spec.settings.set("heads", (*stem)[0] / kHeadWidth);
    else if (!spec.settings.has("heads") && SettingValue((*stem)[0]) != usual)
      throw UsageError("the weights do not say how many attention heads their model has", "give --heads");
  }
  if (stem != nullptr && positions != nullptr) {
    const auto side = static_cast<std::int64_t>(std::lround(std::sqrt(static_cast<double>((*positions)[1] - 1))));
    if (side * side == (*positions)[1] - 1) spec.sample_shape = {side * (*stem)[2], side * (*stem)[2], (*stem)[1]};
  }
  std::int64_t layers = 0;
  while (tensors.shape(fmt::format("encoder.layers.encoder_layer_{}.ln_1.weight", layers), 1) != nullptr) ++layers;
  if (layers > 0) spec.settings.set("layers", layers);
}

}  // namespace

const ModelFamily& vit_family() {
  constexpr VitSpec kUsual;
  static const ModelFamily family = {
      .title = "vision transformers",
      .variants = {{.name = "vit", .sample_shape = {32, 32, 3}, .whole_images = true},
                   {.name = "vit-b16",
                    .defaults = {{"layers", 12}, {"heads", 12}, {"width", 768}, {"patch", 16}},
                    .sample_shape = {224, 224, 3},
                    .classes_of_weights = 1000}},
      .settings = {size_setting("layers", kUsual.layers, "blocks"),
                   size_setting("heads", kUsual.heads, "attention heads"),
                   size_setting("width", kUsual.width, "features"),
                   size_setting("patch", kUsual.patch, "pixels of a patch's side"), dropout_setting()},
      .takes_images = true,
      .blocks = true,
      .attention = true,
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        return std::make_unique<Vit>(context, vit_spec(spec));
      },
      .products = vit_products,
      .read_tensors = read_vit_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
