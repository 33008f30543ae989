// What is said of hosts that differ, and of links.
#include "doctor/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "doctor/doctor.h"
#include "tests/support/json.h"

namespace lockstep::doctor {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kHosts = {"a", "b", "c"};

std::vector<HostFacts> equal_hosts() {
  std::vector<HostFacts> hosts;
  for (const auto& name : kHosts)
    hosts.push_back(
        {.host = name, .facts = {{"lockstep", "0.3.0", true}, {"instructions", "avx2", true}, {"CPU", "X"}}});
  return hosts;
}

std::string text(const std::vector<Finding>& findings) {
  std::string all;
  for (const Finding& finding : findings)
    if (finding.severity >= Severity::kWarning)
      all += std::string(name_of(finding.severity)) + ": " + finding.what + " → " + finding.remedy + "\n";
  return all;
}

TEST(DoctorHosts, EqualOnesAreFine) { EXPECT_EQ(text(compare_hosts(equal_hosts())), ""); }

TEST(DoctorHosts, NamesTheOneThatDiffers) {
  auto hosts = equal_hosts();
  hosts[0].facts[0].value = "0.2.0";
  EXPECT_THAT(text(compare_hosts(hosts)), HasSubstr("failure: lockstep: a has 0.2.0, where the others have 0.3.0"));
  hosts = equal_hosts();
  hosts[2].facts[1].value = "avx512";
  EXPECT_THAT(text(compare_hosts(hosts)), HasSubstr("failure: instructions: c has avx512, where the others have avx2"));
  hosts = equal_hosts();
  hosts[1].facts[2].value = "Y";
  EXPECT_THAT(text(compare_hosts(hosts)), HasSubstr("warning: CPU: b has Y, where the others have X"));
  hosts = equal_hosts();
  hosts[1].clock_offset_s = -90;
  EXPECT_THAT(text(compare_hosts(hosts)), HasSubstr("warning: the clock of b is 90.0 s before that of a"));
  hosts[1].clock_error_s = 100;  // nobody knows
  EXPECT_EQ(text(compare_hosts(hosts)), "");
}

std::vector<Link> equal_links() {
  std::vector<Link> links;
  for (const auto& [from, to] : {std::pair{0, 1}, {0, 2}, {1, 2}})
    links.push_back({.from = from,
                     .to = to,
                     .address = "10.0.0." + std::to_string(to + 1),
                     .latency_us = 30,
                     .sent_bytes_per_s = 1.17e9,
                     .received_bytes_per_s = 1.17e9,
                     .mtu = 9000,
                     .interface_mbit_s = 10'000});
  return links;
}

std::string with(const std::function<void(Link&)>& change) {
  auto links = equal_links();
  change(links[1]);
  return text(check_links(links, kHosts));
}

TEST(DoctorLinks, NamesTheOneThatIsWrong) {
  EXPECT_EQ(with([](Link&) {}), "");
  EXPECT_THAT(with([](Link& l) { l.problem = "Connection refused"; }),
              HasSubstr("failure: a to c (10.0.0.3): Connection refused → open all ports"));
  EXPECT_THAT(with([](Link& l) { l.sent_bytes_per_s = l.received_bytes_per_s = 0.117e9; }),
              HasSubstr("a to c (10.0.0.3): 0.94 Gbit/s, where links have 9.36 Gbit/s"));
  EXPECT_THAT(with([](Link& l) { l.latency_us = 2000; }), HasSubstr("2000 µs, where links have 30"));
  EXPECT_THAT(with([](Link& l) { l.retransmitted = 0.02; }), HasSubstr("2.0 % of the segments were sent again"));
  EXPECT_THAT(with([](Link& l) { l.mtu = 1500; }), HasSubstr("an MTU of 1500, where links have 9000"));
  EXPECT_EQ(with([](Link& l) { l.latency_us = 60; }), "") << "microseconds between racks";
}

// Two hosts have one link, with which nothing can be compared but their interfaces and its other direction.
TEST(DoctorLinks, OneLinkIsComparedWithItsInterfaces) {
  Link link = equal_links().front();
  link.sent_bytes_per_s = link.received_bytes_per_s = 0.117e9;
  EXPECT_THAT(text(check_links({&link, 1}, kHosts)), HasSubstr("0.94 Gbit/s over interfaces of 10 Gbit/s"));
  link.received_bytes_per_s = 1.17e9;
  EXPECT_THAT(text(check_links({&link, 1}, kHosts)), HasSubstr("0.94 Gbit/s one way, 9.36 the other way"));
}

TEST(DoctorReport, AsTextAndJson) {
  Report report;
  for (const auto& host : kHosts) report.hosts.push_back({host, {{"memory", Severity::kOk, "memory: 8 GB free"}}});
  report.hosts[1].findings.push_back({"disk", Severity::kFailure, "no space", "remove something"});
  report.links = equal_links();
  report.between = check_links(report.links, kHosts);
  const std::string plain = text_of(report, false), all = text_of(report, true);
  for (const char* words :
       {"host b\n  FAIL disk           no space → remove something\n", "9.36 Gb/s", "30 µs", "1 failure, 0 warnings\n"})
    EXPECT_THAT(plain, HasSubstr(words));
  EXPECT_THAT(plain, ::testing::Not(HasSubstr("8 GB free")));
  EXPECT_THAT(all, HasSubstr("  ok   memory         memory: 8 GB free\n"));
  const auto json = testing::json_in(json_of(report));
  EXPECT_EQ(json["failures"], 1);
  EXPECT_EQ(json["hosts"][1]["findings"][1]["remedy"], "remove something");
  EXPECT_EQ(json["links"].size(), 3u);
  EXPECT_EQ(json["links"][0]["mtu"], 9000);
}

}  // namespace
}  // namespace lockstep::doctor
