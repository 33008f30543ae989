#include "nn/models/resnet.h"

#include <string>
#include <vector>

namespace lockstep::nn {
namespace {

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
  Var forward(Tape& tape, Var x) override { return norm_.forward_behind(conv_, tape, x, Epilogue::kNone); }

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
    Var y = bn1_.forward_behind(conv1_, tape, x, Epilogue::kRelu);
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
    Var y = bn1_.forward_behind(conv1_, tape, x, Epilogue::kRelu);
    y = bn2_.forward_behind(conv2_, tape, y, Epilogue::kRelu);
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
    for (Module* block : blocks_) x = block->forward(tape, x);
    return x;
  }

  std::string type_name() const override { return "Sequential"; }

 private:
  std::vector<Module*> blocks_;
};

class ResNet final : public Module {
 public:
  ResNet(Context& context, const ResNetSpec& spec) : small_images_(spec.small_images) {
    conv1_ = &register_module("conv1", small_images_ ? convolution(context, spec.channels, 64, 3, 1)
                                                     : convolution(context, spec.channels, 64, 7, 2));
    bn1_ = &register_module("bn1", std::make_unique<BatchNorm>(context, 64));
    const bool deep = spec.depth == 50;
    const int blocks[2][4] = {{2, 2, 2, 2}, {3, 4, 6, 3}};
    BlockSpec block = {.in = 64, .width = 64, .stride = 1, .zero_init = spec.zero_init_residual};
    for (int i = 0; i < 4; ++i) {
      const std::string name = "layer" + std::to_string(i + 1);
      stages_.push_back(&register_module(name, deep ? Stage::of<Bottleneck>(context, blocks[1][i], block)
                                                    : Stage::of<BasicBlock>(context, blocks[0][i], block)));
      block.in = block.width * (deep ? Bottleneck::kExpansion : BasicBlock::kExpansion);
      block.width *= 2;
      block.stride = 2;
    }
    fc_ = &register_module("fc", std::make_unique<Linear>(context, block.in, spec.classes));
  }

  Var forward(Tape& tape, Var x) override {
    if (!small_images_ && bn1_->absorbed()) {
      x = conv1_->forward(tape, x, Epilogue::kRelu, square(3, 2));
    } else {
      x = bn1_->forward_behind(*conv1_, tape, x, Epilogue::kRelu);
      if (!small_images_) x = pool2d(tape, PoolKind::kMax, x, square(3, 2));
    }
    for (Stage* stage : stages_) x = stage->forward(tape, x);
    const std::int64_t height = x.shape()[1], width = x.shape()[2];
    x = pool2d(tape, PoolKind::kAverage, x, {.kernel = {height, width}, .stride = {1, 1}, .padding = {0, 0}});
    return fc_->forward(tape, flatten(tape, x));
  }

  std::string type_name() const override { return "ResNet"; }

 private:
  void fuse_children() override { conv1_->absorb(*bn1_); }

  bool small_images_;
  Conv2d* conv1_ = nullptr;
  BatchNorm* bn1_ = nullptr;
  std::vector<Stage*> stages_;
  Linear* fc_ = nullptr;
};

}  // namespace

std::unique_ptr<Module> make_resnet(Context& context, const ResNetSpec& spec) {
  LOCKSTEP_ASSERT(spec.depth == 18 || spec.depth == 50, "a residual network of {} layers", spec.depth);
  return std::make_unique<ResNet>(context, spec);
}

}  // namespace lockstep::nn
