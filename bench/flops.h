// How much arithmetic a training step is, and how much of it a GPU could do.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "nn/models/models.h"

namespace lockstep::bench {

/// A layer as the matrix product that it is for one sample: a convolution has a row for each pixel that it computes, a
/// layer of a transformer one for each token. Attention is two, queries by keys and weights by values: a row for each
/// pair of a token and one that it sees, of all heads, T (T + 1) / 2 · heads of them.
struct Product {
  std::int64_t rows = 1;
  std::int64_t in = 0;      // a convolution's: kernel height · kernel width · channels
  std::int64_t out = 0;     // features or channels
  bool reads_data = false;  // so nothing needs the gradient of its input
};

/// Those of a model, in the order of its forward pass. Throws UsageError for a model that is not known here.
std::vector<Product> products_of(const nn::ModelSpec& spec);

/// Floating-point operations of forward and backward over `samples`: 2 for each multiply-add of the products, of which
/// a layer has three (its output, and the gradients of its weight and its input; of attention's both operands), the one
/// that reads the data two. Nothing else is counted: no bias, norm, activation, softmax, pooling, embedding, loss or
/// update, and nothing twice that attention's backward computes again.
double flops_per_step(const std::vector<Product>& products, std::int64_t samples);

/// What NVIDIA's data sheets give for dense products (without sparsity), in 10¹² operations a second, for GPUs that are
/// told apart by their names; `precision` is "f32", "tf32" or "bf16".
std::optional<double> peak_tflops(std::string_view gpu, std::string_view precision);

}  // namespace lockstep::bench
