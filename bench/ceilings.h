// The rates of a device for copies in its memory alone and for matrix products alone: ceilings to compare a step with.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "devices/machine.h"
#include "lockstep/base/dtype.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::bench {

/// "f32", "bf16", "fp16"; of f32 on a GPU that multiplies it on matrix units "tf32".
std::string precision_name(Precision precision, DeviceKind kind, bool tf32);

/// Copies within the device's memory and multiplies square matrices, in a stream of its own, each with the kernels that
/// training has: for about a fifth of a second, with what memory is left. `precisions`: those of the products, which
/// the backend computes in, of f32 with TF32 as it was made (`tf32`). `threads` are the CPU's. The backend's work so
/// far is done first; its thread calls this. Throws as the kernels do.
devices::MeasuredRates measure_rates(nn::Backend& backend, const std::vector<Precision>& precisions, bool tf32,
                                     int threads);

/// Operations per second, 2 for each multiply-add of f32, of one core that does nothing else, with its widest
/// instructions: about 50 ms. Nothing where this build knows none.
std::optional<double> core_multiply_add_rate();

/// All GPUs that this process may see, and the CPU with `threads` threads, one after the other. One that fails has a
/// problem and does not fail the others.
std::vector<devices::MeasuredRates> measure_machine(int threads);

}  // namespace lockstep::bench
