// Residual networks for images: He et al., "Deep Residual Learning for Image Recognition" (2016), as torchvision has
// it, with the strides of 3 × 3 convolutions, its names and its initial values. (N, H, W, channels) → (N, classes).
#include <array>
#include <string>
#include <vector>

#include "base/error.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {
namespace {

constexpr const char* kZeroInit = "zero-init-residual";

/// How the models differ.
struct Depth {
  const char* name;
  bool bottlenecks;           // three convolutions a block instead of two
  std::array<int, 4> blocks;  // of each stage
  // For images of 32 × 32 pixels: a stem of one 3 × 3 convolution and no pooling, as He et al. have for CIFAR-10.
  bool small_images = false;
};
constexpr std::array kDepths = {
    Depth{"resnet18", false, {2, 2, 2, 2}},  Depth{"resnet34", false, {3, 4, 6, 3}},
    Depth{"resnet50", true, {3, 4, 6, 3}},   Depth{"resnet101", true, {3, 4, 23, 3}},
    Depth{"resnet152", true, {3, 8, 36, 3}}, Depth{"resnet18-cifar", false, {2, 2, 2, 2}, true}};

const Depth& depth_of(const std::string& name) {
  for (const Depth& depth : kDepths)
    if (name == depth.name) return depth;
  LOCKSTEP_ASSERT(false, "'{}' is no residual network", name);
}

Window square(std::int64_t kernel, std::int64_t stride) {
  const std::int64_t padding = kernel / 2;
  return {.kernel = {kernel, kernel}, .stride = {stride, stride}, .padding = {padding, padding}};
}

// A convolution without bias whose values are normal, scaled by the outputs that it feeds (He et al., "Delving Deep
// into Rectifiers", 2015, fan out).
std::unique_ptr<Conv2d> convolution(Context& context, std::int64_t in, std::int64_t out, std::int64_t kernel,
                                    std::int64_t stride) {
  return std::make_unique<Conv2d>(context, in, out, square(kernel, stride), Conv2d::FanOut{});
}

// What carries x past a block whose result has another shape: its first two children are named as in a Sequential.
class Downsample final : public Module {
 public:
  Downsample(Context& context, std::int64_t in, std::int64_t out, std::int64_t stride)
      : conv_(register_module("0", convolution(context, in, out, 1, stride))),
        norm_(register_module("1", std::make_unique<BatchNorm>(context, out))) {}
  Var forward(Tape& tape, Var x) override { return norm_.forward_after(conv_, tape, x, Epilogue::kNone); }

  std::string type_name() const override { return "Sequential"; }

 private:
  void fuse_children() override { conv_.absorb(norm_); }

  Conv2d& conv_;
  BatchNorm& norm_;
};

struct BlockSpec {
  std::int64_t in, width, stride;
  bool zero_init;
};

// `kExpansion`: how many times wider its result is than what it computes in.
class BasicBlock final : public Module {
 public:
  static constexpr std::int64_t kExpansion = 1;

  BasicBlock(Context& context, const BlockSpec& spec)
      : conv1_(register_module("conv1", convolution(context, spec.in, spec.width, 3, spec.stride))),
        bn1_(register_module("bn1", std::make_unique<BatchNorm>(context, spec.width))),
        conv2_(register_module("conv2", convolution(context, spec.width, spec.width, 3, 1))),
        bn2_(register_module("bn2", std::make_unique<BatchNorm>(context, spec.width))) {
    if (spec.zero_init) bn2_.start_at_zero();
    if (spec.stride != 1 || spec.in != spec.width)
      downsample_ =
          &register_module("downsample", std::make_unique<Downsample>(context, spec.in, spec.width, spec.stride));
  }

  Var forward(Tape& tape, Var x) override {
    Var y = bn1_.forward_after(conv1_, tape, x, Epilogue::kRelu);
    y = conv2_.forward(tape, y);
    return bn2_.forward_add_relu(tape, y, downsample_ != nullptr ? downsample_->forward(tape, x) : x);
  }

  std::string type_name() const override { return "BasicBlock"; }

 private:
  void fuse_children() override {
    conv1_.absorb(bn1_);
    conv2_.absorb(bn2_);
  }

  Conv2d& conv1_;
  BatchNorm& bn1_;
  Conv2d& conv2_;
  BatchNorm& bn2_;
  Downsample* downsample_ = nullptr;
};

class Bottleneck final : public Module {
 public:
  static constexpr std::int64_t kExpansion = 4;

