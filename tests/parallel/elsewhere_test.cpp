// Where ranks sum over NCCL, a module that is still on the CPU.
#include <gmock/gmock.h>

#include "base/error.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/parallel/rank_backend.h"
#include "tests/support/ranks.h"

namespace lockstep::parallel {
namespace {

using testing::group;

TEST(DistributedRefuses, AModuleThatIsNotOnTheRanksDevice) {
  const auto cpu = nn::make_cpu_backend(1);
  nn::Generator generator(1);
  nn::Context context{*cpu, generator};
  nn::Linear module(context, 3, 2);
  try {
    DistributedDataParallel ddp(module, group());
    FAIL() << "it was taken";
  } catch (const Error& error) {
    EXPECT_THAT(error.line(), ::testing::HasSubstr(fmt::format("the module is on cpu, and this rank's device is {}",
                                                               to_string(group().device()))));
  }
}

}  // namespace
}  // namespace lockstep::parallel
