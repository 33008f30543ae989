// Small results on their way from a device to the host.
#pragma once

#include <cstddef>
#include <span>

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

/// Brings a few numbers to the host without stopping the device: begin() in the order of the work that is given, then
/// later, when ready(), bytes(). One at a time; used again and again.
class AsyncDownload {
 public:
  virtual ~AsyncDownload() = default;
  /// Takes `from` as it is when all work given before is done.
  virtual void begin(const Tensor& from) = 0;
  /// Whether it has arrived. Throws what the device has failed with.
  virtual bool ready() = 0;
  /// What begin() took; only when ready(), until the next begin().
  virtual std::span<const std::byte> bytes() const = 0;
};

}  // namespace lockstep::nn
