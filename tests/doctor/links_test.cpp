// Links between ranks of one host, over its loopback.
#include "doctor/links.h"

#include <gtest/gtest.h>

#include "base/network.h"
#include "tests/support/ranks.h"

namespace lockstep::doctor {
namespace {

Exchange others() {
  comm::ProcessGroup& group = testing::group();
  return {.rank = group.rank(), .size = group.size(), .all_gather = [&](const std::string& mine) {
            return group.all_gather_text(mine);
          }};
}

TEST(Links, EveryPairIsMeasuredOnceAndKnownToAll) {
  const std::vector<NetworkInterface> interfaces = {
      {.name = "none", .address = *parse_address(loopback_address(), 0), .prefix_bits = 8, .is_up = true},
      {.name = "down", .address = *parse_address("10.255.255.1", 0), .prefix_bits = 8, .is_up = false}};
  const auto links = measure_links(others(), interfaces, "");
  const int size = testing::group().size();
  ASSERT_EQ(links.size(), static_cast<std::size_t>(size * (size - 1) / 2));
  std::vector<std::vector<int>> seen(static_cast<std::size_t>(size), std::vector<int>(static_cast<std::size_t>(size)));
  for (const Link& link : links) {
    EXPECT_LT(link.from, link.to);
    ++seen[static_cast<std::size_t>(link.from)][static_cast<std::size_t>(link.to)];
    EXPECT_FALSE(link.problem) << *link.problem;
    EXPECT_EQ(link.address, loopback_address());
    EXPECT_GT(link.latency_us, 0);
    EXPECT_GT(link.sent_bytes_per_s, 1e6);
    EXPECT_GT(link.received_bytes_per_s, 1e6);
    EXPECT_GT(link.mtu, 1000);
  }
  for (int from = 0; from < size; ++from)
    for (int to = from + 1; to < size; ++to)
      EXPECT_EQ(seen[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)], 1) << from << " " << to;
}

TEST(Links, AHostWithoutAnInterfaceIsNamed) {
  const auto links = measure_links(others(), {}, "");
  for (const Link& link : links) EXPECT_EQ(link.problem, "no interface is up there");
}

}  // namespace
}  // namespace lockstep::doctor
