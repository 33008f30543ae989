#include "launcher/hosts/host_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>

#include "base/error.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class Function>
std::string complaint(const Function& function) {
  try {
    function();
  } catch (const UsageError& error) {
    return error.line();
  }
  return "no complaint";
}

std::vector<HostSpec> file(const std::string& text) { return parse_hostfile(text, "hosts.txt"); }

TEST(HostList, OnTheCommandLine) {
  EXPECT_THAT(parse_hosts("a:4,b:2"), ElementsAre(HostSpec{"a", "", 4}, HostSpec{"b", "", 2}));
  EXPECT_THAT(parse_hosts("a"), ElementsAre(HostSpec{"a", "", 0}));
  EXPECT_THAT(parse_hosts(" eve@node-1.example.org:1 , 10.0.0.2:3"),
              ElementsAre(HostSpec{"node-1.example.org", "eve", 1}, HostSpec{"10.0.0.2", "", 3}));
  EXPECT_THAT(parse_hosts("[fe80::1%eth0]:2,[::1]"),
              ElementsAre(HostSpec{"fe80::1%eth0", "", 2}, HostSpec{"::1", "", 0}));
  EXPECT_EQ(parse_hosts("eve@a:1")[0].target(), "eve@a");
}

TEST(HostList, AHostThatIsNamedAgainAddsUp) {
  EXPECT_THAT(parse_hosts("a:4,b:1,a:2"), ElementsAre(HostSpec{"a", "", 6}, HostSpec{"b", "", 1}));
  EXPECT_THAT(parse_hosts("a,a,a"), ElementsAre(HostSpec{"a", "", 3}));
  EXPECT_THAT(parse_hosts("a,a:4"), ElementsAre(HostSpec{"a", "", 5}));
}

TEST(HostList, MistakesOnTheCommandLine) {
  for (const char* list :
       {"a:x",  "a:0",    "a:-1",        "a:4097",        "a:1:2",      "a:",        ":4",    "",   ",",
        "a,,b", "a,",     "-oProxy=x:1", "a b:1",         "a;reboot",   "$(reboot)", "a@b@c", "@a", "eve@",
        "[::1", "[::1]x", "a:1,eve@a:1", "a:4000,b:4000", "\xc3\xa9:1", "a\n:1"}) {
    const auto line = complaint([&] { parse_hosts(list); });
    EXPECT_THAT(line, AllOf(HasSubstr("--hosts: "), HasSubstr("→"))) << list;
    EXPECT_EQ(line.find('\n'), std::string::npos) << list;
  }
  EXPECT_EQ(complaint([] { parse_hosts("a:4,b:x"); }),
            "--hosts: 'x' is no number of slots from 1 to 4096 → list hosts and slots, as in --hosts a:4,b:4");
}

TEST(HostFile, TheFormatsThatPeopleHave) {
  EXPECT_THAT(file("# our hosts\n\na slots=4\nb\tslots=2 max_slots=8   # the small one\r\n  c:3\nd\n"),
              ElementsAre(HostSpec{"a", "", 4}, HostSpec{"b", "", 2}, HostSpec{"c", "", 3}, HostSpec{"d", "", 0}));
  EXPECT_THAT(file("a slots = 4\nb slots= 2 user=eve\n// no host\n"),
              ElementsAre(HostSpec{"a", "", 4}, HostSpec{"b", "eve", 2}));
  // PBS: a line a slot.
  EXPECT_THAT(file("a\na\nb\n"), ElementsAre(HostSpec{"a", "", 2}, HostSpec{"b", "", 0}));
  EXPECT_THAT(file("a slots=2"), ElementsAre(HostSpec{"a", "", 2}));
}

TEST(HostFile, MistakesNameTheLine) {
  EXPECT_EQ(complaint([] { file("a slots=4\nb slotz=4\n"); }),
            "hosts.txt:2: 'slotz=4' is not understood, slots= is → a line is HOST, HOST slots=N or HOST:N");
  EXPECT_THAT(complaint([] { file("a\n\n# x\nb four\n"); }), HasSubstr("hosts.txt:4: 'four' is not understood"));
  EXPECT_THAT(complaint([] { file("a slots=many"); }), HasSubstr("hosts.txt:1: 'many' is no number of slots"));
  EXPECT_THAT(complaint([] { file("a:2 slots=2"); }), HasSubstr("hosts.txt:1: host a has two numbers of slots"));
  EXPECT_THAT(complaint([] { file("a slots=4 max_slots=2"); }), HasSubstr("hosts.txt:1: slots=4 is more than"));
  EXPECT_THAT(complaint([] { file("a\n-b slots=1"); }), HasSubstr("hosts.txt:2: '-b' is no name of a host"));
  EXPECT_THAT(complaint([] { file("# nothing\n\n"); }), HasSubstr("hosts.txt: it names no host"));
  EXPECT_THAT(complaint([] { file(""); }), HasSubstr("it names no host"));
  EXPECT_THAT(complaint([] { file(std::string("a\n\0\x1b[31m\n", 9)); }), HasSubstr("hosts.txt:2: "));
}

TEST(HostFile, ThatCannotBeRead) {
  EXPECT_THAT(complaint([] { read_hostfile("/no/such/file"); }),
              HasSubstr("cannot read the host file /no/such/file: No such file or directory"));
  EXPECT_THAT(complaint([] { read_hostfile("/proc/self"); }), HasSubstr("/proc/self"));
  EXPECT_THAT(complaint([] { read_hostfile("/dev/zero"); }), HasSubstr("no plain file"));
  const lockstep::testing::TemporaryDirectory directory;
  const std::string pipe = (directory.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(complaint([&] { read_hostfile(pipe); }), HasSubstr("is a pipe"));
  const std::string large = (directory.path() / "large").string();
  std::ofstream(large) << std::string((1 << 20) + 1, '#');
  EXPECT_THAT(complaint([&] { read_hostfile(large); }), HasSubstr("larger than 1 MiB"));
}

TEST(Placement, FillsOneHostAfterTheOther) {
  const std::vector<HostSpec> hosts = {{"a", "", 3}, {"b", "", 1}, {"c", "", 2}};
  EXPECT_THAT(place_ranks(hosts, 0), ElementsAre(3, 1, 2));
  EXPECT_THAT(place_ranks(hosts, 4), ElementsAre(3, 1, 0));
  EXPECT_THAT(place_ranks(hosts, 1), ElementsAre(1, 0, 0));
  EXPECT_EQ(complaint([&] { place_ranks(hosts, 8); }),
            "launch: 8 ranks, but the hosts have 6 slots (a:3, b:1, c:2) → start at most 6, or give a host more slots, "
            "as in a:5");
}

TEST(HostSpec, HasANameThatMpirunTakes) {
  EXPECT_EQ((HostSpec{"a-1.example.org", "", 1}).mpirun_name(), "a-1.example.org");
  const auto odd = (HostSpec{"job_worker_1", "", 1}).mpirun_name();
  EXPECT_EQ(odd.find('_'), std::string::npos);
  EXPECT_NE(odd, (HostSpec{"job-worker_1", "", 1}).mpirun_name());
}

}  // namespace
}  // namespace lockstep::launcher
