// One layer of long short-term memory.
#pragma once

#include <array>
#include <cstdint>

#include "lockstep/base/function_ref.h"
#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn {

/// PyTorch's parameters of a layer with I inputs and H features; rows in the order of the gates i, f, g, o.
struct LstmWeights {
  Tensor w_ih;  // (4 · H, I)
  Tensor w_hh;  // (4 · H, H)
  Tensor b_ih;  // (4 · H)
  Tensor b_hh;  // (4 · H)
  /// One number each, in the order above, that changes whenever the content at the tensor's address does, also when
  /// another tensor comes to lie there: what is made of the weights is kept until then.
  std::array<std::uint64_t, 4> versions = {};
};

/// What one step hands to the next: h and c are (B, H); both undefined: zeros, or nobody wants to know.
struct LstmState {
  Tensor h, c;
};

/// Where gradients go: f32, each undefined (not wanted), overwritten, or added to when its flag says so.
struct LstmGradients {
  Tensor w_ih, w_hh, b_ih, b_hh;
  std::array<bool, 4> accumulate = {};
};

/// x (B, T, I), y (B, T, H), B ≥ 0 and T ≥ 1. For t = 0, 1, …
///   (i, f, g, o) = x_t · w_ihᵀ + b_ih + h_{t-1} · w_hhᵀ + b_hh
///   c_t = σ(f) ⊙ c_{t-1} + σ(i) ⊙ tanh(g),  y_t = h_t = σ(o) ⊙ tanh(c_t)
/// (Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, with the forget gate of Gers et al., 2000).
/// Activations, weights, biases and states are of one type, f32 or, where the backend computes in it, bf16; gradients
/// are f32.
class LstmKernels {
 public:
  virtual ~LstmKernels() = default;
  /// Begins with `from`, and puts the state after the last step into `to`. Returns what backward needs, undefined
  /// unless `keep`.
  virtual Tensor forward(const Tensor& x, const LstmWeights& weights, const LstmState& from, const Tensor& y,
                         const LstmState& to, bool keep) = 0;
  /// Of forward() with this `from` and y, which has returned `kept`, whose content is used up. dx is overwritten;
  /// undefined: not wanted. `from` is taken as constant, and nothing flows back from `to`. Calls `gradients_done` once,
  /// when the gradients of the parameters are there, or given to the device: before dx where that can wait.
  virtual void backward(const Tensor& x, const LstmWeights& weights, const LstmState& from, const Tensor& y,
                        const Tensor& kept, const Tensor& dy, const LstmGradients& gradients, const Tensor& dx,
                        FunctionRef<void()> gradients_done) = 0;
};

}  // namespace lockstep::nn
