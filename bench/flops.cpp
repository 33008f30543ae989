#include "bench/flops.h"

#include <array>

#include "base/error.h"

namespace lockstep::bench {
namespace {

std::int64_t elements_of(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const auto d : shape) count *= d;
  return count;
}

struct Peaks {
  std::string_view name;  // what the GPU's name holds
  double f32, tf32, bf16;
};

// The more particular names come first. H100 and H200 are those with SXM sockets.
constexpr std::array kPeaks = {
    Peaks{"H100 PCIe", 51.2, 378, 756}, Peaks{"H100 NVL", 60, 417.5, 835}, Peaks{"H100", 66.9, 494.7, 989.4},
    Peaks{"H200 NVL", 60, 417.5, 835},  Peaks{"H200", 66.9, 494.7, 989.4}, Peaks{"A100", 19.5, 156, 312},
};

}  // namespace

std::vector<Product> products_of(const nn::ModelSpec& spec) {
  const auto& shape = spec.sample_shape;
  const std::int64_t features = elements_of(shape);
  if (spec.name == "linear") return {{.in = features, .out = spec.classes}};
  if (spec.name == "mlp") {
    std::vector<Product> products;
    std::int64_t in = features;
    for (const auto width : spec.hidden) {
      products.push_back({.in = in, .out = width});
      in = width;
    }
    products.push_back({.in = in, .out = spec.classes});
    return products;
  }
  if (spec.name == "cnn") {
    LOCKSTEP_ASSERT(shape.size() == 3, "cnn over samples of {} dimensions", shape.size());
    const std::int64_t height = shape[0], width = shape[1];
    return {{.rows = height * width, .in = 9 * shape[2], .out = 32},
            {.rows = (height / 2) * (width / 2), .in = 9 * 32, .out = 64},
            {.in = 64 * (height / 4) * (width / 4), .out = 128},
            {.in = 128, .out = spec.classes}};
  }
  throw UsageError(fmt::format("nobody has counted the arithmetic of the model '{}'", spec.name),
                   "add it to bench/flops.cpp");
}

double flops_per_step(const std::vector<Product>& products, std::int64_t samples) {
  double flops = 0;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const auto& p = products[i];
    flops += 2.0 * (i == 0 ? 2.0 : 3.0) * static_cast<double>(p.rows) * static_cast<double>(p.in) *
             static_cast<double>(p.out);
  }
  return flops * static_cast<double>(samples);
}

std::optional<double> peak_tflops(std::string_view gpu, std::string_view precision) {
  for (const auto& peaks : kPeaks) {
    if (gpu.find(peaks.name) == std::string_view::npos) continue;
    if (precision == "bf16") return peaks.bf16;
    if (precision == "tf32") return peaks.tf32;
    if (precision == "f32") return peaks.f32;
    return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace lockstep::bench
