// train() itself, in a world of one: tests/trainer/steady_state_test.cpp looks at the steps that it is made of.
#include "lockstep/trainer/train.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/allocations.h"

namespace lockstep::trainer {
namespace {

using lockstep::testing::AllocationCounter;
using lockstep::testing::listed;
using lockstep::testing::without;

// The trainer's own loop, seen from outside: twenty steps more of an epoch cost not twenty allocations more anywhere. A
// few may differ: numbers in messages are longer or shorter.
TEST(TrainerSteadyLoop, AllocatesNothingMoreInLongerRuns) {
  std::map<std::string, long> seen[2];
  for (const int steps : {0, 20, 40}) {  // the first for what is made once in a process
    TrainConfig config;
    config.model.name = "mlp";
    config.model.settings = {{"hidden", {64}}};
    config.data = "random:1x8x8,4096";
    config.steps = std::max(1, steps);
    config.quiet = true;
    config.log_level = "warn";
    AllocationCounter counter;
    ASSERT_EQ(train(config), 0);
    if (steps > 0) seen[steps / 20 - 1] = without(counter.by_caller(), {"libdnnl.", "libgomp."});
  }
  std::map<std::string, long> more;
  for (const auto& [caller, times] : seen[1])
    if (times >= seen[0][caller] + 5) more[caller] = times - seen[0][caller];
  EXPECT_TRUE(more.empty()) << listed(more);
}

}  // namespace
}  // namespace lockstep::trainer
