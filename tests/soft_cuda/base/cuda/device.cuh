// In place of the real base/cuda/device.cuh where .cu files are compiled for the CPU: the same names, and launch().
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>
#include <utility>

#include "base/cuda/runtime.h"
#include "lockstep/base/dtype.h"
#include "tests/soft_cuda/block.h"
#include "tests/soft_cuda/soft_cuda.h"

// CUDA's headers make nothing of __global__, __device__ and __host__ here. One block runs at a time, on one thread.
#undef __shared__
#define __shared__ static
// Inlined as a GPU's compiler does: arrays of a thread whose address goes nowhere are no memory that is watched.
#undef __device__
#define __device__ __attribute__((always_inline))
#undef __launch_bounds__
#define __launch_bounds__(...)

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  lockstep::soft_cuda::sync_block("__syncthreads", where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, std::source_location where = std::source_location::current()) {
  lockstep::soft_cuda::sync_warp("__syncwarp", mask, 0, where, true);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace lockstep::soft_cuda {

template <class T>
concept Shuffled = std::is_arithmetic_v<T> && sizeof(T) <= sizeof(std::uint64_t);

// Lanes of `width` neighbours; `source` counts from the first of them, outside of them it is the lane itself.
template <Shuffled T>
T shuffle(const char* what, unsigned mask, T value, int source, int width, std::source_location where) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const int first = lane() / width * width;
  const int from = source >= 0 && source < width ? first + source : lane();
  if ((mask >> from & 1u) == 0) fail_thread("it shuffles with a lane that is not in its mask", where);
  const std::uint64_t got = sync_warp(what, mask, bits, where)[from];
  T result;
  std::memcpy(&result, &got, sizeof(T));
  return result;
}

inline unsigned ballot(const char* what, unsigned mask, int predicate, std::source_location where) {
  const std::uint64_t* const brought = sync_warp(what, mask, predicate != 0 ? 1 : 0, where);
  unsigned all = 0;
  for (unsigned i = 0; i < 32; ++i)
    if ((mask >> i & 1u) != 0 && brought[i] != 0) all |= 1u << i;
  return all;
}

}  // namespace lockstep::soft_cuda

template <lockstep::soft_cuda::Shuffled T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              std::source_location where = std::source_location::current()) {
  return lockstep::soft_cuda::shuffle("__shfl_sync", mask, value, source & (width - 1), width, where);
}
template <lockstep::soft_cuda::Shuffled T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  std::source_location where = std::source_location::current()) {
  const int self = lockstep::soft_cuda::lane() % width;
  return lockstep::soft_cuda::shuffle("__shfl_xor_sync", mask, value, self ^ lanes, width, where);
}
template <lockstep::soft_cuda::Shuffled T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   std::source_location where = std::source_location::current()) {
  const int self = lockstep::soft_cuda::lane() % width;
  return lockstep::soft_cuda::shuffle("__shfl_down_sync", mask, value, self + static_cast<int>(delta), width, where);
}
template <lockstep::soft_cuda::Shuffled T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 std::source_location where = std::source_location::current()) {
  const int self = lockstep::soft_cuda::lane() % width;
  return lockstep::soft_cuda::shuffle("__shfl_up_sync", mask, value, self - static_cast<int>(delta), width, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              std::source_location where = std::source_location::current()) {
  return lockstep::soft_cuda::ballot("__ballot_sync", mask, predicate, where);
}
inline int __any_sync(unsigned mask, int predicate, std::source_location where = std::source_location::current()) {
  return lockstep::soft_cuda::ballot("__any_sync", mask, predicate, where) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate, std::source_location where = std::source_location::current()) {
  return lockstep::soft_cuda::ballot("__all_sync", mask, predicate, where) == mask ? 1 : 0;
}

namespace lockstep::soft_cuda {

// Threads are switched at barriers only: nothing can come between. Its accesses are not a kernel's plain ones.
template <class T, class F>
__attribute__((no_sanitize("thread"), noinline)) T atomically(T* at, F&& change) {
  watch_atomic(at, sizeof(T));
  const T before = *at;
  *at = change(before);
  return before;
}

}  // namespace lockstep::soft_cuda

template <class T>
requires std::is_arithmetic_v<T> T atomicAdd(T* at, std::type_identity_t<T> value) {
  return lockstep::soft_cuda::atomically(at, [=](T before) { return static_cast<T>(before + value); });
}
template <std::integral T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  return lockstep::soft_cuda::atomically(at, [=](T before) { return before < value ? value : before; });
}
template <std::integral T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  return lockstep::soft_cuda::atomically(at, [=](T before) { return value < before ? value : before; });
}
template <class T>
requires std::is_arithmetic_v<T> T atomicExch(T* at, std::type_identity_t<T> value) {
  return lockstep::soft_cuda::atomically(at, [=](T) { return value; });
}
template <std::integral T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return lockstep::soft_cuda::atomically(at, [=](T before) { return before == expected ? value : before; });
}

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }

template <class T>
T __ldg(const T* at) {
  return *at;
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

// CUDA's: of a NaN and a number they take the number.
template <class A, class B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return fmax(static_cast<T>(a), static_cast<T>(b));
  else
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return fmin(static_cast<T>(a), static_cast<T>(b));
  else
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}

namespace lockstep::soft_cuda {

template <std::size_t I, class T>
struct Argument {
  T value;
};

// A kernel and what it is given. Each thread begins with call(), which nothing watches: its reads are not the kernel's.
template <class Indices, class... Parameters>
struct BoundKernel;
template <std::size_t... I, class... Parameters>
struct BoundKernel<std::index_sequence<I...>, Parameters...> : Argument<I, Parameters>... {
  BoundKernel(void (*to_call)(Parameters...), Parameters... values)
      : Argument<I, Parameters>{values}..., kernel(to_call) {}
  __attribute__((no_sanitize("thread", "alignment", "null"))) static void call(const void* to) {
    const auto& self = *static_cast<const BoundKernel*>(to);
    self.kernel(self.Argument<I, Parameters>::value...);
  }
  void (*kernel)(Parameters...);
};

}  // namespace lockstep::soft_cuda

namespace lockstep {

/// As the real one. The grid runs when its stream does: at once, unless streams are lazy. Throws
/// soft_cuda::KernelFault for grids and blocks that no GPU starts.
template <class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block, StreamView stream,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  static_assert((std::size_t{0} + ... + (sizeof(Parameters) + alignof(Parameters))) <= 32764,
                "too many bytes of parameters");
  soft_cuda::check_grid(what, grid, block);
  soft_cuda::load_kernel(reinterpret_cast<const void*>(kernel));
  using Bound = soft_cuda::BoundKernel<std::index_sequence_for<Parameters...>, Parameters...>;
  check_cuda(soft_cuda::submit(native(stream),
                               [what, grid, block, bound = Bound(kernel, static_cast<Parameters>(arguments)...)] {
                                 soft_cuda::run_grid({what, Bound::call, &bound, sizeof(bound),
                                                      reinterpret_cast<const void*>(bound.kernel)},
                                                     grid, block);
                               }),
             what);
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
inline float to_float(Float16 value) { return value.to_float(); }
template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
template <>
inline Float16 from_float<Float16>(float value) {
  return Float16::from_float(value);
}

inline uint4 load_streaming(const uint4* at) { return *at; }
inline float fast_exp2(float x) { return exp2f(x); }

template <class T>
unsigned pair_of(float low, float high) {
  return static_cast<unsigned>(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}

}  // namespace lockstep
