// Matrices that are made orthogonal by products alone.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn {

/// Note [Matrices]
/// Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) moves a matrix by the
/// orthogonal one that is nearest to its averaged gradient G: U Vᵀ of G = U S Vᵀ. Five Newton-Schulz iterations,
/// X ← aX + (bA + cA²)X with A = X Xᵀ, bring the singular values of G / ‖G‖ to between 0.7 and 1.2; a = 3.4445,
/// b = −4.775, c = 2.0315 are theirs, as torch.optim.Muon has them. Of more rows than columns A is XᵀX, on the other
/// side: the smaller one. The result is multiplied by 0.2 · √max(rows, columns) (Liu et al., "Muon is Scalable for LLM
/// Training", 2025), so that its elements have AdamW's size, and one learning rate and weight decay fit both.
/// A matrix has the parameter's first dimension as rows and all others as columns: their order, in which layouts
/// differ, changes nothing.
class Orthogonalizer {
 public:
  /// For all that are matrices (Parameter::is_matrix()). Takes memory for the largest.
  explicit Orthogonalizer(const std::vector<NamedParameter>& parameters);
  /// x, f32 and of such a parameter's shape, whose norm is 1 at most, becomes U Vᵀ · 0.2 · √max(rows, columns), nearly.
  /// Its content is unspecified afterwards where `control` (StepControl) does not apply.
  void run(const Tensor& x, const Tensor& control);

 private:
  void blend(const Tensor& p, const Tensor& g, double keep, double add, const Tensor& control);

  Backend* backend_ = nullptr;  // nullptr: there are none
  Tensor gram_, square_, product_;
};

}  // namespace lockstep::nn
