#include "bench/flops.h"

#include <array>

#include "data/built_in.h"

namespace lockstep::bench {
namespace {

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

std::string synthetic_data(const std::string& model, std::int64_t samples) {
  const nn::ModelFamily* const family = nn::find_model_family(model);
  const auto shape = family != nullptr ? family->variant(model).sample_shape : std::vector<std::int64_t>{1};
  return data::random_data(shape, static_cast<std::uint64_t>(samples));  // of an unknown model others complain
}

double flops_per_step(const std::vector<nn::MatrixProduct>& products, std::int64_t samples) {
  double flops = 0;
  for (const nn::MatrixProduct& p : products)
    flops += 2.0 * (p.reads_data ? 2.0 : 3.0) * static_cast<double>(p.rows) * static_cast<double>(p.in) *
             static_cast<double>(p.out);
  return flops * static_cast<double>(samples);
}

std::optional<double> peak_tflops(std::string_view gpu, std::string_view precision) {
  for (const auto& peaks : kPeaks) {
    if (gpu.find(peaks.name) == std::string_view::npos) continue;
    if (precision == "bf16" || precision == "fp16") return peaks.bf16;  // one rate for both
    if (precision == "tf32") return peaks.tf32;
    if (precision == "f32") return peaks.f32;
    return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace lockstep::bench
