#include "comm/nccl/nccl_group.h"
#include "lockstep/base/device.h"
#include "tests/parallel/rank_backend.h"
#include "tests/support/ranks.h"

namespace lockstep::testing {
namespace {

const NeedsGpu needs_gpu;

// Where there are fewer GPUs than ranks, several ranks are on one.
int device() { return world().rank % probe_cuda().devices; }

const GroupLayer layer([](comm::ProcessGroup& control) -> std::unique_ptr<comm::ProcessGroup> {
  nn::Backend& backend = rank_backend();
  return comm::make_nccl_group(control, {.device = device(), .producer = backend.stream()});
});

}  // namespace

std::unique_ptr<nn::Backend> make_rank_backend() { return nn::make_cuda_backend({.device = device()}); }

}  // namespace lockstep::testing
