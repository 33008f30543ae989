// Kernels of ours that operations are put together with, beside those of the libraries.
#pragma once

#include <cstdint>

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

struct ConvProblem;  // cudnn.h

// Biases, apart from the products that they belong to.

/// sums (C) f32 = column sums of x (M, C), f32 or bf16, whose rows may lie apart, added to what sums holds when
/// `accumulate`. Summed in f32, in an order that depends on M, C and how x is aligned alone. M may be 0.
void sum_columns(Context& context, const Tensor& x, bool accumulate, const Tensor& sums);

/// y (M, C) += b (C) in each row; both f32 or both bf16. y may have a pitch.
void add_to_rows(Context& context, const Tensor& b, const Tensor& y);

// Where a ReLU's result is positive: a bit for each element.

// Note [Masks]
// Element c of a row of y has bit c % 8, counted from the lowest, of byte c / 8 of that row's mask; rows of masks are
// mask_pitch_of(columns) bits long, and the bits after the last column are unspecified. cuBLASLt writes and reads masks
// by itself, but says nowhere in which order: it is asked once, and left alone with them where its order is another.
// Its bit for 0 is not checked: either one is a derivative of ReLU there.

/// y (N, C) = ReLU(y), f32 or bf16, NaN as it is; the result's mask, U8.
void relu_with_mask(Context& context, const Tensor& y, const Tensor& mask);
/// dx (N, C) = 0 where the mask's bits are 0.
void apply_mask(Context& context, const Tensor& mask, const Tensor& dx);

// Sequences of different lengths, and those that are read from their last step on, for a library that knows neither.

/// y (B, T, C) = the steps of x (B, T, C), one after the other, or in reverse from each sequence's last one on; 0 where
/// it has no more. Taking them twice in reverse gives x without its padding. lengths (B) i32 from 0 to T; undefined: T.
/// Of one type, f32 or bf16; not in place.
///
/// Note [Lengths on a GPU]
/// A sequence's lengths are on the device, and the host does not wait for them: so all steps are computed, those of
/// padding from zeros. What they make is replaced by 0 and gets a gradient of 0, and they come after all others, also
/// in reverse: no step that counts reads what they leave.
void take_steps(Context& context, const Tensor& x, const Tensor& lengths, bool reverse, const Tensor& y);

/// h (B, C) = each sequence's last of steps (B, T, C), in the order in which they are computed; of one without steps,
/// what it begins with: first (B, C), undefined: 0.
void take_last_steps(Context& context, const Tensor& steps, const Tensor& lengths, const Tensor& first,
                     const Tensor& h);

// Tokens in the order of their indices.

struct alignas(8) TokenPlace {
  std::int32_t token;
  std::int32_t place;  // in the text
};

/// N indices, i32, at least one → (N, 2) i32, which are TokenPlaces: in the order of their tokens, equal ones in the
/// order of their places. An index outside [0, rows) is given as `rows`.
Tensor sort_tokens(Context& context, const Tensor& indices, std::int64_t rows);

// Gradients of the weights of convolutions whose input has few channels, such as the first one of a network.

/// How often few_channel_gradients() reads dy for `problem` (Note [Few channels]). 0: it does not take that.
int few_channel_passes(const ConvProblem& problem);

/// dw (O, Kh, Kw, C) and, when defined, db (O), both f32, of x (N, H, W, C) and dy (N, H', W', O), as `problem` says:
/// overwritten, or added to when their flag says so. dy lies at a multiple of 16 bytes and is not empty. Summed in f32,
/// in an order that depends on the shapes and the type alone.
void few_channel_gradients(Context& context, const ConvProblem& problem, const Tensor& x, const Tensor& dy,
                           bool accumulate_w, const Tensor& dw, bool accumulate_b, const Tensor& db);

}  // namespace lockstep::nn::cuda
