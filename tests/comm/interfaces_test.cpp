// At which addresses a host can be reached.
#include "comm/hosts/peer_connector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/error.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using ::testing::HasSubstr;

EnvLookup with(const std::string& filter) {
  return [filter](const std::string& name) {
    return name == "LOCKSTEP_SOCKET_IFNAME" ? std::optional(filter) : std::nullopt;
  };
}
const EnvLookup kNothing = [](const std::string&) { return std::nullopt; };

TEST(Interfaces, ChosenInterfaceGivesTheAddresses) {
  const auto addresses = usable_addresses(with("lo"), "");
  ASSERT_FALSE(addresses.empty());
  for (const auto& address : addresses) EXPECT_EQ(address.name, "lo");
  EXPECT_EQ(addresses[0].address.host_text(), "127.0.0.1");
}

TEST(Interfaces, MissingInterfaceIsAUsageError) {
  const auto error = testing::thrown<UsageError>([&] { usable_addresses(with("nosuch"), ""); });
  EXPECT_THAT(error.what(), HasSubstr("LOCKSTEP_SOCKET_IFNAME=\"nosuch\" names no interface"));
  EXPECT_THAT(error.remedy(), HasSubstr("lo"));
}

TEST(Interfaces, RouteToTheRendezvousComesFirst) {
  EXPECT_EQ(usable_addresses(kNothing, "127.0.0.1").at(0).address.host_text(), "127.0.0.1");
  // A name that does not resolve is no reason to fail: the other ranks have joined there.
  EXPECT_FALSE(usable_addresses(kNothing, "no-such-host.invalid").empty());
}

TEST(Interfaces, LoopbackIsTheLastResort) {
  const auto addresses = usable_addresses(kNothing, "");
  ASSERT_FALSE(addresses.empty());
  if (addresses.size() == 1) return;
  for (const auto& address : addresses) EXPECT_NE(address.name, "lo");
}

}  // namespace
}  // namespace lockstep::comm
