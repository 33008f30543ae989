#include "launcher/hosts/greeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/hosts/local_addresses.h"

namespace lockstep::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Greeting, ALineAndBack) {
  Greeting greeting = own_greeting(3);
  EXPECT_EQ(greeting.sha256.size(), 64u);
  EXPECT_GE(greeting.cores, 1);
  greeting.host = "a b%=\n\xc3\xa9";
  greeting.reached_at = "10.0.0.1";
  greeting.reached_from = "fe80::1";
  const std::string line = to_line(greeting);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto back = parse_greeting(line);
  ASSERT_TRUE(back);
  EXPECT_EQ(to_line(*back), line);
  EXPECT_EQ(back->host, greeting.host);
  EXPECT_EQ(back->gpus, 3);
  EXPECT_EQ(back->interfaces, greeting.interfaces);
}

TEST(Greeting, AfterWhatALoginShellPrints) {
  EXPECT_TRUE(parse_greeting("\x1b[1mWelcome!\x1b[0m " + to_line(Greeting{}) + "\r"));
  EXPECT_FALSE(parse_greeting("Welcome!"));
  EXPECT_FALSE(parse_greeting(""));
  EXPECT_FALSE(parse_greeting("lockstep-host 2 version=9"));
  const auto nonsense = parse_greeting("lockstep-host 1 cores=-7 gpus=x interfaces=// =x version sha256=%zz%4");
  ASSERT_TRUE(nonsense);
  EXPECT_EQ(nonsense->cores, 1);
  EXPECT_EQ(nonsense->sha256, "%zz%4");
}

TEST(Greeting, BuildsThatDiffer) {
  const Greeting ours = own_greeting(0);
  EXPECT_EQ(difference(ours, ours), "");
  Greeting theirs = ours;
  theirs.sha256 = "0123456789abcdef";
  EXPECT_THAT(difference(theirs, ours), AllOf(HasSubstr("binary 0123456789ab)"), HasSubstr(ours.sha256.substr(0, 12))));
  theirs = ours;
  theirs.version = "9.9.9";
  EXPECT_THAT(difference(theirs, ours), HasSubstr("it has lockstep 9.9.9"));
}

TEST(LocalAddresses, IncludeHostNameAndInterfaces) {
  const std::vector<std::string> names = {"localhost", system_name(), "127.0.0.1", "no.such.host.invalid",
                                          "192.0.2.254"};
  const auto own = local_addresses(names, Deadline::after_seconds(20));
  EXPECT_TRUE(own[0]);
  EXPECT_TRUE(own[1]);
  EXPECT_TRUE(own[2]);
  EXPECT_FALSE(own[3]);
  EXPECT_FALSE(own[4]);
}

TEST(LocalAddresses, UnresolvedNameIsAnotherHost) {
  const std::vector<std::string> names = {"no.such.host.invalid"};
  EXPECT_FALSE(local_addresses(names, Deadline::after(Millis(0)))[0]);
}

}  // namespace
}  // namespace lockstep::launcher
