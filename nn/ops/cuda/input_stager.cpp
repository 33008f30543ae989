#include "nn/ops/cuda/input_stager.h"

namespace lockstep::nn::cuda {

InputStager::Ring& InputStager::ring_of(const Shape& shape, DType dtype, int input) {
  for (Ring& ring : rings_)
    if (ring.input == input && ring.dtype == dtype && ring.shape == shape) return ring;
  Ring& made = rings_.emplace_back();
  made.shape = shape;
  made.dtype = dtype;
  made.input = input;
  return made;
}

Tensor InputStager::take(const void* data, const Shape& shape, DType dtype, int input) {
  const cudaStream_t kernels = native(context_.stream);
  Ring& ring = ring_of(shape, dtype, input);
  Buffer& buffer = ring.buffers[ring.calls % kBuffers];
  if (ring.calls >= 2) ring.buffers[(ring.calls - 2) % kBuffers].last_use.record(kernels);
  if (!buffer.memory.defined()) {
    buffer.memory = Tensor::empty(context_.allocator, shape, dtype);
    buffer.last_use.record(kernels);  // of whoever had that memory before
  }
  ++ring.calls;
  if (buffer.memory.bytes() == 0) return buffer.memory;

  buffer.last_use.make_wait(copies_.get());
  check_cuda(cudaMemcpyAsync(buffer.memory.raw(), data, buffer.memory.bytes(), cudaMemcpyHostToDevice, copies_.get()),
             "copying a batch");
  buffer.copied.record(copies_.get());
  buffer.copied.make_wait(kernels);
  all_read_->record(copies_.get());
  reading_ = true;
  return buffer.memory;
}

void InputStager::finish() {
  if (!reading_) return;
  all_read_->synchronize();
  reading_ = false;
}

}  // namespace lockstep::nn::cuda
