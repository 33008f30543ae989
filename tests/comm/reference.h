// What collectives must give, by plain loops; and numbers to try them on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "lockstep/base/dtype.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm::reference {

using Bytes = std::vector<std::byte>;

inline constexpr DType kDTypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kI32,
                                    DType::kI64, DType::kU8,  DType::kF16};
inline constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProd};

/// The bits of element `index` of rank `rank`: full of carries, wraps, rounding and mixed signs, but no NaN.
inline std::uint64_t mix(std::uint64_t seed, int rank, std::size_t index) {
  std::uint64_t z = seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(rank) * 0xd1b54a32d192ed03ULL +
                    static_cast<std::uint64_t>(index) * 0x8cb92ba72f3d8dd7ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

/// Of such bits: magnitudes over twelve binary orders, so that the order of summation shows.
inline double real_of(std::uint64_t bits) {
  return (static_cast<double>(bits >> 12) / 4503599627370496.0 - 0.5) * static_cast<double>(1u << (bits % 12));
}

/// After so many elements they repeat themselves: making them would take longer than the collective. It is a prime: no
/// chunk or slice is a multiple of it, and a misplaced one shows.
inline constexpr std::size_t kPeriod = 10007;

template <class Make>
Bytes elements(std::size_t count, std::uint64_t seed, int rank, const Make& make) {
  using T = decltype(make(seed));
  Bytes bytes(count * sizeof(T));
  const std::size_t fresh = std::min(count, kPeriod);
  for (std::size_t i = 0; i < fresh; ++i) {
    const T value = make(mix(seed, rank, i));
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  for (std::size_t i = fresh; i < count; i += fresh)
    std::memcpy(bytes.data() + i * sizeof(T), bytes.data(), std::min(fresh, count - i) * sizeof(T));
  return bytes;
}

inline Bytes contribution(DType dtype, std::size_t count, std::uint64_t seed, int rank) {
  const auto all = [&](const auto& make) { return elements(count, seed, rank, make); };
  switch (dtype) {
    case DType::kF32: return all([](std::uint64_t bits) { return static_cast<float>(real_of(bits)); });
    case DType::kF64: return all(real_of);
    case DType::kBF16:
      return all([](std::uint64_t bits) { return BFloat16::from_float(static_cast<float>(real_of(bits))); });
    case DType::kF16:
      return all([](std::uint64_t bits) { return Float16::from_float(static_cast<float>(real_of(bits))); });
    case DType::kI32: return all([](std::uint64_t bits) { return static_cast<std::int32_t>(bits); });
    case DType::kI64: return all([](std::uint64_t bits) { return static_cast<std::int64_t>(bits); });
    case DType::kU8: return all([](std::uint64_t bits) { return static_cast<std::uint8_t>(bits); });
  }
  return {};
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::kSum) return a + b;
    if (op == ReduceOp::kProd) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  } else {
    using U = std::make_unsigned_t<T>;
    if (op == ReduceOp::kSum) return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    if (op == ReduceOp::kProd) return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
  if (op == ReduceOp::kMin) return a < b ? a : b;
  return a > b ? a : b;
}

template <class T>
Bytes reduce_as(ReduceOp op, const std::vector<Bytes>& parts) {
  Bytes result(parts[0].size());
  for (std::size_t at = 0; at < result.size(); at += sizeof(T)) {
    T sum, next;
    std::memcpy(&sum, parts[0].data() + at, sizeof(T));
    for (std::size_t r = 1; r < parts.size(); ++r) {
      std::memcpy(&next, parts[r].data() + at, sizeof(T));
      sum = combine(op, sum, next);
    }
    std::memcpy(result.data() + at, &sum, sizeof(T));
  }
  return result;
}

/// T is BFloat16 or Float16.
template <class T>
Bytes reduce_rounded(ReduceOp op, const std::vector<Bytes>& parts) {
  Bytes result(parts[0].size());
  for (std::size_t at = 0; at < result.size(); at += sizeof(T)) {
    const auto value = [&](std::size_t r) {
      T v;
      std::memcpy(&v, parts[r].data() + at, sizeof(v));
      return v.to_float();
    };
    float sum = value(0);
    for (std::size_t r = 1; r < parts.size(); ++r) sum = combine(op, sum, value(r));
    const T rounded = T::from_float(sum);
    std::memcpy(result.data() + at, &rounded, sizeof(rounded));
  }
  return result;
}

/// ((parts[0] op parts[1]) op parts[2]) op …, element by element.
inline Bytes reduce(DType dtype, ReduceOp op, const std::vector<Bytes>& parts) {
  switch (dtype) {
    case DType::kF32: return reduce_as<float>(op, parts);
    case DType::kF64: return reduce_as<double>(op, parts);
    case DType::kBF16: return reduce_rounded<BFloat16>(op, parts);
    case DType::kF16: return reduce_rounded<Float16>(op, parts);
    case DType::kI32: return reduce_as<std::int32_t>(op, parts);
    case DType::kI64: return reduce_as<std::int64_t>(op, parts);
    case DType::kU8: return reduce_as<std::uint8_t>(op, parts);
  }
  return {};
}

/// In f32, and from it.
template <class T>
Bytes widen(const Bytes& narrow) {
  Bytes wide(narrow.size() * 2);
  for (std::size_t i = 0; i < narrow.size() / 2; ++i) {
    T value;
    std::memcpy(&value, narrow.data() + i * 2, 2);
    const float single = value.to_float();
    std::memcpy(wide.data() + i * 4, &single, 4);
  }
  return wide;
}
template <class T>
Bytes round(const Bytes& wide) {
  Bytes narrow(wide.size() / 2);
  for (std::size_t i = 0; i < narrow.size() / 2; ++i) {
    float single = 0;
    std::memcpy(&single, wide.data() + i * 4, 4);
    const T rounded = T::from_float(single);
    std::memcpy(narrow.data() + i * 2, &rounded, 2);
  }
  return narrow;
}

/// Each host's ranks in their order, then the hosts; a host's result has the type of its ranks'.
inline Bytes reduce_rounding_hosts(DType dtype, ReduceOp op, const std::vector<Bytes>& parts,
                                   const std::vector<std::vector<int>>& hosts) {
  std::vector<Bytes> partials;
  for (const auto& ranks : hosts) {
    std::vector<Bytes> theirs;
    for (const int rank : ranks) theirs.push_back(parts[static_cast<std::size_t>(rank)]);
    partials.push_back(reduce(dtype, op, theirs));
  }
  return reduce(dtype, op, partials);
}

/// The same in two levels: the parts of each host first, hosts in the order in which they are given; bf16 and f16 are
/// rounded once, at the end.
inline Bytes reduce_on_hosts(DType dtype, ReduceOp op, const std::vector<Bytes>& parts,
                             const std::vector<std::vector<int>>& hosts) {
  if (dtype == DType::kBF16 || dtype == DType::kF16) {
    const bool is_bf16 = dtype == DType::kBF16;
    std::vector<Bytes> wide;
    for (const Bytes& part : parts) wide.push_back(is_bf16 ? widen<BFloat16>(part) : widen<Float16>(part));
    const Bytes result = reduce_on_hosts(DType::kF32, op, wide, hosts);
    return is_bf16 ? round<BFloat16>(result) : round<Float16>(result);
  }
  return reduce_rounding_hosts(dtype, op, parts, hosts);
}

/// The contributions of ranks 0 to world_size - 1.
inline std::vector<Bytes> contributions(DType dtype, std::size_t count, std::uint64_t seed, int world_size) {
  std::vector<Bytes> parts;
  for (int r = 0; r < world_size; ++r) parts.push_back(contribution(dtype, count, seed, r));
  return parts;
}

}  // namespace lockstep::comm::reference
