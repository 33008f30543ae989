// Hosts that lack what others have: the reason at once, and a remedy that helps.
#include <gmock/gmock.h>

#include <string>

#include "tests/program/command.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

const std::string kFewSteps = "lockstep train linear --data random:4,20 --steps 2 --timeout-seconds 60";
const std::string kTwoRanks = "lockstep launch -n 2 -- " + kFewSteps;

class Surroundings : public ::testing::Test {
 protected:
  /// Runs this as root of namespaces of its own, after `change`.
  Outcome run_in(const std::string& namespaces, const std::string& change, const std::string& command) {
    return run("unshare -r" + namespaces + " bash -c \"" + change + "; " + command + "\"", directory_.path());
  }
  void expect_refusal(const Outcome& outcome, const std::string& what, const std::string& remedy) {
    EXPECT_THAT(outcome, fails_with(4, what, "→ " + remedy));
    EXPECT_EQ(lines_of(outcome.err).size(), 1U) << outcome.err;
  }

  TemporaryDirectory directory_;
};

TEST_F(Surroundings, NoLoopbackNetwork) {
  if (run("unshare -rn true", directory_.path()).code != 0) GTEST_SKIP() << "no network namespaces here";
  expect_refusal(run_in("n", ":", kTwoRanks), "which is not there: 127.0.0.1: Network is unreachable",
                 "bring it up: ip link set lo up");
  const std::string rank = "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=29500 MASTER_ADDR=";
  for (const char* address : {"127.0.0.1", "::1", "localhost"}) {
    EXPECT_THAT(run_in("n", ":", rank + address + " " + kFewSteps),
                fails_with(4, "this host's loopback network is not there: ", "→ bring it up: ip link set lo up"));
  }
  // One rank finds nobody.
  for (const std::string& command : {kFewSteps, "lockstep launch -n 1 -- " + kFewSteps})
    EXPECT_EQ(run_in("n", ":", command).code, 0) << command;
}

TEST_F(Surroundings, Mpiruns127001) {
  if (run("unshare -rn true && command -v mpirun", directory_.path()).code != 0)
    GTEST_SKIP() << "no network namespaces, or no mpirun, here";
  expect_refusal(run_in("n", ":", "lockstep launch --mpi -n 2 -- " + kFewSteps), "find each other at 127.0.0.1",
                 "bring it up: ip link set lo up");
}

TEST_F(Surroundings, Ipv6Alone) {
  const std::string change = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo";
  if (run_in("n", change, "ip -6 addr show lo | grep -q ::1").code != 0)
    GTEST_SKIP() << "no network namespaces, no ip, or no IPv6 here";
  for (const std::string& command : {kTwoRanks, "lockstep launch --hosts localhost:2 -- " + kFewSteps}) {
    const auto outcome = ended_well(run_in("n", change, command));
    EXPECT_THAT(outcome.out, HasSubstr("on 2 ranks"));
  }
}

TEST_F(Surroundings, LongNamesOfHosts) {
  if (run("unshare -ru true", directory_.path()).code != 0) GTEST_SKIP() << "no UTS namespaces here";
  const std::string change = "echo " + std::string(60, 'a') + " >/proc/sys/kernel/hostname";
  EXPECT_EQ(run_in("u", change, kTwoRanks).code, 0);
  const auto outcome = run_in("u", change, "lockstep launch --mpi -n 2 -- " + kFewSteps);
  if (outcome.code == 0) GTEST_SKIP() << "this mpirun takes such names";
  EXPECT_THAT(outcome, fails_with(4, "was ended by SIGABRT: Open MPI 4 takes names of hosts of at most 56",
                                  "→ shorten it (hostname NAME), or leave --mpi out"));
}

TEST_F(Surroundings, NoProc) {
  if (run("unshare -rm mount -t tmpfs none /proc", directory_.path()).code != 0)
    GTEST_SKIP() << "no mount namespaces here";
  expect_refusal(run_in("m", "mount -t tmpfs none /proc", kTwoRanks), "there is no /proc/self/exe",
                 "mount it: mount -t proc proc /proc");
  EXPECT_EQ(run_in("m", "mount -t tmpfs none /proc", kFewSteps).code, 0);
}

// In some containers not everybody may write it, or nobody may use it. The program is not to blame.
TEST_F(Surroundings, NullDevice) {
  const std::string of_no_use = "mount --bind /dev/null /dev/null; mount -o remount,bind,nodev /dev/null";
  if (run_in("m", of_no_use, "true").code != 0) GTEST_SKIP() << "no mount namespaces here";
  expect_refusal(run_in("m", of_no_use, kTwoRanks), "cannot read /dev/null: Permission denied",
                 "give it the permissions");
  EXPECT_EQ(run_in("m", of_no_use, kFewSteps).code, 0);
}

TEST_F(Surroundings, FewOpenFiles) {
  const auto within = [&](const std::string& limit, const std::string& command) {
    return run("ulimit " + limit + "; " + command, directory_.path());
  };
  expect_refusal(within("-n 16", "lockstep launch -n 4 -- " + kFewSteps),
                 "4 ranks need 24 open files, and the hard limit (ulimit -Hn) is 16",
                 "start fewer ranks, or have the limit");
  expect_refusal(within("-n 32", "lockstep launch --mpi -n 2 -- " + kFewSteps), "2 ranks of mpirun need 40 open files",
                 "start fewer ranks");
  for (const auto& [limit, command] : {std::pair("-n 24", "lockstep launch -n 4 -- " + kFewSteps),
                                       std::pair("-Sn 8", "lockstep launch -n 4 -- " + kFewSteps),
                                       std::pair("-n 20", kTwoRanks), std::pair("-n 16", kFewSteps)}) {
    ended_well(within(limit, command));
  }
}

}  // namespace
}  // namespace lockstep::testing
