// NCCL fails on a rank during the capture of a step.
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdio>

#include "tests/trainer/nccl_training.h"

namespace lockstep::trainer {
namespace {

using testing::group;
using ::testing::HasSubstr;

// Its error names what to do without. The others end when its process does.
TEST(NcclCaptureFault, AnErrorEndsAllRanks) {
  const bool last = group().rank() + 1 == group().size();
  NcclTraining training({});
  training.run(6);  // the seventh is captured
  ASSERT_EQ(training.recorded().replayed(), 0);
  if (last) comm::fake_nccl::script().call = ncclInternalError;
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
  std::fflush(nullptr);
  _exit(HasFailure() ? 1 : 0);
}

}  // namespace
}  // namespace lockstep::trainer
