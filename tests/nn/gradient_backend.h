// Where gradient_test.cpp computes.
#pragma once

#include <memory>

#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn::testing {

/// Defined once in each program that has gradient_test.cpp in it.
std::unique_ptr<Backend> make_gradient_backend();

}  // namespace lockstep::nn::testing
