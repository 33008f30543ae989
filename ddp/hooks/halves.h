// f32 to and from 16 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/base/dtype.h"
#include "lockstep/ddp/bucket_plan.h"

namespace lockstep::ddp {

/// to[i] = from[i] · scale, rounded to nearest. The same bits with every instruction set.
void narrow(const float* from, float scale, BFloat16* to, std::size_t count);
void narrow(const float* from, float scale, Float16* to, std::size_t count);
/// to[i] = from[i] · scale.
void widen(const BFloat16* from, float scale, float* to, std::size_t count);
void widen(const Float16* from, float scale, float* to, std::size_t count);
/// The largest magnitude; infinity or NaN where one of them is either.
float largest_magnitude(const float* values, std::size_t count);
bool all_finite(const Float16* values, std::size_t count);

/// Of an arena that has half of what the buckets have.
std::uint64_t bytes_of_halves(std::span<const SlotSpec> slots);

}  // namespace lockstep::ddp
