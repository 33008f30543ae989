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

// See nn/models/resnet.cpp. Paddings are half a kernel: an extent of n becomes ceil(n / stride).
std::vector<Product> products_of_resnet(const nn::ModelSpec& spec, bool deep, bool small_images) {
  LOCKSTEP_ASSERT(spec.sample_shape.size() == 3, "a residual network over samples of {} dimensions",
                  spec.sample_shape.size());
  std::int64_t height = spec.sample_shape[0], width = spec.sample_shape[1];
  const auto shrink = [&] {
    height = (height + 1) / 2;
    width = (width + 1) / 2;
  };
  std::vector<Product> products;
  const auto convolve = [&](std::int64_t kernel, std::int64_t in, std::int64_t out) {
    products.push_back({.rows = height * width, .in = kernel * kernel * in, .out = out});
  };
  if (!small_images) shrink();
  convolve(small_images ? 3 : 7, spec.sample_shape[2], 64);
  products[0].reads_data = true;
  if (!small_images) shrink();  // the pooling
  const std::array<int, 4> blocks = deep ? std::array{3, 4, 6, 3} : std::array{2, 2, 2, 2};
  std::int64_t in = 64;
  for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
    const std::int64_t inner = std::int64_t{64} << stage, out = deep ? 4 * inner : inner;
    for (int block = 0; block < blocks[stage]; ++block) {
      const bool strided = block == 0 && stage > 0;
      if (deep) convolve(1, in, inner);  // before the stride
      if (strided) shrink();
      convolve(3, deep ? inner : in, inner);
      deep ? convolve(1, inner, out) : convolve(3, inner, inner);
      if (strided || in != out) convolve(1, in, out);
      in = out;
    }
  }
  products.push_back({.in = in, .out = spec.classes});
  return products;
}

// See nn/models/gpt.cpp. Nothing reads the data but the embedding, which is no product.
std::vector<Product> products_of_gpt(const nn::ModelSpec& spec) {
  LOCKSTEP_ASSERT(spec.sample_shape.size() == 1, "gpt over samples of {} dimensions", spec.sample_shape.size());
  const std::int64_t tokens = spec.sample_shape[0], width = spec.gpt.width, heads = spec.gpt.heads;
  const Product attention = {.rows = heads * tokens * (tokens + 1) / 2, .in = width / heads, .out = 1};
  std::vector<Product> products;
  for (std::int64_t layer = 0; layer < spec.gpt.layers; ++layer) {
    products.push_back({.rows = tokens, .in = width, .out = 3 * width});
    products.push_back(attention);
    products.push_back(attention);
    products.push_back({.rows = tokens, .in = width, .out = width});
    products.push_back({.rows = tokens, .in = width, .out = 4 * width});
    products.push_back({.rows = tokens, .in = 4 * width, .out = width});
  }
  products.push_back({.rows = tokens, .in = width, .out = spec.classes});
  return products;
}

// See nn/models/lstm.cpp. Over images the first layer reads the data, and only the last step is decoded.
std::vector<Product> products_of_lstm(const nn::ModelSpec& spec) {
  const bool images = spec.sample_shape.size() == 3;
  const std::int64_t steps = spec.sample_shape[0], width = spec.lstm.width;
  std::vector<Product> products;
  for (std::int64_t layer = 0; layer < spec.lstm.layers; ++layer) {
    const bool reads_data = images && layer == 0;
    const std::int64_t in = reads_data ? spec.sample_shape[1] * spec.sample_shape[2] : width;
    products.push_back({.rows = steps, .in = in, .out = 4 * width, .reads_data = reads_data});
    products.push_back({.rows = steps, .in = width, .out = 4 * width});
  }
  products.push_back({.rows = images ? 1 : steps, .in = width, .out = spec.classes});
  return products;
}

}  // namespace

std::vector<Product> products_of(const nn::ModelSpec& spec) {
  const auto& shape = spec.sample_shape;
  const std::int64_t features = elements_of(shape);
  if (spec.name == "linear") return {{.in = features, .out = spec.classes, .reads_data = true}};
  if (spec.name == "mlp") {
    std::vector<Product> products;
    std::int64_t in = features;
    for (const auto width : spec.hidden) {
      products.push_back({.in = in, .out = width, .reads_data = products.empty()});
      in = width;
    }
    products.push_back({.in = in, .out = spec.classes, .reads_data = products.empty()});
    return products;
  }
  if (spec.name == "cnn") {
    LOCKSTEP_ASSERT(shape.size() == 3, "cnn over samples of {} dimensions", shape.size());
    const std::int64_t height = shape[0], width = shape[1];
    return {{.rows = height * width, .in = 9 * shape[2], .out = 32, .reads_data = true},
            {.rows = (height / 2) * (width / 2), .in = 9 * 32, .out = 64},
            {.in = 64 * (height / 4) * (width / 4), .out = 128},
            {.in = 128, .out = spec.classes}};
  }
  if (spec.name == "resnet18") return products_of_resnet(spec, false, false);
  if (spec.name == "resnet50") return products_of_resnet(spec, true, false);
  if (spec.name == "resnet18-cifar") return products_of_resnet(spec, false, true);
  if (spec.name == "lstm") return products_of_lstm(spec);
  if (spec.name == "gpt" || spec.name == "gpt2") return products_of_gpt(spec);
  throw UsageError(fmt::format("nobody has counted the arithmetic of the model '{}'", spec.name),
                   "add it to bench/flops.cpp");
}

double flops_per_step(const std::vector<Product>& products, std::int64_t samples) {
  double flops = 0;
  for (const Product& p : products)
    flops += 2.0 * (p.reads_data ? 2.0 : 3.0) * static_cast<double>(p.rows) * static_cast<double>(p.in) *
             static_cast<double>(p.out);
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
