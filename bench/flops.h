// How much arithmetic a training step is, and how much of it a GPU could do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/nn/models/models.h"

namespace lockstep::bench {

/// Floating-point operations of forward and backward over `samples`: 2 for each multiply-add of the products, of which
/// a layer has three (its output, and the gradients of its weight and its input; of attention's both operands), the one
/// that reads the data two. Nothing else is counted: no bias, norm, activation, softmax, pooling, embedding, loss or
/// update, and nothing twice that attention's backward recomputes.
double flops_per_step(const std::vector<nn::MatrixProduct>& products, std::int64_t samples);

/// What NVIDIA's data sheets give for dense products (without sparsity), in 10¹² operations a second, for GPUs that are
/// distinguished by their names; `precision` is "f32", "tf32" or "bf16".
std::optional<double> peak_tflops(std::string_view gpu, std::string_view precision);

/// What --data takes for `samples` random samples of the size that a model is known for: data for who names none.
std::string synthetic_data(const std::string& model, std::int64_t samples);

}  // namespace lockstep::bench