  Bottleneck(Context& context, const BlockSpec& spec)
      : conv1_(register_module("conv1", convolution(context, spec.in, spec.width, 1, 1))),
        bn1_(register_module("bn1", std::make_unique<BatchNorm>(context, spec.width))),
        conv2_(register_module("conv2", convolution(context, spec.width, spec.width, 3, spec.stride))),
        bn2_(register_module("bn2", std::make_unique<BatchNorm>(context, spec.width))),
        conv3_(register_module("conv3", convolution(context, spec.width, kExpansion * spec.width, 1, 1))),
        bn3_(register_module("bn3", std::make_unique<BatchNorm>(context, kExpansion * spec.width))) {
    if (spec.zero_init) bn3_.start_at_zero();
    if (spec.stride != 1 || spec.in != kExpansion * spec.width)
      downsample_ = &register_module(
          "downsample", std::make_unique<Downsample>(context, spec.in, kExpansion * spec.width, spec.stride));
  }

  Var forward(Tape& tape, Var x) override {
    Var y = bn1_.forward_after(conv1_, tape, x, Epilogue::kRelu);
    y = bn2_.forward_after(conv2_, tape, y, Epilogue::kRelu);
    y = conv3_.forward(tape, y);
    return bn3_.forward_add_relu(tape, y, downsample_ != nullptr ? downsample_->forward(tape, x) : x);
  }

  std::string type_name() const override { return "Bottleneck"; }

 private:
  void fuse_children() override {
    conv1_.absorb(bn1_);
    conv2_.absorb(bn2_);
    conv3_.absorb(bn3_);
  }

  Conv2d& conv1_;
  BatchNorm& bn1_;
  Conv2d& conv2_;
  BatchNorm& bn2_;
  Conv2d& conv3_;
  BatchNorm& bn3_;
  Downsample* downsample_ = nullptr;
};

class Stage final : public Module {
 public:
  template <class Block>
  static std::unique_ptr<Stage> of(Context& context, int blocks, BlockSpec spec) {
    auto stage = std::make_unique<Stage>();
    for (int i = 0; i < blocks; ++i) {
      stage->blocks_.push_back(&stage->register_module(std::to_string(i), std::make_unique<Block>(context, spec)));
      spec.in = Block::kExpansion * spec.width;
      spec.stride = 1;
    }
    return stage;
  }
  Var forward(Tape& tape, Var x) override {
    for (Module* block : blocks_) {
      if (block->recomputed())
        x = recompute(tape, x, [block](Tape& on, const Vars& again) -> Vars { return block->forward(on, again); });
      else
        x = block->forward(tape, x);
    }
    return x;
  }
  std::vector<Module*> blocks() override { return blocks_; }

  std::string type_name() const override { return "Sequential"; }

 private:
  std::vector<Module*> blocks_;
};

class ResNet final : public Module {
 public:
  ResNet(Context& context, const ModelSpec& spec) : depth_(depth_of(spec.name)) {
    const std::int64_t channels = spec.sample_shape[2];
    conv1_ = &register_module("conv1", depth_.small_images ? convolution(context, channels, 64, 3, 1)
                                                           : convolution(context, channels, 64, 7, 2));
    bn1_ = &register_module("bn1", std::make_unique<BatchNorm>(context, 64));
    BlockSpec block = {.in = 64, .width = 64, .stride = 1, .zero_init = spec.settings.flag(kZeroInit)};
    for (std::size_t i = 0; i < depth_.blocks.size(); ++i) {
      const std::string name = "layer" + std::to_string(i + 1);
      stages_.push_back(&register_module(name, depth_.bottlenecks
                                                   ? Stage::of<Bottleneck>(context, depth_.blocks[i], block)
                                                   : Stage::of<BasicBlock>(context, depth_.blocks[i], block)));
      block.in = block.width * (depth_.bottlenecks ? Bottleneck::kExpansion : BasicBlock::kExpansion);
      block.width *= 2;
      block.stride = 2;
    }
    fc_ = &register_module("fc", std::make_unique<Linear>(context, block.in, spec.classes));
  }

