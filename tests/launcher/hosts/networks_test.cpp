#include "launcher/hosts/networks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/hosts/gather.h"

namespace lockstep::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Interfaces, TextAndBack) {
  const std::string text = "eth0/10.0.0.1/24,ib0/192.168.7.9/16";
  const auto interfaces = parse_interfaces(text);
  ASSERT_EQ(interfaces.size(), 2u);
  EXPECT_EQ(interfaces[0].network_text(), "10.0.0.0/24");
  EXPECT_EQ(interfaces[1].network_text(), "192.168.0.0/16");
  EXPECT_EQ(interfaces_text(interfaces), text);
  EXPECT_THAT(parse_interfaces("eth0/10.0.0.1,x,eth1/1.2.3/8,eth2/1.2.3.4/33,"), IsEmpty());
  EXPECT_EQ(interfaces_text(parse_interfaces(interfaces_text(read_interfaces()))), interfaces_text(read_interfaces()));
}

std::vector<std::vector<Interface>> hosts(std::initializer_list<const char*> texts) {
  std::vector<std::vector<Interface>> all;
  for (const char* text : texts) all.push_back(parse_interfaces(text));
  return all;
}

TEST(Networks, SharedNetworksAndThoseThatOnlyLookShared) {
  const auto networks = compare_networks(hosts({"eth0/10.0.0.1/24,docker0/172.17.0.1/16,ib0/10.1.0.1/16",
                                                "docker0/172.17.0.1/16,ib0/10.1.0.2/16,eth5/10.0.0.2/24",
                                                "eth0/10.0.0.3/24,ib0/10.1.0.3/16,wan/80.1.2.3/24"}));
  EXPECT_THAT(networks.common, ElementsAre("10.0.0.0/24", "10.1.0.0/16"));
  EXPECT_THAT(networks.ambiguous, ElementsAre("172.17.0.0/16"));
}

TEST(Networks, RoutedHostsShareNone) {
  const auto networks = compare_networks(hosts({"eth0/10.244.1.7/32", "eth0/10.244.2.9/32", "eth0/10.0.3.1/24"}));
  EXPECT_THAT(networks.common, IsEmpty());
  EXPECT_THAT(networks.ambiguous, IsEmpty());
}

Greeting host_with(const char* interfaces, const char* at = "", const char* from = "") {
  Greeting greeting;
  greeting.interfaces = parse_interfaces(interfaces);
  greeting.reached_at = at;
  greeting.reached_from = from;
  return greeting;
}

TEST(RendezvousAddress, IsInTheNetworkThatAllRanksShare) {
  SeveralHosts several;
  const auto own = host_with("eth0/10.0.0.9/24,docker0/172.17.0.1/16");
  choose_networks({host_with("docker0/172.17.0.1/16,eth0/10.0.0.1/24"), host_with("eth0/10.0.0.2/24")}, own, "",
                  several);
  EXPECT_EQ(several.address, "10.0.0.1");
  EXPECT_EQ(several.networks, "10.0.0.0/24");
}

TEST(RendezvousAddress, FollowsTheUsersChoiceOfInterfaces) {
  SeveralHosts several;
  const auto one = host_with("eth0/10.0.0.1/24,ib0/10.1.0.1/16");
  choose_networks({one, host_with("eth0/10.0.0.2/24,ib0/10.1.0.2/16")}, one, "ib", several);
  EXPECT_EQ(several.address, "10.1.0.1");
  EXPECT_EQ(several.networks, "10.1.0.0/16");
}

TEST(RendezvousAddress, FallsBackToTheAddressThatSshReached) {
  SeveralHosts several;
  const auto own = host_with("eth0/10.0.3.1/24");
  choose_networks({host_with("eth0/10.244.1.7/32", "10.244.1.7", "10.0.3.1"), host_with("eth0/10.244.2.9/32")}, own, "",
                  several);
  EXPECT_EQ(several.address, "10.244.1.7");
  EXPECT_EQ(several.networks, "");
  // The first host is the launcher's: where the others see it.
  choose_networks({own, host_with("eth0/10.244.2.9/32", "10.244.2.9", "10.0.3.1")}, own, "", several);
  EXPECT_EQ(several.address, "10.0.3.1");
}

TEST(RendezvousAddress, NetworksThatOnlyLookSharedAreLeftOutWhereOthersRemain) {
  SeveralHosts several;
  const auto own = host_with("eth0/10.0.1.1/24,docker0/172.17.0.1/16");
  choose_networks({own, host_with("eth0/10.0.2.1/24,docker0/172.17.0.1/16", "10.0.2.1", "10.0.1.1")}, own, "", several);
  EXPECT_EQ(several.not_networks, "172.17.0.0/16");
  SeveralHosts alone;
  const auto same = host_with("eth0/10.0.0.1/24");
  choose_networks({same, same}, same, "", alone);
  EXPECT_EQ(alone.not_networks, "");
  EXPECT_EQ(alone.address, "10.0.0.1");
}

}  // namespace
}  // namespace lockstep::launcher
