// Tensors as what collectives move and reduce: memory on the CPU, and what kind of numbers it holds.
#pragma once

#include "lockstep/comm.h"

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace lockstep::pytorch {

/// Throws (RuntimeError in Python) unless `tensor` is a dense one on the CPU; `doing` names the operation.
void check_tensor(const at::Tensor& tensor, const char* doing);
void check_tensors(at::TensorList tensors, const char* doing);

/// A tensor's elements, for operations that only move them: in a type of lockstep's, or as bytes, so any will do.
struct Elements {
  DType dtype = DType::kU8;
  std::size_t per_element = 1;

  explicit Elements(at::ScalarType type);
  std::size_t count(const at::Tensor& tensor) const { return static_cast<std::size_t>(tensor.numel()) * per_element; }
};

/// Throws (RuntimeError in Python) unless a sparse `tensor` is one on the CPU whose coordinates are listed (COO), to be
/// reduced by `op`: SUM or AVG.
void check_sparse(const at::Tensor& tensor, const ::c10d::ReduceOp& op);

/// How a reduction of c10d's is done. Sums and products of 8 and 16 bit integers wrap as they would in their own type.
struct Reduction {
  at::ScalarType carrier = at::kFloat;  // what tensors are converted to before
  DType dtype = DType::kF32;
  std::size_t per_element = 1;  // 2: a complex number is two
  comm::ReduceOp op = comm::ReduceOp::kSum;
  at::Tensor (*bits)(const at::Tensor&, const at::Tensor&) = nullptr;  // of BAND, BOR, BXOR, which are no ReduceOp
  bool average = false;
  at::Tensor factor;  // PREMUL_SUM's; undefined: none

  /// Throws (RuntimeError in Python), naming `type` and what is supported.
  Reduction(at::ScalarType type, const ::c10d::ReduceOp& op);
  std::size_t count(const at::Tensor& memory) const { return static_cast<std::size_t>(memory.numel()) * per_element; }
  /// A contribution as it is reduced: contiguous, `tensor` itself where that will do.
  at::Tensor prepare(const at::Tensor& tensor) const;
  /// Puts the result in `memory`, over `size` ranks, where the caller wants it.
  void finish(at::Tensor& memory, const at::Tensor& tensor, int size) const;
};

/// Contiguous memory with what is in `tensor`: itself where that will do.
at::Tensor contiguous(const at::Tensor& tensor);
/// Contiguous memory for what is to be in `tensor`, whose values do not matter: itself where that will do.
at::Tensor memory_for(const at::Tensor& tensor);
/// Copies from memory of these functions unless it is the tensor's own.
void write_back(const at::Tensor& memory, const at::Tensor& tensor);

}  // namespace lockstep::pytorch
