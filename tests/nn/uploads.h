// Numbers to a device's tensor and back.
#pragma once

#include <span>
#include <vector>

#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn::testing {

inline Tensor upload(Backend& backend, const Shape& shape, const std::vector<float>& values) {
  const Tensor made = backend.empty(shape);
  backend.upload(std::as_bytes(std::span(values)), made);
  return made;
}

inline Tensor upload(Backend& backend, const std::vector<float>& values) {
  return upload(backend, {static_cast<std::int64_t>(values.size())}, values);
}

inline std::vector<float> download(Backend& backend, const Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  backend.download(tensor, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace lockstep::nn::testing
