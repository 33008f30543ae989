// Jobs on two hosts that are network namespaces, joined by a cable and reached over real ssh. Skipped where this
// process may not make namespaces, or has no ip, ssh or sshd.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "base/text.h"
#include "tests/launcher/job.h"
#include "tests/support/namespaces.h"

namespace lockstep::launcher {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::run_quietly;

constexpr const char* kAddressA = "10.80.7.1";
constexpr const char* kAddressB = "10.80.7.2";

/// An sshd on each. `why_not()` says why there are none.
class TwoHosts {
 public:
  TwoHosts() : why_not_(make()) {}
  ~TwoHosts() {
    for (const int host : {0, 1}) network.kill_all_on(host);
    if (made_run_directory_) ::rmdir("/run/sshd");
    std::error_code ignored;
    if (!setup.directory.empty()) fs::remove_all(setup.directory, ignored);
  }

  const std::string& why_not() const { return why_not_; }
  std::string b() const { return network.name(1); }
  bool set_link(const char* state) { return run_quietly(fmt::format("ip -n {} link set eth0 {}", b(), state)); }

  const testing::Namespaces network{2};
  TestJobSetup setup;

 private:
  std::string make() {
    for (const char* program : {"ip", "ssh", "ssh-keygen", "/usr/sbin/sshd"})
      if (!run_quietly(fmt::format("command -v {}", program))) return fmt::format("there is no {}", program);
    if (!network.why_not().empty()) return network.why_not();
    if (!network.join()) return "network namespaces cannot be joined here";
    setup.directory = make_test_directory();
    if (!start_sshd()) return "sshd does not start";
    setup.prefix = {"ip", "netns", "exec", network.name(0)};
    setup.environment = {{"OMPI_MCA_plm_rsh_agent", fmt::format("ssh -F {}/ssh", setup.directory)}};
    return {};
  }

  bool start_sshd() {
    const std::string& directory = setup.directory;
    for (const char* key : {"host", "user"})
      if (!run_quietly(fmt::format("ssh-keygen -q -t ed25519 -N '' -f {}/{}", directory, key))) return false;
    made_run_directory_ = ::mkdir("/run/sshd", 0755) == 0;
    std::ofstream(directory + "/sshd") << fmt::format(
        "Port 22\nHostKey {0}/host\nAuthorizedKeysFile {0}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
        "SetEnv {1}={0} TMPDIR={0}/tmp OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n",
        directory, kMarkVariable);
    const std::string key = first_line(directory + "/host.pub");
    std::ofstream(directory + "/known") << kAddressA << ' ' << key << '\n' << kAddressB << ' ' << key << '\n';
    write_client_config("user", "known");
    const auto serve = [&](int host) {
      return run_quietly(fmt::format("ip netns exec {} /usr/sbin/sshd -f {}/sshd", network.name(host), directory));
    };
    return serve(0) && serve(1);
  }

 public:
  void write_client_config(const std::string& key, const std::string& known_hosts) {
    std::ofstream(setup.directory + "/ssh") << fmt::format(
        "Host *\n  IdentityFile {0}/{1}\n  IdentitiesOnly yes\n  UserKnownHostsFile {0}/{2}\n"
        "  GlobalKnownHostsFile /dev/null\n  User root\n",
        setup.directory, key, known_hosts);
  }

 private:
  bool made_run_directory_ = false;
  std::string why_not_;
};

class LaunchNetworksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.why_not().empty()) GTEST_SKIP() << hosts_.why_not();
  }
  /// A job of this shell script with a rank on each host.
  Job start(const std::string& script, const std::vector<std::string>& flags = {}) {
    std::vector<std::string> arguments = {"--hosts", fmt::format("{}:1,{}:1", kAddressA, kAddressB)};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    for (const auto& word : {std::string("--"), std::string("/bin/sh"), std::string("-c"), script})
      arguments.push_back(word);
    return Job(arguments, hosts_.setup);
  }
  static bool ready(const Job& job) {
    return job.says(fmt::format("[0@{}] ready", kAddressA)) && job.says(fmt::format("[1@{}] ready", kAddressB));
  }
  static std::string lost_host() { return fmt::format("host {} (rank 1) was lost: ", kAddressB); }

  TwoHosts hosts_;
};

// Busy machines log in slowly, and clean up slowly.
Deadline within_ten() { return Deadline::after_seconds(10); }

TEST_F(LaunchNetworksTest, RendezvousIsReachableFromBothHosts) {
  Job job =
      start("echo rank $OMPI_COMM_WORLD_RANK joins at $MASTER_ADDR, $(ip -o -4 addr show eth0 | grep -o 10.80.7..)");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[0@10.80.7.1] rank 0 joins at 10.80.7.1, 10.80.7.1\n"));
  EXPECT_THAT(job.out(), HasSubstr("[1@10.80.7.2] rank 1 joins at 10.80.7.1, 10.80.7.2\n"));
  EXPECT_EQ(job.leftovers_at(within_ten()), "");
}

