#include "comm/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/cpu.h"
#include "base/error.h"
#include "lockstep/base/dtype.h"
#include "lockstep/comm/reduction_tree.h"

namespace lockstep::comm {
namespace {

/// Note [Lines]
/// A reduction takes one line of 64 bytes from each source, combines them in registers and stores the result where it
/// belongs: every byte is read once and written once. Beyond the caches, what bounds one core is how many lines it
/// has on their way at a time. More are when
///   strips    are walked side by side: the core's prefetcher looks ahead within each page by itself;
///   it asks   for lines some way ahead, and for those that will be written, for writing: a line that another core has
///             changed then comes in one exchange instead of two.
/// Stores that go past the caches would be slower: the lines are there, for they have just been read.
/// Where the bytes may fit the core's own caches both only cost time.
///
/// All this is for the sums that gradients are, of f32, bf16 and f16, and for products of the latter two, which are
/// rounded once as well; compiled once for each instruction set. Other reductions are of a few numbers, and go block by
/// block through a plain loop (reduce_by_blocks()).
constexpr std::size_t kLine = 64;
constexpr std::size_t kAheadBytes = 1024;
constexpr std::size_t kStrips = 4;
constexpr std::size_t kPage = 4096;
// A cache has few places for lines whose addresses end in the same bits: strips begin a little apart in their pages.
constexpr std::size_t kStaggerBytes = 256;
// Of all sources together.
constexpr std::size_t kFewBytes = std::size_t{1} << 18;

// A line's worth of T, as GCC and Clang know vectors: split where the instruction set has only narrower ones.
template <class T>
using Line [[gnu::vector_size(kLine)]] = T;

// Lines are passed by reference: by value their place would depend on the instruction set.
#define LOCKSTEP_INLINE [[gnu::always_inline]] inline

/// What a line is while it is being reduced: itself.
template <class T>
struct PlainLine {
  Line<T> sum;

  LOCKSTEP_INLINE void load(const std::byte* from) { std::memcpy(&sum, from, kLine); }
  LOCKSTEP_INLINE void store(std::byte* to) const { std::memcpy(to, &sum, kLine); }
  LOCKSTEP_INLINE void join(const PlainLine& other) { sum += other.sum; }
};
using F32Line = PlainLine<float>;

/// The upper halves of f32.
struct Bf16Halves {
  LOCKSTEP_INLINE static void widen(Line<float>& even, Line<float>& odd, const Line<std::uint32_t>& pairs) {
    even = reinterpret_cast<Line<float>>(pairs << 16);
    odd = reinterpret_cast<Line<float>>(pairs & 0xffff0000u);
  }
  LOCKSTEP_INLINE static void narrow(Line<std::uint32_t>& pairs, const Line<float>& even, const Line<float>& odd) {
    Line<std::uint32_t> low, high;
    round(low, even);
    round(high, odd);
    pairs = (low >> 16) | (high & 0xffff0000u);
  }

 private:
  /// BFloat16::from_float() in the upper halves.
  LOCKSTEP_INLINE static void round(Line<std::uint32_t>& bits, const Line<float>& value) {
    const auto u = reinterpret_cast<Line<std::uint32_t>>(value);
    bits = value != value ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1u);
  }
};

struct F16Halves {
  LOCKSTEP_INLINE static void widen(Line<float>& even, Line<float>& odd, const Line<std::uint32_t>& pairs) {
    widen(even, pairs & 0xffffu);
    widen(odd, pairs >> 16);
  }
  LOCKSTEP_INLINE static void narrow(Line<std::uint32_t>& pairs, const Line<float>& even, const Line<float>& odd) {
    Line<std::uint32_t> low, high;
    round(low, even);
    round(high, odd);
    pairs = low | high << 16;
  }

 private:
  using Bits = Line<std::uint32_t>;

