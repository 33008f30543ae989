// In place of the kernels where the build has no CUDA: there is no group of GPUs that would ask for them.
#include "base/error.h"
#include "ddp/hooks/compression.h"

namespace lockstep::ddp {
namespace {

[[noreturn]] void fail() { throw DeviceError("this build has no CUDA", "build with CUDA, or leave the hook out"); }

}  // namespace

void narrow_on_device(const float*, BFloat16*, std::size_t, StreamView) { fail(); }
void widen_on_device(const BFloat16*, float*, std::size_t, StreamView) { fail(); }
void largest_on_device(const float*, std::int32_t*, std::size_t, StreamView) { fail(); }
void narrow_on_device(const float*, const std::int32_t*, int, Float16*, std::size_t, StreamView) { fail(); }
void widen_on_device(const Float16*, const std::int32_t*, int, float*, std::size_t, StreamView) { fail(); }

}  // namespace lockstep::ddp
