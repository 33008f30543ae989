// A network that is cut between two of three hosts, in network namespaces. Skipped where this process may make none.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/comm/forked_ranks.h"
#include "tests/support/namespaces.h"

namespace lockstep::comm {
namespace {

using testing::on_processes;
using testing::run_quietly;

class Partition : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!network_.why_not().empty()) GTEST_SKIP() << network_.why_not();
    if (!network_.join()) GTEST_SKIP() << "there is no switch to be had";
  }

  /// What a rank does in each step.
  using Step = std::function<void(ProcessGroup& group, const Region& region)>;
  static void reduce(ProcessGroup& group, const Region& region) {
    group.all_reduce(region, ReduceOp::kSum).wait_host();
  }

  /// A rank on each host; the last two lose each other at some step. Whether each ends because of that within
  /// `seconds`, where rank 1 waits for `its_timeout` and the others for long.
  void expect_all_to_end_within(double seconds, double its_timeout, const Step& work = reduce) {
    on_processes({.hosts = "abc", .alarm_seconds = 60}, [&](World world) {
      network_.enter(network_.name(world.rank));
      world.rendezvous.host = network_.address(0);
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
            if (world.rank > 0 && !run_quietly("ip route add blackhole " + network_.address(3 - world.rank)))
              return false;
          }
          work(*group, region);
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
  const testing::Namespaces network_{3};
};

// Rank 1 gives up first; rank 2 learns of it from rank 0.
TEST_F(Partition, AbortIsRelayedToUnreachableRanks) { expect_all_to_end_within(20, 4); }

// Each finds out by itself, after the 30 s that a silent connection is given.
TEST_F(Partition, LostRouteIsASilentPeer) { expect_all_to_end_within(45, 300); }

// So is it where nothing but transfers is under way; who waits for another one hears of it.
TEST_F(Partition, ASilentPeerOfATransfer) {
  expect_all_to_end_within(45, 300, [](ProcessGroup& group, const Region& region) {
    if (group.rank() == 0) group.irecv(region, 1).wait();
    if (group.rank() == 1) group.irecv(region, 2).wait();
    if (group.rank() == 2) group.isend(region, 1).wait();
  });
}

}  // namespace
}  // namespace lockstep::comm
