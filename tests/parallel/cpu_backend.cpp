#include "tests/parallel/rank_backend.h"

namespace lockstep::testing {

std::unique_ptr<nn::Backend> make_rank_backend() { return nn::make_cpu_backend(1); }

}  // namespace lockstep::testing
