#include <cstdio>
#include <optional>
#include <string>

#include "support.h"

namespace adapter {
namespace {
std::unique_ptr<lockstep::comm::ProcessGroup> g_group;

// A rank that leaves out a step: it ends the job, so no test of the program below may do it.
void leave_out_a_step() {
  const auto net = two_layers();
  DistributedDataParallel ddp(net, *g_group);
  for (int step = 1; step <= 4; ++step) {
    if (rank() == 1 && step == 2) continue;
    ddp.set_step(step);
    loss_of(ddp(own_samples())).backward();
  }
}
}  // namespace

lockstep::comm::ProcessGroup& group() { return *g_group; }

}  // namespace adapter

int main(int count, char** words) {
  ::testing::InitGoogleTest(&count, words);
  torch::set_num_threads(1);
  return lockstep::run_main([&]() -> int {
    adapter::g_group = lockstep::comm::make_group({.timeout_seconds = 60});
    auto& group = *adapter::g_group;
    if (count > 1 && std::string(words[1]) == "step") {
      adapter::leave_out_a_step();
      return 0;
    }
    if (group.rank() != 0) ::testing::FLAGS_gtest_brief = true;
    const bool passed = RUN_ALL_TESTS() == 0;
    std::vector<float> failures = {passed ? 0.0f : 1.0f};
    group.all_reduce(std::span(failures));
    if (group.rank() == 0) std::printf("over %s\n", group.name().c_str());
    group.shutdown();
    return failures[0] == 0 ? 0 : 1;
  });
}
