// Residual networks for images.
#pragma once

#include <memory>

#include "nn/layers/layers.h"

namespace lockstep::nn {

struct ResNetSpec {
  int depth = 18;  // 18 or 50
  /// For images of 32 × 32 pixels: a stem of one 3 × 3 convolution and no pooling, as He et al. have for CIFAR-10.
  bool small_images = false;
  /// Starts each block as the identity: the weight of its last normalisation is 0 (torchvision's
  /// zero_init_residual).
  bool zero_init_residual = false;
  std::int64_t channels = 3;
  std::int64_t classes = 1000;
};

/// He et al., "Deep Residual Learning for Image Recognition" (2016), as torchvision has it: with the strides of 3 × 3
/// convolutions, its names and its initial values. (N, H, W, channels) → (N, classes).
std::unique_ptr<Module> make_resnet(Context& context, const ResNetSpec& spec);

}  // namespace lockstep::nn
