// Makes the group of a test on several ranks one over the software NCCL: its arenas are memory of the soft device,
// which the host may touch too.
#include "comm/nccl/nccl_group.h"

#include "base/cuda/runtime.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

std::unique_ptr<ProcessGroup> make_over_nccl(ProcessGroup& control) {
  static const CudaStream producer;
  return make_nccl_group(control, {.producer = producer.view()}, &fake_nccl::api());
}

const testing::GroupLayer layer(make_over_nccl);

}  // namespace
}  // namespace lockstep::comm
