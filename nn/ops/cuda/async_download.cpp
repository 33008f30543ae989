#include "nn/ops/cuda/async_download.h"

#include "base/error.h"

namespace lockstep::nn::cuda {

CudaAsyncDownload::~CudaAsyncDownload() {
  if (!arrived_.done_soon()) memory_.abandon();
}

void CudaAsyncDownload::begin(const Tensor& from) {
  LOCKSTEP_ASSERT(from.bytes() <= memory_.bytes(), "{} bytes for {}", from.bytes(), memory_.bytes());
  used_ = from.bytes();
  if (used_ > 0)
    check_cuda(cudaMemcpyAsync(memory_.data(), from.raw(), used_, cudaMemcpyDeviceToHost, native(stream_)),
               "reading a result");
  arrived_.record(native(stream_));
}

}  // namespace lockstep::nn::cuda
