#include "nn/ops/cpu/blocked.h"

#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

// Calls move(offset in plain, offset in blocked) for every sixteen channels, one sample after the other: what is read
// and written at a time is near.
template <class Move>
void each_block(const Tensor& plain, const Move& move) {
  const std::int64_t pixels = plain.size(1) * plain.size(2), channels = plain.size(3);
  const std::int64_t blocks = channels / kChannelBlock, sample = pixels * channels;
  parallel_for(plain.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n)
      for (std::int64_t p = 0; p < pixels; ++p)
        for (std::int64_t b = 0; b < blocks; ++b)
          move(n * sample + p * channels + b * kChannelBlock, n * sample + (b * pixels + p) * kChannelBlock);
  });
}

constexpr std::size_t kBytes = kChannelBlock * sizeof(float);

// One sample.
LOCKSTEP_SIMD_CLONES
void widen_sample(const BFloat16* __restrict plain, std::int64_t pixels, std::int64_t channels,
                  float* __restrict blocked) {
  for (std::int64_t p = 0; p < pixels; ++p)
    for (std::int64_t c = 0; c < channels; c += kChannelBlock) {
      const BFloat16* const from = plain + p * channels + c;
      float* const to = blocked + c * pixels + p * kChannelBlock;
      for (std::int64_t i = 0; i < kChannelBlock; ++i) to[i] = wide(from[i]);
    }
}

}  // namespace

void to_blocked(const Tensor& plain, float* blocked) {
  if (plain.dtype() == DType::kBF16) {
    const std::int64_t pixels = plain.size(1) * plain.size(2), channels = plain.size(3), sample = pixels * channels;
    parallel_for(plain.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n)
        widen_sample(plain.data<BFloat16>() + n * sample, pixels, channels, blocked + n * sample);
    });
    return;
  }
  const float* const from = plain.f32();
  each_block(plain, [&](std::int64_t p, std::int64_t b) { std::memcpy(blocked + b, from + p, kBytes); });
}

void from_blocked(const float* blocked, const Tensor& plain, bool relu) {
  float* const to = plain.f32();
  if (!relu) {
    each_block(plain, [&](std::int64_t p, std::int64_t b) { std::memcpy(to + p, blocked + b, kBytes); });
    return;
  }
  each_block(plain, [&](std::int64_t p, std::int64_t b) {
    for (std::int64_t i = 0; i < kChannelBlock; ++i) to[p + i] = blocked[b + i] < 0.0f ? 0.0f : blocked[b + i];
  });
}

}  // namespace lockstep::nn::cpu