TEST_F(LaunchNetworksTest, AMpiProgramRunsOverTheNetwork) {
  Job job({"--hosts", fmt::format("{}:1,{}:1", kAddressA, kAddressB), "--", MPI_LEAVE_PROGRAM, "abort"}, hosts_.setup);
  EXPECT_EQ(job.wait(), 17) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1 of 2 (host 10.80.7.2, pid "));
  EXPECT_EQ(job.leftovers_at(within_ten()), "");
}

TEST_F(LaunchNetworksTest, TwoSecondOutageOnlyDelaysTheJob) {
  Job job = start("echo ready; sleep 5; echo done");
  ASSERT_TRUE(ready(job)) << job.err();
  ASSERT_TRUE(hosts_.set_link("down"));
  std::this_thread::sleep_for(std::chrono::seconds(2));
  ASSERT_TRUE(hosts_.set_link("up"));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[1@10.80.7.2] done"));
}

TEST_F(LaunchNetworksTest, ALinkThatIsGoneIsALostHostAndBothSidesCleanUp) {
  Job job = start(kWait, {"--host-timeout-seconds", "6"});
  ASSERT_TRUE(ready(job)) << job.err();
  ASSERT_TRUE(run_quietly(fmt::format("ip -n {} link del eth0", hosts_.b())));
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr(lost_host() + "it was last heard from "));
  EXPECT_EQ(job.leftovers_at(within_ten()), "");
}

// The job continues on the other host, and grows back when the link works again.
TEST_F(LaunchNetworksTest, ALinkThatIsDownForLongCostsTheRanksThereUntilItIsUp) {
  Job job(own_sh(fmt::format("--hosts {}:1,{}:1 --host-timeout-seconds 6 --max-restarts 3 --min-ranks 1", kAddressA,
                             kAddressB),
                 "attempt() { [ $LOCKSTEP_ATTEMPT = $1 ]; }; say() { echo \"$@\" >&$LOCKSTEP_STATUS_FD; }\n"
                 "attempt 2 && { echo $RANK of $WORLD_SIZE again; exit 0; }; attempt 0 && say checkpointed 1\n"
                 "attempt 1 && { echo $RANK of $WORLD_SIZE; until [ -e $TMPDIR/../go ]; do sleep 0.05; done; }\n"
                 "attempt 1 && for step in $(seq 2 100); do say checkpointed $step; sleep 0.5; done\n" +
                     std::string(kWait)),
          hosts_.setup);
  ASSERT_TRUE(ready(job)) << job.err();
  ASSERT_TRUE(hosts_.set_link("down"));
  ASSERT_TRUE(job.says("[0@10.80.7.1] 0 of 1")) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("restart 1 of 3: " + lost_host() + "it was last heard from "));
  ASSERT_TRUE(hosts_.set_link("up"));
  std::ofstream(job.directory() + "/go") << "yes";
  EXPECT_EQ(job.wait(Deadline::after_seconds(60)), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[0@10.80.7.1] 0 of 2 again\n"));
  EXPECT_THAT(job.out(), HasSubstr("[1@10.80.7.2] 1 of 2 again\n"));
  EXPECT_EQ(job.leftovers_at(within_ten()), "");
}

TEST_F(LaunchNetworksTest, AHostThatIsRemovedIsNamed) {
  Job job = start(kWait, {"--host-timeout-seconds", "6"});
  ASSERT_TRUE(ready(job)) << job.err();
  hosts_.network.kill_all_on(1);
  ASSERT_TRUE(run_quietly("ip netns del " + hosts_.b()));
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr(lost_host()));
  // Its directories lay in a file system that both hosts see.
  EXPECT_EQ(job.leftovers_at(within_ten()), "");
}

TEST_F(LaunchNetworksTest, AKilledLauncherLeavesNothingOnEitherHost) {
  Job job = start(kWait);
  ASSERT_TRUE(ready(job)) << job.err();
  job.send(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  EXPECT_EQ(job.leftovers_at(within_ten()), "");
}

TEST_F(LaunchNetworksTest, AnUnknownHostKeyIsNamed) {
  hosts_.write_client_config("user", "nobody");
  Job job = start("echo ran");
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr("host 10.80.7.2: its host key is unknown ("));
}

TEST_F(LaunchNetworksTest, ARefusedKeyIsNamed) {
  hosts_.write_client_config("host", "known");
  Job job = start("echo ran");
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr("host 10.80.7.2: it refuses the key ("));
}

}  // namespace
}  // namespace lockstep::launcher