  std::vector<Module*> blocks() override {
    std::vector<Module*> all;
    for (Stage* stage : stages_) {
      const auto some = stage->blocks();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

  Var forward(Tape& tape, Var x) override {
    if (!depth_.small_images && bn1_->absorbed()) {
      x = conv1_->forward(tape, x, Epilogue::kRelu, square(3, 2));
    } else {
      x = bn1_->forward_after(*conv1_, tape, x, Epilogue::kRelu);
      if (!depth_.small_images) x = pool2d(tape, PoolKind::kMax, x, square(3, 2));
    }
    for (Stage* stage : stages_) x = stage->forward(tape, x);
    const std::int64_t height = x.shape()[1], width = x.shape()[2];
    x = pool2d(tape, PoolKind::kAverage, x, {.kernel = {height, width}, .stride = {1, 1}, .padding = {0, 0}});
    return fc_->logits(tape, flatten(tape, x));
  }

  std::string type_name() const override { return "ResNet"; }

 private:
  void fuse_children() override { conv1_->absorb(*bn1_); }

  const Depth& depth_;
  Conv2d* conv1_ = nullptr;
  BatchNorm* bn1_ = nullptr;
  std::vector<Stage*> stages_;
  Linear* fc_ = nullptr;
};

// Paddings are half a kernel: an extent of n becomes ceil(n / stride).
std::vector<MatrixProduct> resnet_products(const ModelSpec& spec) {
  const Depth& depth = depth_of(spec.name);
  std::int64_t height = spec.sample_shape[0], width = spec.sample_shape[1];
  const auto shrink = [&] {
    height = (height + 1) / 2;
    width = (width + 1) / 2;
  };
  std::vector<MatrixProduct> all;
  const auto convolve = [&](std::int64_t kernel, std::int64_t in, std::int64_t out) {
    all.push_back({.rows = height * width, .in = kernel * kernel * in, .out = out});
  };
  if (!depth.small_images) shrink();
  convolve(depth.small_images ? 3 : 7, spec.sample_shape[2], 64);
  all[0].reads_data = true;
  if (!depth.small_images) shrink();  // the pooling
  std::int64_t in = 64;
  for (std::size_t stage = 0; stage < depth.blocks.size(); ++stage) {
    const std::int64_t inner = std::int64_t{64} << stage,
                       out = (depth.bottlenecks ? Bottleneck::kExpansion : BasicBlock::kExpansion) * inner;
    for (int block = 0; block < depth.blocks[stage]; ++block) {
      const bool strided = block == 0 && stage > 0;
      if (depth.bottlenecks) convolve(1, in, inner);  // before the stride
      if (strided) shrink();
      convolve(3, depth.bottlenecks ? inner : in, inner);
      depth.bottlenecks ? convolve(1, inner, out) : convolve(3, inner, inner);
      if (strided || in != out) convolve(1, in, out);
      in = out;
    }
  }
  all.push_back({.in = in, .out = spec.classes});
  return all;
}

// Any size of images will do: the usual one stays.
void read_resnet_tensors(const TensorsByName& tensors, ModelSpec& spec) {
  const auto* head = tensors.shape("fc.weight", 2);
  // A head under another name ("head.weight") is still the only matrix.
  if (const auto matrices = tensors.with_dims(2); head == nullptr && matrices.size() == 1)
    head = &matrices.front()->shape;
  if (head != nullptr) spec.classes = (*head)[0];
  if (const auto* stem = tensors.shape("conv1.weight", 4)) spec.sample_shape[2] = (*stem)[1];
}

}  // namespace

namespace {

std::vector<ModelVariant> variants_of_depths() {
  std::vector<ModelVariant> all;
  for (const Depth& depth : kDepths)
    all.push_back(depth.small_images
                      ? ModelVariant{.name = depth.name, .sample_shape = {32, 32, 3}, .whole_images = true}
                      : ModelVariant{.name = depth.name, .sample_shape = {224, 224, 3}, .classes_of_weights = 1000});
  return all;
}

}  // namespace

const ModelFamily& resnet_family() {
  static const ModelFamily family = {
      .title = "ResNets",
      .variants = variants_of_depths(),
      .settings = {{.name = kZeroInit,
                    .fallback = false,
                    // The weight of a block's last normalisation is 0: torchvision's zero_init_residual.
                    .help = "each block starts as the identity",
                    .role = SettingSpec::Role::kInitialValues}},
      .takes_images = true,
      .blocks = true,
      .batch_norm = true,
      .any_image_size = true,
      // Goyal et al., "Accurate, Large Minibatch SGD" (2017).
      .training = {.optimizer = "sgd", .lr_per_256 = 0.1, .weight_decay = 1e-4},
      .build = [](Context& context, const ModelSpec& spec) -> std::unique_ptr<Module> {
        check_images(spec, depth_of(spec.name).small_images ? 8 : 32);
        return std::make_unique<ResNet>(context, spec);
      },
      .products = resnet_products,
      .read_tensors = read_resnet_tensors,
  };
  return family;
}

}  // namespace lockstep::nn