  /// Float16::to_float().
  LOCKSTEP_INLINE static void widen(Line<float>& value, const Bits& half) {
    const Bits magnitude = (half & 0x7fffu) << 13, exponent = magnitude >> 23;
    const Bits infinite = exponent == 31u ? Bits{} + (112u << 23) : Bits{};
    const Bits normal = magnitude + (112u << 23) + infinite;
    const Bits one = Bits{} + (113u << 23);
    const Line<float> small = reinterpret_cast<Line<float>>(magnitude + one) - reinterpret_cast<Line<float>>(one);
    value = reinterpret_cast<Line<float>>((half & 0x8000u) << 16 |
                                          (exponent == 0u ? reinterpret_cast<Bits>(small) : normal));
  }
  /// Float16::from_float() in the lower halves.
  LOCKSTEP_INLINE static void round(Bits& half, const Line<float>& value) {
    const auto u = reinterpret_cast<Bits>(value);
    const Bits magnitude = u & 0x7fffffffu, add = Bits{} + (126u << 23);
    const Bits small =
        reinterpret_cast<Bits>(reinterpret_cast<Line<float>>(magnitude) + reinterpret_cast<Line<float>>(add)) - add;
    const Bits normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const Bits nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    const Bits large = magnitude > 0x7f800000u ? nan : Bits{} + 0x7c00u;
    const Bits finite = magnitude < 113u << 23 ? small : normal;
    half = (u >> 16 & 0x8000u) | (magnitude >= 143u << 23 ? large : finite);
  }
};

/// A line of 16-bit numbers: two of f32, one of every other element each, so that nothing has to move between lanes.
template <class Halves, ReduceOp kOp>
struct Widened {
  Line<float> even, odd;

  LOCKSTEP_INLINE void load(const std::byte* from) {
    Line<std::uint32_t> pairs;
    std::memcpy(&pairs, from, kLine);
    Halves::widen(even, odd, pairs);
  }
  LOCKSTEP_INLINE void store(std::byte* to) const {
    Line<std::uint32_t> pairs;
    Halves::narrow(pairs, even, odd);
    std::memcpy(to, &pairs, kLine);
  }
  LOCKSTEP_INLINE void join(const Widened& other) {
    if constexpr (kOp == ReduceOp::kSum) {
      even += other.even;
      odd += other.odd;
    } else {
      even *= other.even;
      odd *= other.odd;
    }
  }
};

LOCKSTEP_INLINE void ask_to_read(const std::byte* line) { __builtin_prefetch(line, 0); }
LOCKSTEP_INLINE void ask_to_write(const std::byte* line) {
#if defined(__x86_64__)
  // The builtin becomes a prefetch for reading unless the target CPU has this; other CPUs take it for a no-op.
  asm volatile("prefetchw (%0)" : : "r"(line));
#else
  __builtin_prefetch(line, 1);
#endif
}

/// Where lines come from, and where they go. `Pointers` is an array where the compiler shall know how many they are.
template <class Pointers>
struct IntoOne {
  Pointers sources;
  std::byte* dst;

  template <class Store>
  LOCKSTEP_INLINE void each_target(const Store& store) const {
    store(dst);
  }
  LOCKSTEP_INLINE void ask(std::size_t at) const {
    for (const std::byte* source : sources) ask_to_read(source + at);
  }
};
template <class Pointers>
struct IntoAll {
  Pointers sources;

  template <class Store>
  LOCKSTEP_INLINE void each_target(const Store& store) const {
    for (std::byte* copy : sources) store(copy);
  }
  LOCKSTEP_INLINE void ask(std::size_t at) const {
    for (const std::byte* copy : sources) ask_to_write(copy + at);
  }
};

/// Sources that are added along a tree, into some of them or others.
struct AlongTree {
  std::span<const std::byte* const> sources;
  std::span<const std::uint8_t> additions;
  std::span<std::byte* const> targets;

