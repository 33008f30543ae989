// More than one group in a process, where the ranks join over TCP. Each test has processes of its own: see
// CMakeLists.txt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

std::unique_ptr<ProcessGroup> make() {
  GroupOptions options = testing::group_options();
  options.timeout_seconds = 10;
  return make_group(testing::world(), options);
}

void expect_that_it_sums(ProcessGroup& group) {
  const auto numbers = group.all_gather_numbers(group.rank());
  for (int rank = 0; rank < group.size(); ++rank) EXPECT_EQ(numbers[static_cast<std::size_t>(rank)], rank);
}

TEST(MoreGroups, OneAfterTheOther) {
  for (int i = 0; i < 5; ++i) {
    const auto group = make();
    expect_that_it_sums(*group);
    group->shutdown();
  }
}

// The first group holds the port of the rendezvous. It still works.
TEST(MoreGroups, NoSecondOneAtATime) {
  const auto first = make();
  expect_that_it_sums(*first);
  EXPECT_THROW(make(), Error);
  expect_that_it_sums(*first);
  first->shutdown();
}

}  // namespace
}  // namespace lockstep::comm
