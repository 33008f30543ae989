// lockstep doctor on hosts that are network namespaces, on whose cables faults are planted. Skipped where this process
// may not make namespaces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "tests/support/json.h"
#include "tests/support/namespaces.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::doctor {
namespace {

using ::testing::HasSubstr;
using testing::run_quietly;

class Network : public ::testing::Test {
 protected:
  static constexpr int kHosts = 3;

  void SetUp() override {
    if (!hosts_.why_not().empty()) GTEST_SKIP() << hosts_.why_not();
    ASSERT_TRUE(hosts_.join());
  }
  /// `command` with NS for the last host's namespace, SW for the switch's, CABLE for its cable there.
  bool plant(std::string command) const {
    const std::pair<std::string, std::string> names[] = {
        {"NS", hosts_.name(kHosts - 1)}, {"SW", hosts_.switch_name()}, {"OTHER", hosts_.name(1)}};
    for (const auto& [key, value] : names)
      for (std::size_t at; (at = command.find(key)) != std::string::npos;) command.replace(at, key.size(), value);
    return run_quietly(command);
  }
  /// What is found between the hosts, below what is all right.
  std::vector<std::string> found() const {
    std::string script;
    for (int host = kHosts - 1; host >= 0; --host)
      script += fmt::format(
          "ip netns exec {} env RANK={} WORLD_SIZE={} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR={} MASTER_PORT=29517 "
          "LOCKSTEP_HOST_NAME=host{} LOCKSTEP_JOB_SECRET=00112233445566778899aabbccddeeff {} doctor --json >{}/{} "
          "2>{}/err{} &\n",
          hosts_.name(host), host, kHosts, hosts_.address(0), host, LOCKSTEP_PROGRAM, directory_.path().string(), host,
          directory_.path().string(), host);
    std::ofstream(directory_.path() / "run.sh") << script << "wait\n";
    run_quietly("timeout 60 sh " + (directory_.path() / "run.sh").string());
    std::ifstream file(directory_.path() / "0"), error(directory_.path() / "err0");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const std::string said((std::istreambuf_iterator<char>(error)), {});
    if (!nlohmann::json::accept(text)) return {"no report: " + text + said};
    std::vector<std::string> all;
    const auto report = nlohmann::json::parse(text);
    for (const auto& finding : report["between"])
      if (finding["check"] == "links" && finding["severity"] != "ok")
        all.push_back(finding["severity"].get<std::string>() + ": " + finding["what"].get<std::string>());
    return all;
  }

  const testing::Namespaces hosts_{kHosts};
  const testing::TemporaryDirectory directory_;
};

// Rates may differ: others may use this machine.
TEST_F(Network, NoLinkFailsWhereNothingIsWrong) {
  EXPECT_THAT(found(), ::testing::Not(::testing::Contains(HasSubstr("failure"))));
  EXPECT_THAT(found(), ::testing::Not(::testing::Contains(HasSubstr("MTU of"))));
}

TEST_F(Network, ASlowLinkIsNamed) {
  ASSERT_TRUE(
      plant("tc -n NS qdisc add dev eth0 root tbf rate 50mbit burst 64k latency 50ms && "
            "tc -n SW qdisc add dev v2 root tbf rate 50mbit burst 64k latency 50ms"));
  const auto all = found();
  ASSERT_GE(all.size(), 2u);
  for (const char* const link : {"host0 to host2", "host1 to host2"})
    EXPECT_THAT(all, ::testing::Contains(::testing::AllOf(HasSubstr(link), HasSubstr("where links have"))));
}

TEST_F(Network, LossIsNamed) {
  if (!plant("tc -n NS qdisc add dev eth0 root netem loss 3%")) GTEST_SKIP() << "this kernel has no netem";
  EXPECT_THAT(found(), ::testing::Contains(::testing::AllOf(HasSubstr("host2"), HasSubstr("sent again"))));
}

TEST_F(Network, AFarHostIsNamed) {
  if (!plant("tc -n NS qdisc add dev eth0 root netem delay 5ms")) GTEST_SKIP() << "this kernel has no netem";
  EXPECT_THAT(found(), ::testing::Contains(::testing::AllOf(HasSubstr("host2"), HasSubstr("µs, where links have"))));
}

TEST_F(Network, HostsThatDoNotReachEachOtherAreNamed) {
  ASSERT_TRUE(plant("ip -n NS route add blackhole 10.80.7.2/32 && ip -n OTHER route add blackhole 10.80.7.3/32"));
  EXPECT_THAT(found(), ::testing::Contains(HasSubstr("failure: host1 to host2")));
}

TEST_F(Network, AnotherMtuIsNamed) {
  ASSERT_TRUE(plant("ip -n NS link set eth0 mtu 1280"));
  EXPECT_THAT(found(), ::testing::Contains(::testing::AllOf(HasSubstr("host2"), HasSubstr("MTU of 1280"))));
}

}  // namespace
}  // namespace lockstep::doctor
