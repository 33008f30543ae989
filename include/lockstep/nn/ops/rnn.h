// One recurrent layer in one direction: plain, gated (GRU) or long short-term memory.
#pragma once

#include <array>
#include <cstdint>

#include "lockstep/base/function_ref.h"
#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn {

enum class RnnCell : std::uint8_t { kTanh, kRelu, kLstm, kGru };

/// Rows of H in the weights: one, of an LSTM i, f, g, o, of a GRU r, z, n.
constexpr std::int64_t gates_of(RnnCell cell) { return cell == RnnCell::kLstm ? 4 : cell == RnnCell::kGru ? 3 : 1; }
/// "LSTM", as PyTorch calls its layers.
constexpr const char* name_of(RnnCell cell) {
  return cell == RnnCell::kLstm ? "LSTM" : cell == RnnCell::kGru ? "GRU" : "RNN";
}

struct RnnOptions {
  RnnCell cell = RnnCell::kLstm;
  /// From a sequence's last step to its first.
  bool reverse = false;
  /// (B) i32, on the device: the steps of each sequence, from 0 to T. What follows them is padding, which nobody reads,
  /// and whose results are 0. Undefined: T.
  Tensor lengths = {};
};

/// PyTorch's parameters of a layer with I inputs, H features and G = gates_of() gates.
struct RnnWeights {
  Tensor w_ih;  // (G · H, I)
  Tensor w_hh;  // (G · H, H)
  Tensor b_ih;  // (G · H); undefined, as b_hh: zeros
  Tensor b_hh;  // (G · H)
  /// One number each, in the order above, that changes whenever the content at the tensor's address does, also when
  /// another tensor comes to lie there: what is made of the weights is kept until then.
  std::array<std::uint64_t, 4> versions = {};
};

/// What one step hands to the next: h and, of an LSTM, c are (B, H); undefined: zeros, or nobody wants to know.
struct RnnState {
  Tensor h = {}, c = {};
};

/// Where gradients go: f32, each undefined (not wanted), overwritten, or added to when its flag says so.
struct RnnGradients {
  Tensor w_ih, w_hh, b_ih, b_hh;
  std::array<bool, 4> accumulate = {};
};

/// x (B, T, I), y (B, T, H), B ≥ 0 and T ≥ 1. With a_t = x_t · w_ihᵀ + b_ih and b_t = h_{t-1} · w_hhᵀ + b_hh, for
/// t = 0, 1, …, or in reverse from the last step on,
///   plain  h_t = tanh(a + b), or max(a + b, 0) (Elman, "Finding structure in time", 1990)
///   LSTM   (i, f, g, o) = a + b,  c_t = σ(f) ⊙ c_{t-1} + σ(i) ⊙ tanh(g),  h_t = σ(o) ⊙ tanh(c_t)
///          (Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, with the forget gate of Gers et al., 2000)
///   GRU    r = σ(a_r + b_r),  z = σ(a_z + b_z),  n = tanh(a_n + r ⊙ b_n),  h_t = (1 − z) ⊙ n + z ⊙ h_{t-1}
///          (Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014, in the variant whose reset
///          gate is applied after the product, which is PyTorch's and cuDNN's)
/// and y_t = h_t. A sequence's padding leaves its state as it is.
/// Activations, weights, biases and states are of one type, f32 or, where the backend computes in it, bf16; gradients
/// are f32.
class RnnKernels {
 public:
  virtual ~RnnKernels() = default;
  /// Begins with `from`, and puts the state after the last step into `to`. Returns what backward needs, undefined
  /// unless `keep`.
  virtual Tensor forward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                         const Tensor& y, const RnnState& to, bool keep) = 0;
  /// Of forward() with these options, this `from` and y, which has returned `kept`, whose content is used up. dx is
  /// overwritten, of padding with 0; undefined: not wanted. `from` is taken as constant, and nothing flows back from
  /// `to`. Calls `gradients_done` once, when the gradients of the parameters are there, or given to the device: before
  /// dx where that can wait. What it throws passes through, and dx is unspecified then.
  virtual void backward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                        const Tensor& y, const Tensor& kept, const Tensor& dy, const RnnGradients& gradients,
                        const Tensor& dx, FunctionRef<void()> gradients_done) = 0;
  /// Whether forward() can hand out c of an LSTM over sequences of different lengths.
  virtual bool hands_out_cells_of_lengths() const { return true; }
};

}  // namespace lockstep::nn
