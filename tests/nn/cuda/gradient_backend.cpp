// The gradient check on a GPU, in f32 without TF32, which is too coarse for differences.
#include "tests/nn/gradient_backend.h"

namespace lockstep::nn::testing {

std::unique_ptr<Backend> make_gradient_backend() { return make_cuda_backend({}); }

}  // namespace lockstep::nn::testing
