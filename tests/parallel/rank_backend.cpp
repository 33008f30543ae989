#include "tests/parallel/rank_backend.h"

namespace lockstep::testing {

nn::Backend& rank_backend() {
  static nn::Backend* const backend = make_rank_backend().release();
  return *backend;
}

}  // namespace lockstep::testing
