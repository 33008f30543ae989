// Moves convolution weights between our layout, OHWI, and those that oneDNN's kernels for AVX-512 want. oneDNN's own
// reorders know no fast way to these.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <cstdint>

#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn::cpu {

/// The number of output channels that lie side by side in f32 (O / block, Kh, Kw, I, block) or bf16 (O / block, Kh, Kw,
/// I / 2, block, 2), where `desc` is that layout and nothing is padded; else 0.
std::int64_t output_block(const dnnl::memory::desc& desc);
/// Tiles of bf16, of which pairs along one axis lie side by side: (O / 16, I / 16, Kh, Kw, 8, 16 O, 2 I), or (O / 16,
/// I / 16, Kh, Kw, 8, 16 I, 2 O).
enum class PairTiles : std::uint8_t { kNone, kOfInputs, kOfOutputs };
/// Which of them `desc` is, without padding.
PairTiles pair_tiles(const dnnl::memory::desc& desc);
/// Whether `desc` is (O / 16, I / 16, Kh, Kw, 16 I, 16 O) without padding.
bool is_tiled(const dnnl::memory::desc& desc);

/// packed = w (O, Kh, Kw, I) with blocks of output channels, of w's type.
void pack_outputs(const Tensor& w, std::int64_t block, float* packed);
/// packed = w (O, Kh, Kw, I) bf16 in these tiles.
void pack_pair_tiles(const Tensor& w, PairTiles tiles, void* packed);
/// The same of w's backward, whose inputs are w's outputs: (I, Kh, Kw, O) with its windows turned by 180°, and blocks
/// of `block` of the I.
void pack_turned(const Tensor& w, std::int64_t block, float* packed);
/// w (O, Kh, Kw, I) = what is tiled.
void unpack_tiles(const float* tiles, const Tensor& w);

// Activations with sixteen channels side by side, as some of oneDNN's kernels want them.

inline constexpr std::int64_t kChannelBlock = 16;

/// blocked (N, C / 16, H, W, 16) = plain (N, H, W, C), f32 or bf16; C is a multiple of 16.
void to_blocked(const Tensor& plain, float* blocked);
/// plain (N, H, W, C) = blocked (N, C / 16, H, W, 16), or the ReLU of that; NaN stays NaN.
void from_blocked(const float* blocked, const Tensor& plain, bool relu = false);

}  // namespace lockstep::nn::cpu
