#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace lockstep::comm {
TEST(Collectives, Sum) {
  auto& g = testing::group();
  auto arena = g.allocate(4096);
  auto v = arena->view<float>(0, 100);
  for (auto& x : v) x = static_cast<float>(g.rank() + 1);
  g.all_reduce({arena.get(), 0, 100, DType::kF32}, ReduceOp::kSum).wait_host();
  EXPECT_EQ(v[99], static_cast<float>(g.size() * (g.size() + 1) / 2));
  EXPECT_EQ(g.all_gather_text(fmt::format("r{}", g.rank())).back(), fmt::format("r{}", g.size() - 1));
}
}  // namespace lockstep::comm
