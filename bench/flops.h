// How much arithmetic a training step is, and how much of it a GPU could do.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "nn/models/models.h"

namespace lockstep::bench {

/// A layer as the matrix product that it is for one sample: a convolution has a row for each pixel that it computes.
struct Product {
  std::int64_t rows = 1;
  std::int64_t in = 0;   // a convolution's: kernel height · kernel width · channels
  std::int64_t out = 0;  // features or channels
};

/// Those of a model, in the order of its forward pass. Throws UsageError for a model that is not known here.
std::vector<Product> products_of(const nn::ModelSpec& spec);

/// Floating-point operations of forward and backward over `samples`: 2 for each multiply-add of the products, of which
/// a layer has three (its output, and the gradients of its weight and its input), the first one two, for nothing needs
/// the gradient of its input. Nothing else is counted: no bias, activation, pooling, loss or update.
double flops_per_step(const std::vector<Product>& products, std::int64_t samples);

/// What NVIDIA's data sheets give for dense products (without sparsity), in 10¹² operations a second, for GPUs that are
/// told apart by their names; `precision` is "f32", "tf32" or "bf16".
std::optional<double> peak_tflops(std::string_view gpu, std::string_view precision);

}  // namespace lockstep::bench