  template <class Store>
  LOCKSTEP_INLINE void each_target(const Store& store) const {
    for (std::byte* target : targets) store(target);
  }
  LOCKSTEP_INLINE void ask(std::size_t at) const {
    for (const std::byte* source : sources) ask_to_read(source + at);
    for (const std::byte* target : targets) ask_to_write(target + at);
  }
};

/// Values that wait for the other half of their node stay in the first cache.
template <class Acc>
LOCKSTEP_INLINE void reduce_line(const AlongTree& ends, std::size_t at) {
  Acc waiting[ReductionTree::kMostDepth], next;
  next.load(ends.sources[0] + at);
  waiting[0] = next;
  std::size_t depth = 1;
  for (std::size_t s = 1; s < ends.sources.size(); ++s) {
    next.load(ends.sources[s] + at);
    for (std::uint8_t n = ends.additions[s]; n > 0; --n) {
      waiting[--depth].join(next);
      next = waiting[depth];
    }
    waiting[depth++] = next;
  }
  ends.each_target([&](std::byte * target) __attribute__((always_inline)) { next.store(target + at); });
}

template <class Acc, class Ends>
LOCKSTEP_INLINE void reduce_line(const Ends& ends, std::size_t at) {
  Acc sum, next;
  sum.load(ends.sources[0] + at);
  for (std::size_t r = 1; r < ends.sources.size(); ++r) {
    next.load(ends.sources[r] + at);
    sum.join(next);
  }
  ends.each_target([&](std::byte * target) __attribute__((always_inline)) { sum.store(target + at); });
}

/// Whole lines.
template <class Acc, class Ends>
LOCKSTEP_SIMD_CLONES void reduce_lines(Ends ends, std::size_t bytes) {
  std::size_t at = 0;
  if (bytes * ends.sources.size() > kFewBytes && bytes >= 2 * kStrips * kPage) {
    const std::size_t strip_bytes = (bytes / kStrips - kStaggerBytes) / kPage * kPage + kStaggerBytes;
    for (std::size_t in_strip = 0; in_strip < strip_bytes; in_strip += kLine)
      for (std::size_t strip = 0; strip < kStrips; ++strip) {
        // After the last line, asking is harmless.
        ends.ask(strip * strip_bytes + in_strip + kAheadBytes);
        reduce_line<Acc>(ends, strip * strip_bytes + in_strip);
      }
    at = kStrips * strip_bytes;
  }
  for (; at < bytes; at += kLine) reduce_line<Acc>(ends, at);
}

/// What is no whole line is made one.
template <class Acc>
void reduce_rest(const AlongTree& ends, std::size_t at, std::size_t bytes) {
  alignas(kLine) std::array<std::byte, kLine> waiting[ReductionTree::kMostDepth], next{};
  std::size_t depth = 0;
  for (std::size_t s = 0; s < ends.sources.size(); ++s) {
    std::memcpy(next.data(), ends.sources[s] + at, bytes);
    for (std::uint8_t n = ends.additions[s]; n > 0; --n) {
      Acc left, right;
      left.load(waiting[--depth].data());
      right.load(next.data());
      left.join(right);
      left.store(next.data());
    }
    waiting[depth++] = next;
  }
  ends.each_target([&](std::byte* target) { std::memcpy(target + at, next.data(), bytes); });
}

template <class Acc, class Ends>
void reduce_rest(const Ends& ends, std::size_t at, std::size_t bytes) {
  Acc sum, next;
  alignas(kLine) std::array<std::byte, kLine> line{};
  std::memcpy(line.data(), ends.sources[0] + at, bytes);
  sum.load(line.data());
  for (std::size_t r = 1; r < ends.sources.size(); ++r) {
    std::memcpy(line.data(), ends.sources[r] + at, bytes);
    next.load(line.data());
    sum.join(next);
  }
  sum.store(line.data());
  ends.each_target([&](std::byte* target) { std::memcpy(target + at, line.data(), bytes); });
}

template <class Acc, class Ends>
void reduce_as(const Ends& ends, std::size_t bytes) {
  const std::size_t whole = bytes / kLine * kLine;
  reduce_lines<Acc>(ends, whole);
  if (whole < bytes) reduce_rest<Acc>(ends, whole, bytes - whole);
}

// Bytes that are worked on at a time where no lines are.
constexpr std::size_t kBlockBytes = 4096;

template <class T>
constexpr bool kIs16Bit = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

template <ReduceOp kOp, class T>
T joined(T a, T b) {
  constexpr bool kRounds = kOp == ReduceOp::kSum || kOp == ReduceOp::kProd;
  static_assert(!kRounds || !kIs16Bit<T>, "by lines: rounded once, not with each contribution");
  if constexpr (kIs16Bit<T>) {
    return T::from_float(joined<kOp>(a.to_float(), b.to_float()));
  } else if constexpr (kRounds && std::is_integral_v<T>) {
    // Signed integers wrap around as unsigned ones.
    const auto x = static_cast<std::make_unsigned_t<T>>(a), y = static_cast<std::make_unsigned_t<T>>(b);
    return static_cast<T>(kOp == ReduceOp::kSum ? x + y : x * y);
  } else if constexpr (kOp == ReduceOp::kSum) {
    return a + b;
  } else if constexpr (kOp == ReduceOp::kProd) {
    return a * b;
    // `a != a` keeps a NaN on the left; one on the right makes the comparison false, which takes b.
  } else if constexpr (kOp == ReduceOp::kMin) {
    return a < b || a != a ? a : b;
  } else {
    return a > b || a != a ? a : b;
  }
}

/// sums[i] = sums[i] op next[i].
using Join = void (*)(std::byte* sums, const std::byte* next, std::size_t bytes);

template <ReduceOp kOp, class T>
void join(std::byte* sums, const std::byte* next, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, sums + at, sizeof(T));
    std::memcpy(&b, next + at, sizeof(T));
    a = joined<kOp>(a, b);
    std::memcpy(sums + at, &a, sizeof(T));
  }
}

