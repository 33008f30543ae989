// The sizes of a model, as the shapes of its weights tell them.
#pragma once

#include <vector>

#include "nn/io/safetensors.h"
#include "nn/models/models.h"
#include "trainer/config.h"

namespace lockstep::trainer {

/// Height and width of a sample where nothing says them: 32 for resnet18-cifar, else data::kDefaultImageSize.
int default_image_size(const std::string& model);

/// Sizes of the model `given.name` as the shapes of its weights tell them, whoever wrote these: torchvision's and
/// Hugging Face's names are ours. What they do not tell is as in `given`, or the model's default. A sample's shape of
/// ResNets is {size, size, channels}. A GPT whose file has a head that differs from its table of tokens is not tied.
/// Throws UsageError naming the flag for what only a flag can tell.
nn::ModelSpec spec_of(const ModelConfig& given, const std::vector<nn::HostTensor>& tensors);

}  // namespace lockstep::trainer
