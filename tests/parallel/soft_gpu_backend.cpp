#include "comm/nccl/nccl_group.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/parallel/rank_backend.h"
#include "tests/support/ranks.h"

namespace lockstep::testing {
namespace {

const GroupLayer layer([](comm::ProcessGroup& control) -> std::unique_ptr<comm::ProcessGroup> {
  comm::fake_nccl::script().looks_in_progress = 1;  // as NCCL does it: no call has come to its end when it returns
  return comm::make_nccl_group(control, {.producer = rank_backend().stream()}, &comm::fake_nccl::api());
});

}  // namespace

std::unique_ptr<nn::Backend> make_rank_backend() { return nn::make_cuda_backend({}); }

}  // namespace lockstep::testing