template <ReduceOp kOp, class T>
constexpr Join join_unless_rounded() {
  if constexpr (rounds(lockstep::dtype_of<T>(), kOp))
    return nullptr;
  else
    return join<kOp, T>;
}

template <ReduceOp kOp>
Join join_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return join<kOp, float>;
    case DType::kF64: return join<kOp, double>;
    case DType::kBF16: return join_unless_rounded<kOp, BFloat16>();
    case DType::kI32: return join<kOp, std::int32_t>;
    case DType::kI64: return join<kOp, std::int64_t>;
    case DType::kU8: return join<kOp, std::uint8_t>;
    case DType::kF16: return join_unless_rounded<kOp, Float16>();
  }
  return nullptr;
}

Join join_of(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return join_of<ReduceOp::kSum>(dtype);
    case ReduceOp::kMin: return join_of<ReduceOp::kMin>(dtype);
    case ReduceOp::kMax: return join_of<ReduceOp::kMax>(dtype);
    case ReduceOp::kProd: return join_of<ReduceOp::kProd>(dtype);
  }
  return nullptr;
}

/// A block is whole before any of it is stored: a source may be the destination.
template <class Ends>
void reduce_by_blocks(Join join, const Ends& ends, std::size_t bytes) {
  alignas(kLine) std::array<std::byte, kBlockBytes> sums;
  for (std::size_t at = 0; at < bytes; at += kBlockBytes) {
    const std::size_t size = std::min(kBlockBytes, bytes - at);
    std::memcpy(sums.data(), ends.sources[0] + at, size);
    for (std::size_t r = 1; r < ends.sources.size(); ++r) join(sums.data(), ends.sources[r] + at, size);
    ends.each_target([&](std::byte* target) { std::memcpy(target + at, sums.data(), size); });
  }
}

template <class Ends>
void reduce(DType dtype, ReduceOp op, const Ends& ends, std::size_t bytes) {
  const bool sums = op == ReduceOp::kSum;
  if (sums && dtype == DType::kF32) return reduce_as<F32Line>(ends, bytes);
  if (!rounds(dtype, op)) return reduce_by_blocks(join_of(dtype, op), ends, bytes);
  if (dtype == DType::kBF16)
    return sums ? reduce_as<Widened<Bf16Halves, ReduceOp::kSum>>(ends, bytes)
                : reduce_as<Widened<Bf16Halves, ReduceOp::kProd>>(ends, bytes);
  return sums ? reduce_as<Widened<F16Halves, ReduceOp::kSum>>(ends, bytes)
              : reduce_as<Widened<F16Halves, ReduceOp::kProd>>(ends, bytes);
}

template <class T>
LOCKSTEP_SIMD_CLONES void widen(float* dst, const T* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = source[i].to_float();
}

template <ReduceOp kOp, class T>
LOCKSTEP_SIMD_CLONES void join_widened(float* dst, const T* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = joined<kOp>(dst[i], source[i].to_float());
}

template <ReduceOp kOp>
LOCKSTEP_SIMD_CLONES void join_partials(float* dst, const float* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = joined<kOp>(dst[i], source[i]);
}

template <class T>
LOCKSTEP_SIMD_CLONES void round_to(T* dst, const float* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = T::from_float(source[i]);
}

/// Calls `run` with a value of the type and a constant of the operation, of those that round().
template <class Run>
void with_rounded(DType dtype, ReduceOp op, const Run& run) {
  const auto with_op = [&](auto element) {
    if (op == ReduceOp::kSum)
      run(element, std::integral_constant<ReduceOp, ReduceOp::kSum>());
    else
      run(element, std::integral_constant<ReduceOp, ReduceOp::kProd>());
  };
  LOCKSTEP_ASSERT(rounds(dtype, op), "{} of {} is not rounded", name_of(op), lockstep::name_of(dtype));
  if (dtype == DType::kBF16)
    with_op(BFloat16());
  else
    with_op(Float16());
}

