#include "bench/bypass_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace lockstep::bench {
namespace {

using lockstep::testing::group;
using ::testing::Each;

TEST(BypassGroup, ForwardsOperationsUnlessBypassed) {
  BypassGroup bypass(group());
  constexpr std::size_t kCount = 1000;
  const auto arena = bypass.allocate(kCount * sizeof(float));
  const auto values = arena->view<float>(0, kCount);
  const comm::Region region{arena.get(), 0, kCount, DType::kF32};
  const auto n = static_cast<float>(group().size());
  for (int round = 0; round < 3; ++round) {
    std::ranges::fill(values, 1.0f);
    bypass.all_reduce(region, comm::ReduceOp::kSum).wait_host();
    EXPECT_THAT(values, Each(n));

    bypass.set_bypass(true);
    auto work = bypass.all_reduce(region, comm::ReduceOp::kSum);
    EXPECT_TRUE(work.done());
    bypass.poll();
    work.wait_host();
    EXPECT_THAT(values, Each(n)) << "replaced by nothing";
    bypass.set_bypass(false);
  }

  // Several at once, waited for out of order, polled for, and left to a later one.
  std::ranges::fill(values, 1.0f);
  std::vector<comm::Work> works;
  for (std::size_t part = 0; part < 4; ++part)
    works.push_back(bypass.all_reduce({arena.get(), part * 1000, 250, DType::kF32}, comm::ReduceOp::kSum));
  while (!works[1].done()) bypass.poll();
  works[3].wait_host();
  for (const auto& work : works) EXPECT_TRUE(work.done());
  EXPECT_THAT(values, Each(n));

  values[0] = static_cast<float>(group().rank());
  bypass.broadcast(region, group().size() - 1).wait_host();
  EXPECT_EQ(values[0], n - 1);
  bypass.barrier().wait_host();
}

}  // namespace
}  // namespace lockstep::bench
