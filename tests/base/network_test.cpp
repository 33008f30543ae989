#include "base/network.h"

#include <gtest/gtest.h>
#include <netinet/in.h>

#include <algorithm>

namespace lockstep {
namespace {

TEST(InterfaceFilter, NamesMatchByPrefix) {
  EXPECT_TRUE(has_interface("", "eth0"));
  EXPECT_TRUE(has_interface("eth", "eth0"));
  EXPECT_TRUE(has_interface("ib,eth", "eth1"));
  EXPECT_FALSE(has_interface("ib,eth", "enp3s0"));
  EXPECT_FALSE(has_interface("eth1", "eth"));
}

TEST(InterfaceFilter, EqualsSignMatchesExactNames) {
  EXPECT_TRUE(has_interface("=eth0,ib0", "ib0"));
  EXPECT_FALSE(has_interface("=eth0,ib0", "ib01"));
}

TEST(InterfaceFilter, CaretExcludesNames) {
  EXPECT_FALSE(has_interface("^docker,lo", "docker0"));
  EXPECT_FALSE(has_interface("^docker,lo", "lo"));
  EXPECT_TRUE(has_interface("^docker,lo", "eth0"));
  EXPECT_FALSE(has_interface("^=eth0", "eth0"));
  EXPECT_TRUE(has_interface("^=eth0", "eth01"));
}

TEST(Addresses, HaveTexts) {
  const auto one = parse_address("10.0.0.1", 29500), same = parse_address("10.0.0.1", 1);
  const auto other = parse_address("fd00::1", 29500);
  ASSERT_TRUE(one && same && other);
  EXPECT_EQ(one->text(), "10.0.0.1:29500");
  EXPECT_EQ(other->text(), "[fd00::1]:29500");
  EXPECT_EQ(other->host_text(), "fd00::1");
  EXPECT_EQ(other->port(), 29500);
  EXPECT_TRUE(one->has_host_of(*same));
  EXPECT_FALSE(*one == *same);
  EXPECT_FALSE(one->has_host_of(*other));
  EXPECT_FALSE(SocketAddress().has_host_of(SocketAddress()));
  EXPECT_FALSE(parse_address("localhost", 1));
  EXPECT_TRUE(parse_address("127.9.9.9", 1)->is_loopback());
  EXPECT_TRUE(parse_address("::1", 1)->is_loopback());
  EXPECT_FALSE(one->is_loopback() || other->is_loopback());
}

TEST(Addresses, NamesThatDoNotResolveHaveAReason) {
  const Resolved found = resolve("no-such-host.invalid", 1);
  EXPECT_TRUE(found.addresses.empty());
  EXPECT_FALSE(found.why_not.empty());
  for (const SocketAddress& address : resolve("localhost", 7).addresses) EXPECT_TRUE(address.is_loopback());
}

TEST(Addresses, OfBothEndsOfASocket) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const SocketAddress any = *parse_address("127.0.0.1", 0);
  ASSERT_EQ(::bind(listener.get(), any.get(), any.length), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  const auto where = own_address(listener);
  ASSERT_TRUE(where && where->port() > 0);
  EXPECT_FALSE(peer_address(listener));
  UniqueFd caller(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(caller.get(), where->get(), where->length), 0);
  EXPECT_TRUE(peer_address(caller) == where);
  EXPECT_FALSE(has_bytes(caller));
  EXPECT_TRUE(source_towards(*where)->has_host_of(*where));
}

TEST(Interfaces, LoopbackIsOne) {
  const auto all = list_interfaces();
  const auto found = std::ranges::find_if(
      all, [](const NetworkInterface& one) { return one.address.has_host_of(*parse_address("127.0.0.1", 0)); });
  ASSERT_NE(found, all.end());
  EXPECT_TRUE(found->is_loopback && found->is_up);
  EXPECT_EQ(found->prefix_bits, 8);
}

}  // namespace
}  // namespace lockstep
