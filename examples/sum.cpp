// Collectives alone: every rank contributes a vector, and all of them get the sum.
#include <lockstep/comm.h>

#include <cstdio>
#include <vector>

void sum() {
  const auto group = lockstep::comm::make_group();
  std::vector<float> values(1000, static_cast<float>(group->rank() + 1));
  group->all_reduce(std::span(values));
  if (group->rank() == 0) std::printf("%d ranks: %g\n", group->size(), double{values[0]});
  group->shutdown();
}

int main() { return lockstep::run_main(sum); }
