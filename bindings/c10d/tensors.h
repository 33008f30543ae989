// Tensors as what collectives move and reduce: memory, and what kind of numbers it holds.
#pragma once

#include "lockstep/comm.h"

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace lockstep::pytorch {

/// Throws (RuntimeError in Python) unless `tensor` is a dense one on the CPU, or on a GPU where GpuOperations can be;
/// `doing` names the operation.
void check_tensor(const at::Tensor& tensor, const char* doing);
/// Of all of them; and that they are on one device.
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

// The group's collectives, on memory where its arenas are. They are over, or on a GPU in its producer's order, when
// these return.
void all_reduce(comm::ProcessGroup& group, void* values, std::size_t count, DType dtype, comm::ReduceOp op);
void reduce(comm::ProcessGroup& group, void* values, std::size_t count, DType dtype, comm::ReduceOp op, int root);
void broadcast(comm::ProcessGroup& group, void* values, std::size_t count, DType dtype, int root);
void all_gather(comm::ProcessGroup& group, const void* mine, std::size_t count, DType dtype, void* all);
void reduce_scatter(comm::ProcessGroup& group, const void* all, void* mine, std::size_t count, DType dtype,
                    comm::ReduceOp op);

/// For operations that go through the host's memory: those on a GPU as their values on the host, when the current
/// stream has computed them; all others as they are.
at::Tensor on_host(const at::Tensor& tensor);
std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors);
/// Memory there for what is to be in them; copied by write_back().
at::Tensor host_memory_for(const at::Tensor& tensor);
std::vector<at::Tensor> host_memory_for(const std::vector<at::Tensor>& tensors);
void write_back(const std::vector<at::Tensor>& memory, const std::vector<at::Tensor>& tensors);

/// Contiguous memory with what is in `tensor`: itself where that will do.
at::Tensor contiguous(const at::Tensor& tensor);
/// Contiguous memory for what is to be in `tensor`, whose values do not matter: itself where that will do.
at::Tensor memory_for(const at::Tensor& tensor);
/// Copies from memory of these functions unless it is the tensor's own.
void write_back(const at::Tensor& memory, const at::Tensor& tensor);

}  // namespace lockstep::pytorch
