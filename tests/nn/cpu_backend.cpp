// The gradient check, and tests of inference, on the CPU.
#include "tests/nn/gradient_backend.h"

namespace lockstep::nn::testing {

std::unique_ptr<Backend> make_gradient_backend() { return make_cpu_backend(1); }

}  // namespace lockstep::nn::testing
