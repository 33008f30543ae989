// Which elements dropout keeps: the same on every device, and for every number of ranks.
#pragma once

#include <cmath>
#include <cstdint>

namespace lockstep::nn {

/// What random numbers of one step hang on. `first_sample`: the place in the global batch of this rank's first sample.
struct DropoutState {
  std::int64_t seed = 0, step = 0, first_sample = 0;
};

/// 32 random bits for each of four elements.
struct RandomBits {
  std::uint32_t word[4];
};

/// Philox-4x32 with ten rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): a bijection of
/// the counter that the key chooses. Also compiled for GPUs, which is why it stands in a header.
constexpr RandomBits philox(RandomBits counter, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter.word[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<std::uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<std::uint32_t>(b),
                static_cast<std::uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<std::uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/// The bits for elements 4 · quad to 4 · quad + 3 of a sample. Samples up to 2³², elements of a sample up to 2³⁴ and
/// layers up to 2¹⁶ have bits of their own; steps up to 2⁴⁸.
constexpr RandomBits dropout_bits(const DropoutState& state, std::int64_t layer, std::int64_t sample,
                                  std::int64_t quad) {
  const auto low = [](std::int64_t x) { return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x)); };
  const auto high = [](std::int64_t x) { return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x) >> 32); };
  return philox({{low(quad), low(sample), low(state.step), (high(state.step) << 16) ^ low(layer)}}, low(state.seed),
                high(state.seed));
}

/// Four neighbouring keys' numbers of bits in a row of attention's weights: of query `query` of `tokens`, in head
/// `head`. The bits are attention_bits(…).word[key % 4].
constexpr RandomBits attention_bits(const DropoutState& state, std::int64_t layer, std::int64_t sample,
                                    std::int64_t head, std::int64_t tokens, std::int64_t query, std::int64_t key) {
  return dropout_bits(state, layer, sample, (head * tokens + query) * ((tokens + 3) / 4) + key / 4);
}

/// Note [Random numbers]
/// Elements 4 · quad to 4 · quad + 3 of a sample take their normal numbers from their four words of dropout_bits(), two
/// words for two numbers: √(−2 ln u) cos(2π v) and √(−2 ln u) sin(2π v), u and v uniform in (0, 1) with 23 bits, of
/// which half a step is a number of f32. So the largest is 5.77. Devices may differ in the last bits, as their
/// functions do.
struct NormalPair {
  float first, second;
};
constexpr NormalPair normal_pair(std::uint32_t a, std::uint32_t b) {
  constexpr float kUnit = 0x1p-23f, kTurn = 6.28318531f;
  const float u = (static_cast<float>(a >> 9) + 0.5f) * kUnit, v = (static_cast<float>(b >> 9) + 0.5f) * kUnit;
  const float radius = std::sqrt(-2.0f * std::log(u));
  return {radius * std::cos(kTurn * v), radius * std::sin(kTurn * v)};
}

/// An element is kept where its bits are at least this: with probability 1 − p, to within 2⁻³².
constexpr std::uint32_t dropout_threshold(double p) {
  return static_cast<std::uint32_t>(p * 4294967296.0);  // p < 1
}

}  // namespace lockstep::nn
