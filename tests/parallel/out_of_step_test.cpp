// Loops over DistributedDataParallel that do not run the same steps on every rank. Every test leaves its group broken,
// so each one is run in processes of its own: see CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/comm/make_group.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "tests/support/ranks.h"

namespace lockstep::parallel {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OutOfStepLoops : public ::testing::Test {
 protected:
  OutOfStepLoops() {
    comm::GroupOptions options = testing::group_options();
    options.timeout_seconds = 30;
    group_ = comm::make_group(testing::world(), options);
    ddp_.emplace(layer_, *group_);
  }

  bool is_last() const { return group_->rank() == group_->size() - 1; }

  void run() {
    const nn::Var y = (*ddp_)(tape_, tape_.input(backend_->empty({2, 4})));
    tape_.backward(nn::cross_entropy(tape_, y, backend_->from_host(labels_.data(), {2}, DType::kI32), 1.0f).value);
    tape_.reset();
  }

  std::string error_of(const std::function<void()>& loop) {
    try {
      loop();
      group_->shutdown();
    } catch (const OutOfStepError& error) {
      return error.what();
    }
    return "nobody has seen it";
  }

  std::unique_ptr<nn::Backend> backend_ = nn::make_cpu_backend(1);
  nn::Generator generator_{1};
  nn::Context context_{*backend_, generator_};
  nn::Linear layer_{context_, 4, 3};
  nn::Tape tape_{*backend_};
  std::array<std::int32_t, 2> labels_ = {0, 1};
  std::unique_ptr<comm::ProcessGroup> group_;
  std::optional<DistributedDataParallel> ddp_;
};

TEST_F(OutOfStepLoops, AStepLeftOutOfALoopThatCounts) {
  std::int64_t reached = 0;
  const std::string what = error_of([&] {
    for (std::int64_t step = 1; step <= 100; ++step) {
      if (step == 5 && is_last()) continue;
      ddp_->set_step(reached = step);
      run();
    }
  });
  EXPECT_LE(reached, 6);
  EXPECT_THAT(what, AllOf(HasSubstr("step 5, bucket 0"), HasSubstr("step 6, bucket 0")));
}

// Without numbers the ranks' loops look alike, up to the end.
TEST_F(OutOfStepLoops, AStepLeftOutOfALoopThatDoesNot) {
  const std::string what = error_of([&] {
    for (int step = 1; step <= 10; ++step)
      if (step != 5 || !is_last()) run();
  });
  EXPECT_THAT(what, AllOf(HasSubstr("step 10, bucket 0"), HasSubstr("in barrier #")));
}

}  // namespace
}  // namespace lockstep::parallel
