// What device code is written with. Kernels use this alone of CUDA: __syncthreads, warp shuffles and atomicAdd,
// static __shared__ arrays, and launch(); so that the same files also run on a CPU, in the tests (tests/soft_cuda).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>

#include "base/cuda/runtime.h"
#include "lockstep/base/dtype.h"

namespace lockstep {

/// Starts `kernel`, in the order of `stream`. `what` names it where the launch fails; later faults come out of whatever
/// waits for the stream. A grid without blocks starts nothing.
template <class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block, StreamView stream,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  [&](Parameters... values) {
    std::array<void*, sizeof...(Parameters)> addresses = {static_cast<void*>(&values)...};
    check_cuda(
        cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, addresses.data(), 0, native(stream)),
        what);
  }(static_cast<Parameters>(arguments)...);
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(BFloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
__device__ inline float to_float(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }
template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
/// Rounds to nearest, ties to even; NaN stays NaN.
template <>
__device__ inline BFloat16 from_float<BFloat16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
/// The same; from 65520 up to infinity.
template <>
__device__ inline Float16 from_float<Float16>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}

/// What is not read again soon: of all that the second cache holds it is replaced first. Of CUDA's __ldcs Clang has
/// none.
__device__ inline uint4 load_streaming(const uint4* at) {
  uint4 made;
  asm("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w) : "l"(at));
  return made;
}

/// 2 to the power of x, but for some 1e-7 of it; what is below 2⁻¹²⁶ becomes 0, which takes no further instructions.
__device__ inline float fast_exp2(float x) {
  float made;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
}

/// Both of them rounded, the first one in the lower half: one instruction, and a register without another one.
template <class T>
__device__ unsigned pair_of(float low, float high);
template <>
__device__ inline unsigned pair_of<BFloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}
template <>
__device__ inline unsigned pair_of<Float16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

}  // namespace lockstep
