// NCCL fails on a rank during the capture of a step.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ranges>
#include <string>

#include "tests/trainer/nccl_training.h"

namespace lockstep::trainer {
namespace {

using testing::group;
using ::testing::HasSubstr;

// Its error names what to do without. The others end when its process does. `calls` of it succeed in the capture
// before.
void fail_in_capture(int calls) {
  const bool last = group().rank() + 1 == group().size();
  NcclTraining training({});
  training.run(6);  // the seventh is captured
  ASSERT_EQ(training.graphs().replayed(), 0);
  const auto before = comm::fake_nccl::calls().size();
  if (last) {
    comm::fake_nccl::script().call = ncclInternalError;
    comm::fake_nccl::script().calls_before = calls;
  }
  const auto begin = Clock::now();
  try {
    training.run(1);
    ADD_FAILURE() << "nobody has seen it";
  } catch (const NcclError& error) {
    EXPECT_TRUE(last) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("while a step was captured as a CUDA graph"));
    EXPECT_THAT(error.remedy(), HasSubstr("--graphs no"));
  } catch (const Error& error) {
    EXPECT_FALSE(last) << error.what();
  }
  EXPECT_LT(Clock::now() - begin, kPatience);
  if (last) {
    EXPECT_EQ(std::ranges::count_if(comm::fake_nccl::calls() | std::views::drop(before),
                                    [](const std::string& call) { return call.starts_with("allreduce"); }),
              calls + 1);
  }
  std::fflush(nullptr);
  _exit(::testing::Test::HasFailure() ? 1 : 0);
}

TEST(NcclCaptureFault, AnErrorEndsAllRanks) { fail_in_capture(0); }
TEST(NcclCaptureFault, AnErrorInTheMiddleEndsAllRanks) { fail_in_capture(1); }

}  // namespace
}  // namespace lockstep::trainer
