#include "nn/ops/cpu/layouts.h"

#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/onednn_versions.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cpu/transpose.h"

namespace lockstep::nn::cpu {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

constexpr std::int64_t kTile = 16;
constexpr std::int64_t kGrain = 16384;  // elements

bool is(const memory::desc& desc, memory::data_type type, Tag tag) {
  return dims_of(desc).size() == 4 && desc == memory::desc(dims_of(desc), type, tag);
}

bool has_whole_tiles(const memory::desc& desc) {
  return dims_of(desc)[0] % kTile == 0 && dims_of(desc)[1] % kTile == 0;
}

// Two bf16, which no layout of the inputs parts.
std::int64_t words_of(const Tensor& w, std::int64_t elements) {
  return elements * static_cast<std::int64_t>(size_of(w.dtype())) / static_cast<std::int64_t>(sizeof(float));
}

// Interleaves the tile's rows o and o + 1: taps of `in` inputs each.
LOCKSTEP_SIMD_CLONES
void pair_rows(const BFloat16* __restrict even, const BFloat16* __restrict odd, std::uint32_t* __restrict to) {
  for (std::int64_t i = 0; i < kTile; ++i)
    to[i] = static_cast<std::uint32_t>(even[i].bits) | static_cast<std::uint32_t>(odd[i].bits) << 16;
}

// Splits `count` pieces of `elements` each.
template <class Body>
void each_piece(std::int64_t count, std::int64_t elements, const Body& body) {
  parallel_for(count, std::max<std::int64_t>(1, kGrain / elements), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) body(piece);
  });
}

}  // namespace

std::int64_t output_block(const memory::desc& desc) {
  struct Known {
    Tag tag;
    std::int64_t block;
  };
  for (const auto& [tag, block] :
       {Known{Tag::Acdb16a, 16}, Known{Tag::Acdb32a, 32}, Known{Tag::Acdb48a, 48}, Known{Tag::Acdb64a, 64}})
    if (is(desc, memory::data_type::f32, tag) && dims_of(desc)[0] % block == 0) return block;
  for (const auto& [tag, block] :
       {Known{Tag::AcdB16a2b, 16}, Known{Tag::AcdB32a2b, 32}, Known{Tag::AcdB48a2b, 48}, Known{Tag::AcdB64a2b, 64}})
    if (is(desc, memory::data_type::bf16, tag) && dims_of(desc)[0] % block == 0 && dims_of(desc)[1] % 2 == 0)
      return block;
  return 0;
}

PairTiles pair_tiles(const memory::desc& desc) {
  if (is(desc, memory::data_type::bf16, Tag::ABcd8b16a2b) && has_whole_tiles(desc)) return PairTiles::kOfInputs;
  if (is(desc, memory::data_type::bf16, Tag::ABcd8a16b2a) && has_whole_tiles(desc)) return PairTiles::kOfOutputs;
  return PairTiles::kNone;
}

bool is_tiled(const memory::desc& desc) {
  return is(desc, memory::data_type::f32, Tag::ABcd16b16a) && has_whole_tiles(desc);
}

void pack_outputs(const Tensor& w, std::int64_t block, float* packed) {
  const std::int64_t row = words_of(w, w.size(1) * w.size(2) * w.size(3));
  // A strip of columns at a time: what it reads of `block` rows and what it writes stay in the first cache.
  constexpr std::int64_t kStrip = 64;
  each_piece(w.size(0) / block, block * row, [&](std::int64_t piece) {
    const float* const from = static_cast<const float*>(w.raw()) + piece * block * row;
    float* const to = packed + piece * block * row;
    for (std::int64_t c = 0; c < row; c += kStrip)
      transpose(from + c, row, block, std::min(kStrip, row - c), to + c * block, block);
  });
}

void pack_pair_tiles(const Tensor& w, PairTiles tiles, void* packed) {
  const std::int64_t taps = w.size(1) * w.size(2), in = w.size(3), row = taps * in;
  constexpr std::int64_t kWords = kTile * kTile / 2;
  each_piece(w.size(0) / kTile, kTile * row, [&](std::int64_t piece) {
    const BFloat16* const from = w.data<BFloat16>() + piece * kTile * row;
    auto* to = static_cast<std::uint32_t*>(packed) + piece * kTile * row / 2;
    for (std::int64_t i = 0; i < in; i += kTile)
      for (std::int64_t tap = 0; tap < taps; ++tap, to += kWords) {
        const BFloat16* const tile = from + tap * in + i;
        if (tiles == PairTiles::kOfInputs)
          transpose(reinterpret_cast<const float*>(tile), row / 2, kTile, kTile / 2, reinterpret_cast<float*>(to),
                    kTile);
        else
          for (std::int64_t o = 0; o < kTile; o += 2)
            pair_rows(tile + o * row, tile + (o + 1) * row, to + o / 2 * kTile);
      }
  });
}

void pack_turned(const Tensor& w, std::int64_t block, float* packed) {
  const std::int64_t out = w.size(0), taps = w.size(1) * w.size(2), in = w.size(3);
  each_piece(in / block, block * taps * out, [&](std::int64_t piece) {
    float* to = packed + piece * taps * out * block;
    for (std::int64_t tap = taps - 1; tap >= 0; --tap)
      for (std::int64_t o = 0; o < out; ++o, to += block)
        std::memcpy(to, w.f32() + (o * taps + tap) * in + piece * block,
                    static_cast<std::size_t>(block) * sizeof(float));
  });
}

void unpack_tiles(const float* tiles, const Tensor& w) {
  const std::int64_t taps = w.size(1) * w.size(2), in = w.size(3), row = taps * in;
  each_piece(w.size(0) / kTile, kTile * row, [&](std::int64_t piece) {
    const float* const from = tiles + piece * kTile * row;
    float* const to = w.f32() + piece * kTile * row;
    for (std::int64_t tap = 0; tap < taps; ++tap)
      for (std::int64_t i = 0; i < in; i += kTile)
        transpose(from + (i * taps + tap * kTile) * kTile, kTile, kTile, kTile, to + tap * in + i, row);
  });
}

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
