// A module as ranks compare it before they train it together.
#pragma once

#include "comm/agree.h"
#include "nn/layers/module.h"

namespace lockstep::trainer {

/// How many parameters and buffers there are; then each one's place, name, dtype and shape, and of a parameter whether
/// it is trained. Differences are told in the order of the keys: parameters in front of buffers ("state").
comm::Manifest manifest_of(const nn::Module& module);

}  // namespace lockstep::trainer
