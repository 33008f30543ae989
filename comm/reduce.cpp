#include "comm/reduce.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/cpu.h"
#include "base/error.h"

namespace lockstep::comm {
namespace {

// Elements that are taken through all sources before the next ones: accumulator and operands stay in the L1 cache.
constexpr std::size_t kBlock = 1024;

struct Sum {
  template <class T>
  static constexpr T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
    else
      return a + b;
  }
};
// `a != a` keeps a NaN on the left; one on the right makes the comparison false, which takes b.
struct Min {
  template <class T>
  static constexpr T apply(T a, T b) {
    return static_cast<bool>(static_cast<int>(a < b) | static_cast<int>(a != a)) ? a : b;
  }
};
struct Max {
  template <class T>
  static constexpr T apply(T a, T b) {
    return static_cast<bool>(static_cast<int>(a > b) | static_cast<int>(a != a)) ? a : b;
  }
};

// Loops below may have out == a or out == b: no iteration depends on another, which is what ivdep says.

template <class T, class Op>
LOCKSTEP_SIMD_CLONES void combine(T* out, const T* a, const T* b, std::size_t n) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], b[i]);
}

LOCKSTEP_SIMD_CLONES void widen(float* out, const BFloat16* in, std::size_t n) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i] = in[i].to_float();
}

template <class Op>
LOCKSTEP_SIMD_CLONES void combine_widened(float* out, const BFloat16* in, std::size_t n) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i] = Op::apply(out[i], in[i].to_float());
}

LOCKSTEP_SIMD_CLONES void narrow(BFloat16* out, const float* in, std::size_t n) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i] = BFloat16::from_float(in[i]);
}

template <class T, class Op>
void reduce_typed(std::byte* dst, std::span<const std::byte* const> sources, std::size_t count) {
  alignas(64) std::array<T, kBlock> partial;
  const std::size_t last = sources.size() - 1;
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    const T* left = reinterpret_cast<const T*>(sources[0]) + at;
    // dst is written by the last source's turn only: until then it may itself be a source.
    for (std::size_t k = 1; k <= last; ++k) {
      T* out = k == last ? reinterpret_cast<T*>(dst) + at : partial.data();
      combine<T, Op>(out, left, reinterpret_cast<const T*>(sources[k]) + at, n);
      left = out;
    }
  }
}

template <class Op>
void reduce_bf16(std::byte* dst, std::span<const std::byte* const> sources, std::size_t count) {
  alignas(64) std::array<float, kBlock> partial;
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    widen(partial.data(), reinterpret_cast<const BFloat16*>(sources[0]) + at, n);
    for (const std::byte* source : sources.subspan(1))
      combine_widened<Op>(partial.data(), reinterpret_cast<const BFloat16*>(source) + at, n);
    narrow(reinterpret_cast<BFloat16*>(dst) + at, partial.data(), n);
  }
}

template <class Op>
void reduce_with(DType dtype, std::byte* dst, std::span<const std::byte* const> sources, std::size_t count) {
  switch (dtype) {
    case DType::kF32: return reduce_typed<float, Op>(dst, sources, count);
    case DType::kF64: return reduce_typed<double, Op>(dst, sources, count);
    case DType::kBF16: return reduce_bf16<Op>(dst, sources, count);
    case DType::kI32: return reduce_typed<std::int32_t, Op>(dst, sources, count);
    case DType::kI64: return reduce_typed<std::int64_t, Op>(dst, sources, count);
    case DType::kU8: return reduce_typed<std::uint8_t, Op>(dst, sources, count);
  }
}

}  // namespace

void reduce_in_order(DType dtype, ReduceOp op, std::byte* dst, std::span<const std::byte* const> sources,
                     std::size_t count) {
  LOCKSTEP_ASSERT(!sources.empty(), "a reduction of nothing");
  if (count == 0) return;
  if (sources.size() == 1) {
    if (dst != sources[0]) std::memcpy(dst, sources[0], count * size_of(dtype));
    return;
  }
  switch (op) {
    case ReduceOp::kSum: return reduce_with<Sum>(dtype, dst, sources, count);
    case ReduceOp::kMin: return reduce_with<Min>(dtype, dst, sources, count);
    case ReduceOp::kMax: return reduce_with<Max>(dtype, dst, sources, count);
  }
}

}  // namespace lockstep::comm
