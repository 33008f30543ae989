// Batches on their way from the host to a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// Copies batches on a stream of its own, beside the kernels of the batches before. `context` must outlive it.
class InputStager {
 public:
  explicit InputStager(Context& context) : context_(context) {}

  /// Backend::stage().
  Tensor take(const void* data, const Shape& shape, DType dtype, int input);
  /// Waits until all that was taken has been read.
  void finish();
  /// Done when all that was taken has been read.
  std::shared_ptr<const CudaEvent> all_read() const { return all_read_; }

 private:
  // Note [Three buffers]
  // A tensor may be used until the second following call for its ring. So when call n comes, the kernels that
  // read tensor n − 2 have all been started, and an event after them says when its buffer may be overwritten. That
  // happens in call n + 1: by then the event is a whole call old, and copying for one step does not wait for the
  // kernels of the step before. With two buffers it would be overwritten in call n and have to wait for all that was
  // started until then, or trust that nobody reads a tensor after the first following call.
  static constexpr std::uint64_t kBuffers = 3;
  struct Buffer {
    Tensor memory;
    CudaEvent last_use;
    CudaEvent copied;
  };
  struct Ring {
    Shape shape;
    DType dtype = DType::kF32;
    int input = 0;
    std::uint64_t calls = 0;
    std::array<Buffer, kBuffers> buffers;
  };

  Ring& ring_of(const Shape& shape, DType dtype, int input);

  Context& context_;
  CudaStream copies_;
  std::shared_ptr<CudaEvent> all_read_ = std::make_shared<CudaEvent>();
  bool reading_ = false;
  std::vector<Ring> rings_;  // one for each shape, type and input
};

}  // namespace lockstep::nn::cuda
