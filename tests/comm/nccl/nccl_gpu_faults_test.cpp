// Ranks that do not come, with NCCL itself. Every test leaves its groups broken, so each one is run in processes of its
// own: see CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/nccl/on_gpu.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

const testing::NeedsGpu needs_gpu;
// The ranks join over TCP: mpirun would end those that are still at work, or wait for words of farewell.
class NcclGpuFaults : public ::testing::Test {
 protected:
  void start(Clock::duration timeout) {
    GroupOptions options = testing::group_options();
    options.timeout_seconds = 60;
    control_ = make_group(testing::world(), options);
    // Reading NCCL from a disk, and its kernels, takes longer than a rank may be missing here.
    make_group_on_gpu(*control_, 60s)->shutdown();
    group_ = make_group_on_gpu(*control_, timeout);
    arena_ = group_->allocate(1 << 20);
    // So that all connections are there.
    for (int i = 0; i < 2; ++i) all_reduce().wait_host();
  }

  bool is_last() const { return control_->rank() == control_->size() - 1; }
  Work all_reduce() { return group_->all_reduce({arena_.get(), 0, 1 << 18, DType::kF32}, ReduceOp::kSum); }

  template <class E, class Action>
  std::string broken_by(Action&& action) {
    try {
      action();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const E& error) {
      EXPECT_THROW(group_->poll(), E);
      return error.what();
    }
    return {};
  }

  std::unique_ptr<ProcessGroup> control_;
  std::unique_ptr<DeviceGroup> group_;
  std::unique_ptr<Arena> arena_;
};

TEST_F(NcclGpuFaults, ARankThatNeverComes) {
  start(3s);
  if (is_last()) {
    std::this_thread::sleep_for(8s);
    return;
  }
  group_->set_step(9);
  const std::string what = broken_by<TimeoutError>([&] {
    const Work work = all_reduce();
    work.wait(producer_on_gpu().view());
    work.wait_host();
  });
  EXPECT_THAT(what, AllOf(StartsWith("allreduce #3 (sum of 262144 f32 at byte 0, step 9) timed out after "),
                          HasSubstr(fmt::format("rank {} (host ", control_->size() - 1))));
  // The abort has let go of the stream.
  producer_on_gpu().synchronize();
  const auto begin = Clock::now();
  group_.reset();
  EXPECT_LT(Clock::now() - begin, 9s);
}

TEST_F(NcclGpuFaults, ARankThatDies) {
  start(60s);
  control_->barrier().wait_host();  // nobody is at the end of the last operation still
  if (is_last()) ::_exit(0);
  const auto begin = Clock::now();
  const std::string what = broken_by<Error>([&] { all_reduce().wait_host(); });
  EXPECT_LT(Clock::now() - begin, 30s);
  EXPECT_THAT(what, HasSubstr("allreduce #3 "));
  std::this_thread::sleep_for(1s);
}

// An abort waits for graphs that hold operations, and must not keep anybody from letting go of them.
TEST_F(NcclGpuFaults, ARankThatDoesNotLaunch) {
  start(3s);
  group_->begin_capture();
  check_cuda(cudaStreamBeginCapture(producer_on_gpu().get(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
  all_reduce().wait(producer_on_gpu().view());
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(producer_on_gpu().get(), &graph), "ending a capture");
  ASSERT_EQ(group_->end_capture(), 1u);
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "making a graph");
  check_cuda(cudaGraphDestroy(graph), "letting go of a graph");
  if (is_last()) {
    std::this_thread::sleep_for(8s);
  } else {
    group_->set_step(9);
    check_cuda(cudaGraphLaunch(executable, producer_on_gpu().get()), "launching a graph");
    group_->replayed(1);
    const std::string what = broken_by<TimeoutError>([&] {
      for (;;) group_->poll();
    });
    EXPECT_THAT(what, StartsWith("allreduce #3 (sum of 262144 f32 at byte 0, step 9) timed out after "));
    producer_on_gpu().synchronize();
  }
  check_cuda(cudaGraphExecDestroy(executable), "letting go of a graph");
  const auto begin = Clock::now();
  group_.reset();
  EXPECT_LT(Clock::now() - begin, 9s);
}

}  // namespace
}  // namespace lockstep::comm
