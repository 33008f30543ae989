// A network that is cut between two of three hosts, in network namespaces. Skipped where this process may make none.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/error.h"
#include "base/unique_fd.h"
#include "comm/make_group.h"
#include "tests/comm/forked_ranks.h"

namespace lockstep::comm {
namespace {

using testing::on_processes;
using testing::Setting;

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

/// Three hosts, and a fourth namespace with the switch that they hang on.
class Partition : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0 || !run("command -v ip") || !run("ip netns add " + name(kSwitch)))
      GTEST_SKIP() << "this process may not make network namespaces";
    bool well =
        run(fmt::format("ip -n {0} link add switch type bridge && ip -n {0} link set switch up", name(kSwitch)));
    for (int host = 0; well && host < kHosts; ++host)
      well =
          run(fmt::format("ip netns add {0} && ip link add eth0 netns {0} type veth peer name v{1} netns {2} && "
                          "ip -n {2} link set v{1} master switch up && ip -n {0} addr add {3}/24 dev eth0 && "
                          "ip -n {0} link set lo up && ip -n {0} link set eth0 up",
                          name(host), host, name(kSwitch), address(host)));
    if (!well) GTEST_SKIP() << "network namespaces cannot be joined here";
  }
  void TearDown() override {
    for (int host = 0; host <= kSwitch; ++host) run("ip netns del " + name(host));
  }

  static constexpr int kHosts = 3, kSwitch = kHosts;
  static std::string address(int host) { return fmt::format("10.80.7.{}", host + 1); }
  std::string name(int host) const { return fmt::format("lspart{}{}", parent_, "abcs"[host]); }
  void enter(int host) const {
    const UniqueFd name_space(::open(("/run/netns/" + name(host)).c_str(), O_RDONLY | O_CLOEXEC));
    LOCKSTEP_ASSERT(::setns(name_space.get(), CLONE_NEWNET) == 0);
  }

  /// A rank on each host; the last two lose each other at some step. Whether each ends because of that within
  /// `seconds`, where rank 1 waits for `its_timeout` and the others for long.
  void expect_all_to_end_within(double seconds, double its_timeout) {
    on_processes({.hosts = "abc", .alarm_seconds = 60}, [&](World world) {
      enter(world.rank);
      world.meeting.host = address(0);
      GroupOptions options;
      options.timeout_seconds = world.rank == 1 ? its_timeout : 300;
      options.progress = GroupOptions::Progress::kInline;
      const auto group = make_group(world, options);
      const auto arena = group->allocate(4 << 20);
      const Region region{arena.get(), 0, 1 << 20, DType::kF32};
      const auto begin = Clock::now();
      try {
        for (int step = 0; seconds_between(begin, Clock::now()) < 55; ++step) {
          if (step == 20) {
            // Nothing can be sent that way: TCP has nothing on its way that could remain unacknowledged.
            if (world.rank > 0 && !run("ip route add blackhole " + address(3 - world.rank))) return false;
          }
          group->all_reduce(region, ReduceOp::kSum).wait_host();
        }
      } catch (const Error& error) {
        const std::string what = error.what();
        const bool named =
            what.find("rank 1 (host b)") != std::string::npos || what.find("rank 2 (host c)") != std::string::npos;
        const double lasted = seconds_between(begin, Clock::now());
        if (!named || lasted > seconds) std::fprintf(stderr, "rank %d, %f s: %s\n", world.rank, lasted, what.c_str());
        return named && lasted <= seconds;
      }
      std::fprintf(stderr, "rank %d: nothing was thrown\n", world.rank);
      return false;
    });
  }

 private:
  const int parent_ = ::getpid();
};

// Rank 1 gives up first; rank 2 learns of it from rank 0.
TEST_F(Partition, WhoHearsOfTheEndTellsThoseWhoCannotHaveHeard) { expect_all_to_end_within(20, 4); }

// Each finds out by itself, after the 30 s that a silent connection is given.
TEST_F(Partition, AWayThatIsGoneIsASilentPeer) { expect_all_to_end_within(45, 300); }

}  // namespace
}  // namespace lockstep::comm
