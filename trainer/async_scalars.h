// Numbers that a device computes and that only the host's reports need.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "nn/ops/backend.h"

namespace lockstep::trainer {

/// Results of steps, in the order of the steps, read when they have arrived: no step waits for a number that only a
/// human reads. The backend must outlive it.
class AsyncScalars {
 public:
  /// Each result has `bytes` at most.
  AsyncScalars(nn::Backend& backend, std::size_t bytes);

  /// Takes `from` as it is when all work given before is done. At most Backend::steps_ahead() + 1 may be waiting.
  void add(const nn::Tensor& from);
  std::size_t waiting() const { return waiting_; }
  /// Whether the oldest one must be taken before the next is added.
  bool full() const { return waiting_ == downloads_.size(); }
  /// The oldest one that is waiting, until the next add(). Calls `while_waiting` again and again until it has arrived.
  std::span<const std::byte> take(FunctionRef<void()> while_waiting);

 private:
  std::vector<std::unique_ptr<nn::AsyncDownload>> downloads_;
  std::size_t oldest_ = 0, waiting_ = 0;
};

}  // namespace lockstep::trainer
