// Products of all columns of one matrix with all columns of another, aᵀ · b, as gradients of weights are. Internal to
// nn/ops/cpu.
#pragma once

#include <cstdint>

#include "lockstep/nn/tensor/allocator.h"

namespace lockstep::nn::cpu {

/// Whether oneDNN computes with AVX2 and no wider instruction set, which ONEDNN_MAX_CPU_ISA may ask for, and this CPU
/// has what our loops in its place need.
bool computes_with_avx2();

/// Note [Products of columns]
/// With AVX2 oneDNN's product packs no operand of which one side is short, and reads the columns of a with a stride
/// that often is a power of two: a cache holds few lines of that. It then runs at half of the speed at which it
/// multiplies rows. With AVX-512 it packs them.

/// c (m, n) = aᵀ · b, or c += where `accumulate`; a (depth, m), b (depth, n), f32 without gaps. The sums are taken in
/// the order of depth ≥ 1, 256 products at a time, whatever the number of threads. Scratch memory comes from
/// `allocator`.
void multiply_columns(const float* a, const float* b, std::int64_t depth, std::int64_t m, std::int64_t n,
                      bool accumulate, float* c, CachingAllocator& allocator);

/// The same by the calling thread alone, with scratch memory for column_scratch() floats.
void multiply_columns_alone(const float* a, const float* b, std::int64_t depth, std::int64_t m, std::int64_t n,
                            bool accumulate, float* c, float* scratch);
std::int64_t column_scratch(std::int64_t depth, std::int64_t m, std::int64_t n);

}  // namespace lockstep::nn::cpu
