// f32 to and from 16 bits on a GPU, in the order of `stream`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/base/device.h"
#include "lockstep/base/dtype.h"

namespace lockstep::ddp {

/// As narrow() and widen() of ddp/hooks/halves.h, without a scale.
void narrow_on_device(const float* from, BFloat16* to, std::size_t count, StreamView stream);
void widen_on_device(const BFloat16* from, float* to, std::size_t count, StreamView stream);

/// *largest = the bits of the largest magnitude, if they are above *largest: those of infinity and NaN are above all
/// others.
void largest_on_device(const float* from, std::int32_t* largest, std::size_t count, StreamView stream);
/// The same with a power of two by which the sum over 2^`log2_ranks` ranks of what is not larger than *largest, bits as
/// above, stays below 2^15.
void narrow_on_device(const float* from, const std::int32_t* largest, int log2_ranks, Float16* to, std::size_t count,
                      StreamView stream);
void widen_on_device(const Float16* from, const std::int32_t* largest, int log2_ranks, float* to, std::size_t count,
                     StreamView stream);

}  // namespace lockstep::ddp