// Pieces that stay in the first cache.
constexpr std::size_t kPiece = 1024;

}  // namespace

void reduce_in_order(DType dtype, ReduceOp op, std::byte* dst, std::span<const std::byte* const> sources,
                     std::size_t count) {
  LOCKSTEP_ASSERT(!sources.empty(), "a reduction of nothing");
  const std::size_t bytes = count * size_of(dtype);
  if (sources.size() == 1) {
    if (bytes > 0 && dst != sources[0]) std::memcpy(dst, sources[0], bytes);
  } else if (sources.size() == 2) {
    reduce(dtype, op, IntoOne<std::array<const std::byte*, 2>>{{sources[0], sources[1]}, dst}, bytes);
  } else {
    reduce(dtype, op, IntoOne<std::span<const std::byte* const>>{sources, dst}, bytes);
  }
}

void reduce_into_all(DType dtype, ReduceOp op, std::span<std::byte* const> copies, std::size_t count) {
  LOCKSTEP_ASSERT(!copies.empty(), "a reduction of nothing");
  const std::size_t bytes = count * size_of(dtype);
  if (copies.size() == 2)
    reduce(dtype, op, IntoAll<std::array<std::byte*, 2>>{{copies[0], copies[1]}}, bytes);
  else if (copies.size() > 2)
    reduce(dtype, op, IntoAll<std::span<std::byte* const>>{copies}, bytes);
}

void reduce_along_tree(DType dtype, std::byte* dst, std::span<const std::byte* const> sources,
                       std::span<const std::uint8_t> additions, std::size_t count) {
  // Where each source is added as it comes, the order is that of the sources.
  if (std::ranges::all_of(additions.subspan(1), [](std::uint8_t n) { return n == 1; }))
    return reduce_in_order(dtype, ReduceOp::kSum, dst, sources, count);
  reduce_along_tree(dtype, {&dst, 1}, sources, additions, count);
}

void reduce_along_tree(DType dtype, std::span<std::byte* const> targets, std::span<const std::byte* const> sources,
                       std::span<const std::uint8_t> additions, std::size_t count) {
  LOCKSTEP_ASSERT(!sources.empty() && sources.size() == additions.size(), "a tree of {} sources, {} additions",
                  sources.size(), additions.size());
  const AlongTree ends{sources, additions, targets};
  const std::size_t bytes = count * size_of(dtype);
  if (dtype == DType::kF32) return reduce_as<F32Line>(ends, bytes);
  LOCKSTEP_ASSERT(dtype == DType::kF64, "a tree of {}", lockstep::name_of(dtype));
  reduce_as<PlainLine<double>>(ends, bytes);
}

void reduce_partial(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                    std::size_t count) {
  if (!widened) return reduce_in_order(dtype, op, dst, sources, count);
  auto* const sums = reinterpret_cast<float*>(dst);
  with_rounded(dtype, op, [&](auto element, auto constant) {
    using T = decltype(element);
    const auto values_of = [](const std::byte* source) { return reinterpret_cast<const T*>(source); };
    for (std::size_t at = 0; at < count; at += kPiece) {
      const std::size_t n = std::min(kPiece, count - at);
      widen(sums + at, values_of(sources[0]) + at, n);
      for (std::size_t r = 1; r < sources.size(); ++r)
        join_widened<constant()>(sums + at, values_of(sources[r]) + at, n);
    }
  });
}

void reduce_partials(DType dtype, ReduceOp op, bool widened, std::byte* dst, std::span<const std::byte* const> sources,
                     std::size_t count) {
  if (!widened) return reduce_in_order(dtype, op, dst, sources, count);
  alignas(64) float sums[kPiece];
  with_rounded(dtype, op, [&](auto element, auto constant) {
    for (std::size_t at = 0; at < count; at += kPiece) {
      const std::size_t n = std::min(kPiece, count - at);
      std::memcpy(sums, sources[0] + at * sizeof(float), n * sizeof(float));
      for (std::size_t r = 1; r < sources.size(); ++r)
        join_partials<constant()>(sums, reinterpret_cast<const float*>(sources[r]) + at, n);
      round_to(reinterpret_cast<decltype(element)*>(dst) + at, sums, n);
    }
  });
}

}  // namespace lockstep::comm
