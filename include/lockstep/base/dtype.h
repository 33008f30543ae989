// Element types of tensors, arenas and collectives.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace lockstep {

enum class DType : std::uint8_t { kF32, kF64, kBF16, kI32, kI64, kU8, kF16 };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 4;
    case DType::kF64: return 8;
    case DType::kBF16: return 2;
    case DType::kI32: return 4;
    case DType::kI64: return 8;
    case DType::kU8: return 1;
    case DType::kF16: return 2;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kF64: return "f64";
    case DType::kBF16: return "bf16";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
    case DType::kF16: return "f16";
  }
  return "?";
}

/// What activations are computed in; parameters, gradients and statistics are f32.
enum class Precision : std::uint8_t { kF32, kBF16, kFp16 };

constexpr DType dtype_of(Precision precision) {
  switch (precision) {
    case Precision::kF32: return DType::kF32;
    case Precision::kBF16: return DType::kBF16;
    case Precision::kFp16: return DType::kF16;
  }
  return DType::kF32;
}
/// As --precision has it.
constexpr const char* name_of(Precision precision) {
  return precision == Precision::kFp16 ? "fp16" : name_of(dtype_of(precision));
}
/// Whether it is one of the types of 16 bits that activations may have.
constexpr bool is_half(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

/// The upper half of an IEEE f32: 8 exponent bits, 7 mantissa bits. Arithmetic happens in f32.
struct BFloat16 {
  std::uint16_t bits = 0;

  /// Rounds to nearest, ties to even; NaN stays NaN (quiet).
  static constexpr BFloat16 from_float(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
    return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
  constexpr float to_float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};
static_assert(sizeof(BFloat16) == 2);

/// IEEE binary16: 5 exponent bits, 10 mantissa bits, subnormal numbers. Arithmetic happens in f32. Neither function
/// depends on how the CPU treats subnormal f32.
struct Float16 {
  std::uint16_t bits = 0;

  /// Rounds to nearest, ties to even; from 65520 up to infinity. NaN stays NaN (quiet).
  static constexpr Float16 from_float(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    // f32 rounds it: the last bit of a sum with this is worth a subnormal half's.
    constexpr std::uint32_t kHalf = 126u << 23;
    const std::uint32_t small =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(kHalf)) - kHalf;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const std::uint32_t large = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : 0x7c00u;
    const std::uint32_t finite = magnitude < 113u << 23 ? small : normal;
    return {static_cast<std::uint16_t>(sign | (magnitude >= 143u << 23 ? large : finite))};
  }
  constexpr float to_float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13, exponent = magnitude >> 23;
    const std::uint32_t normal = magnitude + (exponent == 31 ? 224u << 23 : 112u << 23);
    // Without a leading one: with it, and then without it again.
    const float small = std::bit_cast<float>(magnitude + (113u << 23)) - std::bit_cast<float>(std::uint32_t{113} << 23);
    return std::bit_cast<float>(sign | (exponent == 0 ? std::bit_cast<std::uint32_t>(small) : normal));
  }
};
static_assert(sizeof(Float16) == 2);

/// The DType of T; the program does not compile for types that have none.
template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return DType::kF32;
  else if constexpr (std::is_same_v<T, double>)
    return DType::kF64;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return DType::kBF16;
  else if constexpr (std::is_same_v<T, Float16>)
    return DType::kF16;
  else if constexpr (std::is_same_v<T, std::int32_t>)
    return DType::kI32;
  else if constexpr (std::is_integral_v<T> && std::is_signed_v<T> && sizeof(T) == 8)
    return DType::kI64;
  else {
    static_assert(std::is_same_v<T, std::uint8_t>, "of float, double, BFloat16, Float16, int32_t, int64_t and uint8_t");
    return DType::kU8;
  }
}

}  // namespace lockstep
