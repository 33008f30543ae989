// What PyTorch computed (tests/parity/golden), and how far from it something else is.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/layers/module.h"

namespace lockstep::parity {

/// Of f32 against PyTorch in f64, as ‖a − b‖∞ / ‖b‖∞.
inline constexpr double kOutputs = 1e-4, kGradients = 1e-3;

/// One file of golden/, as golden.py describes them.
class Golden {
 public:
  explicit Golden(const std::string& name);

  /// Holds `actual`, in PyTorch's layout, to the tensor `name`: a failure of the test unless both have as many
  /// elements, and the sampled ones differ by at most tolerance · ‖b‖∞ + slack, the largest magnitudes too, and norms
  /// and projections by tolerance · ‖b‖₂ + slack · √elements.
  void expect(const std::string& name, std::span<const float> actual, double tolerance, double slack = 0.0);

  bool has(const std::string& name) const { return rows_.contains(name); }
  /// The tensors with this prefix that nothing has been compared with, including those that extra() has not been called
  /// for.
  std::vector<std::string> not_compared(const std::string& beginning = "") const;
  /// The largest error of all comparisons whose name has `kind` in it, as a share of ‖b‖∞ or ‖b‖₂.
  double worst(const std::string& kind) const;

  /// What else the file has.
  const nn::HostTensor& extra(const std::string& name) const;

 private:
  static constexpr std::size_t kSamples = 64, kSummary = 8, kProjections = 4;
  struct Row {
    std::span<const double> summary;
    std::span<const float> samples;
  };

  std::map<std::string, nn::HostTensor> tensors_;
  std::map<std::string, Row> rows_;
  std::map<std::string, double> errors_;
  mutable std::set<std::string> asked_;  // of tensors_
};

/// The elements of a tensor of a golden file or a state.
template <class T>
std::span<const T> elements(const nn::HostTensor& tensor) {
  return {reinterpret_cast<const T*>(tensor.bytes.data()), tensor.bytes.size() / sizeof(T)};
}

/// Images from (N, C, H, W) to (N, H, W, C) and back; what has not four dimensions stays.
std::vector<float> to_nhwc(const std::vector<float>& values, const std::vector<std::int64_t>& nchw);
std::vector<float> to_nchw(const std::vector<float>& values, const std::vector<std::int64_t>& nchw);

/// On the backend's device, from PyTorch's layout.
nn::Tensor upload(nn::Backend& backend, const std::vector<float>& values, const std::vector<std::int64_t>& nchw);
nn::Tensor upload(nn::Backend& backend, const std::vector<std::int32_t>& values, const nn::Shape& shape);
/// And back into it.
std::vector<float> download(nn::Backend& backend, const nn::Tensor& tensor);

/// A parameter's gradient as PyTorch has it.
std::vector<float> gradient_of(nn::Backend& backend, const nn::Parameter& parameter);

/// Sets all parameters and buffers to initial(), num_batches_tracked to 0.
void fill(nn::Module& module, const std::string& case_name, double norm_bias = 0.0);

}  // namespace lockstep::parity
