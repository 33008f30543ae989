// At which addresses a host can be reached.
#include "comm/hosts/peer_connector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/error.h"

namespace lockstep::comm {
namespace {

using ::testing::HasSubstr;

EnvLookup with(const std::string& filter) {
  return [filter](const std::string& name) {
    return name == "LOCKSTEP_SOCKET_IFNAME" ? std::optional(filter) : std::nullopt;
  };
}
const EnvLookup kNothing = [](const std::string&) { return std::nullopt; };

TEST(Interfaces, NamesMatchByPrefix) {
  EXPECT_TRUE(has_interface("eth", "eth0"));
  EXPECT_TRUE(has_interface("ib,eth", "eth1"));
  EXPECT_FALSE(has_interface("ib,eth", "enp3s0"));
  EXPECT_FALSE(has_interface("eth1", "eth"));
}

TEST(Interfaces, EqualsSignMatchesExactNames) {
  EXPECT_TRUE(has_interface("=eth0,ib0", "ib0"));
  EXPECT_FALSE(has_interface("=eth0,ib0", "ib01"));
}

TEST(Interfaces, CaretExcludesNames) {
  EXPECT_FALSE(has_interface("^docker,lo", "docker0"));
  EXPECT_FALSE(has_interface("^docker,lo", "lo"));
  EXPECT_TRUE(has_interface("^docker,lo", "eth0"));
  EXPECT_FALSE(has_interface("^=eth0", "eth0"));
  EXPECT_TRUE(has_interface("^=eth0", "eth01"));
}

TEST(Interfaces, ChosenInterfaceGivesTheAddresses) {
  const auto addresses = usable_addresses(with("lo"), "");
  ASSERT_FALSE(addresses.empty());
  for (const auto& address : addresses) EXPECT_EQ(address.interface, "lo");
  EXPECT_EQ(addresses[0].text(), "127.0.0.1");
}

TEST(Interfaces, MissingInterfaceIsAUsageError) {
  try {
    usable_addresses(with("nosuch"), "");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("LOCKSTEP_SOCKET_IFNAME=\"nosuch\" names no interface"));
    EXPECT_THAT(error.remedy(), HasSubstr("lo"));
  }
}

TEST(Interfaces, RouteToTheRendezvousComesFirst) {
  EXPECT_EQ(usable_addresses(kNothing, "127.0.0.1").at(0).text(), "127.0.0.1");
  // A name that does not resolve is no reason to fail: the other ranks have joined there.
  EXPECT_FALSE(usable_addresses(kNothing, "no-such-host.invalid").empty());
}

TEST(Interfaces, LoopbackIsTheLastResort) {
  const auto addresses = usable_addresses(kNothing, "");
  ASSERT_FALSE(addresses.empty());
  if (addresses.size() == 1) return;
  for (const auto& address : addresses) EXPECT_NE(address.interface, "lo");
}

}  // namespace
}  // namespace lockstep::comm
