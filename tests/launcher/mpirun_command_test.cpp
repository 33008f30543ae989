#include "launcher/mpirun_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace lockstep::launcher {
namespace {

using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

HostFacts two_cores() {
  HostFacts facts;
  facts.cores = 2;
  facts.mpirun = "/usr/bin/mpirun";
  facts.self = "/opt/lockstep";
  facts.job_dir = "/tmp/job";
  facts.shm_dir = "/dev/shm/job";
  facts.socket_path = "/tmp/job/launcher";
  return facts;
}

MpirunCommand command_for(const LaunchOptions& options, const HostFacts& facts,
                          const std::map<std::string, std::string>& environment = {}) {
  return mpirun_command(options, facts, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  });
}

LaunchOptions options_for(int ranks) {
  LaunchOptions options;
  options.ranks = ranks;
  options.program = {"train", "--lr", "0.1"};
  return options;
}

TEST(MpirunCommandTest, CommandLine) {
  EXPECT_THAT(command_for(options_for(2), two_cores()).argv,
              testing::ElementsAre("/usr/bin/mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2",
                                   "/opt/lockstep", "_rank", "--", "train", "--lr", "0.1"));
}

TEST(MpirunCommandTest, ABareLockstepIsThisBinary) {
  LaunchOptions options = options_for(2);
  options.program = {"lockstep", "train", "lockstep"};
  const auto argv = command_for(options, two_cores()).argv;
  EXPECT_EQ(std::vector<std::string>(argv.end() - 3, argv.end()),
            (std::vector<std::string>{"/opt/lockstep", "train", "lockstep"}));
  options.program = {"./lockstep"};
  EXPECT_EQ(command_for(options, two_cores()).argv.back(), "./lockstep");
}

TEST(MpirunCommandTest, AutoIsOneRankForEachCore) {
  EXPECT_EQ(command_for(options_for(0), two_cores()).ranks, 2);
  EXPECT_FALSE(command_for(options_for(0), two_cores()).oversubscribed);
}

TEST(MpirunCommandTest, MoreRanksThanCoresYield) {
  const auto three = command_for(options_for(3), two_cores());
  EXPECT_TRUE(three.oversubscribed);
  EXPECT_THAT(three.set_env, Contains(Pair("OMPI_MCA_mpi_yield_when_idle", "1")));
  EXPECT_THAT(command_for(options_for(2), two_cores()).set_env, Not(Contains(Key("OMPI_MCA_mpi_yield_when_idle"))));
}

TEST(MpirunCommandTest, EverythingLiesInTheJobsDirectories) {
  const auto command =
      command_for(options_for(2), two_cores(),
                  {{"OMPI_MCA_orte_tmpdir_base", "/scratch"}, {"OMPI_MCA_btl_vader_backing_directory", "/dev/shm"}});
  EXPECT_THAT(command.set_env, Contains(Pair("OMPI_MCA_orte_tmpdir_base", "/tmp/job")));
  EXPECT_THAT(command.set_env, Contains(Pair("OMPI_MCA_btl_vader_backing_directory", "/dev/shm/job")));
  EXPECT_THAT(command.set_env, Contains(Pair("LOCKSTEP_JOB", "/tmp/job")));
  EXPECT_THAT(command.set_env, Contains(Pair("LOCKSTEP_LAUNCHER", "unix:/tmp/job/launcher")));
}

TEST(MpirunCommandTest, TheUsersOpenMpiSettingsWin) {
  EXPECT_THAT(command_for(options_for(2), two_cores()).set_env, Contains(Pair("OMPI_MCA_pml", "ob1")));
  EXPECT_THAT(command_for(options_for(2), two_cores()).set_env, Contains(Pair("OMPI_MCA_btl", "self,vader")));
  EXPECT_THAT(command_for(options_for(2), two_cores(), {{"OMPI_MCA_btl", "tcp"}}).set_env,
              Not(Contains(Key("OMPI_MCA_btl"))));
  for (const char* name : {"OMPI_MCA_pml", "OMPI_MCA_mtl"})
    EXPECT_THAT(command_for(options_for(2), two_cores(), {{name, "cm"}}).set_env, Not(Contains(Key("OMPI_MCA_pml"))));
}

TEST(MpirunCommandTest, RootTerminalAndBinding) {
  auto facts = two_cores();
  auto options = options_for(2);
  EXPECT_THAT(command_for(options, facts).set_env, Not(Contains(Key("OMPI_ALLOW_RUN_AS_ROOT"))));
  EXPECT_THAT(command_for(options, facts).set_env, Not(Contains(Key("LOCKSTEP_TTY"))));
  EXPECT_THAT(command_for(options, facts).set_env, Contains(Pair("LOCKSTEP_BIND", "core")));
  facts.is_root = true;
  facts.tty_columns = 76;
  options.bind_to = BindTo::kSocket;
  EXPECT_THAT(command_for(options, facts).set_env, Contains(Pair("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")));
  EXPECT_THAT(command_for(options, facts).set_env, Contains(Pair("LOCKSTEP_TTY", "76")));
  facts.tty_prefix = 4;
  facts.tty_path = "/dev/pts/7";
  EXPECT_THAT(command_for(options, facts).set_env, Contains(Pair("LOCKSTEP_TTY", "76 4 /dev/pts/7")));
  EXPECT_THAT(command_for(options, facts).set_env, Contains(Pair("LOCKSTEP_BIND", "socket")));
}

HostFacts two_hosts() {
  HostFacts facts = two_cores();
  facts.name = "a";
  facts.secret = "hush";
  facts.several = {.shares = {{"b", 2}, {"a", 1}},
                   .hostfile = "/tmp/job/hosts",
                   .agent = "/tmp/job/lockstep",
                   .networks = "10.0.0.0/24",
                   .not_networks = "172.17.0.0/16",
                   .job_id = "abc",
                   .address = "10.0.0.2",
                   .port = 20001,
                   .exported = {"LOCKSTEP_LR"},
                   .oversubscribed = false};
  return facts;
}

TEST(MpirunCommandTest, SeveralHosts) {
  const auto command = command_for(options_for(3), two_hosts());
  EXPECT_THAT(command.argv,
              testing::ElementsAre("/usr/bin/mpirun", "--oversubscribe", "--bind-to", "none", "-n", "3", "--hostfile",
                                   "/tmp/job/hosts", "--map-by", "seq", "-x", "LOCKSTEP_MEETING", "-x", "MASTER_ADDR",
                                   "-x", "MASTER_PORT", "-x", "LOCKSTEP_BIND", "-x", "LOCKSTEP_ATTEMPT", "-x",
                                   "LOCKSTEP_CHECKPOINT_STEP", "-x", "LOCKSTEP_LR", "/opt/lockstep", "_rank", "--",
                                   "train", "--lr", "0.1"));
  EXPECT_FALSE(command.oversubscribed);  // three ranks on two cores, but not on one host
  EXPECT_EQ(hostfile_text(two_hosts().several), "b\nb\na\n");
  EXPECT_THAT(command.set_env, Contains(Pair("OMPI_MCA_plm_rsh_agent", "/tmp/job/lockstep _rsh")));
  EXPECT_THAT(command.set_env, Contains(Pair("OMPI_MCA_btl_tcp_if_include", "10.0.0.0/24")));
  EXPECT_THAT(command.set_env, Contains(Pair("OMPI_MCA_oob_tcp_if_include", "10.0.0.0/24")));
  EXPECT_THAT(command.set_env, Contains(Pair("MASTER_ADDR", "10.0.0.2")));
  EXPECT_THAT(command.set_env, Contains(Pair("LOCKSTEP_HOST_NAME", "a")));
  EXPECT_THAT(command.set_env, Contains(Pair("TMPDIR", "/tmp/job")));
  EXPECT_THAT(command.unset_env, Contains("OMPI_MCA_orte_tmpdir_base"));
  // The secret is for this host's processes: -x, which argv above has all of, would send it in clear.
  EXPECT_THAT(command.set_env, Contains(Pair("LOCKSTEP_JOB_SECRET", "hush")));
  // A job on one host has none of these.
  EXPECT_THAT(command_for(options_for(2), two_cores()).set_env, Not(Contains(Key("LOCKSTEP_MEETING"))));
}

TEST(MpirunCommandTest, TheUsersInterfacesWinBetweenHosts) {
  const auto own = command_for(options_for(3), two_hosts(), {{"OMPI_MCA_btl_tcp_if_exclude", "eth9"}}).set_env;
  EXPECT_THAT(own, Not(Contains(Key("OMPI_MCA_btl_tcp_if_include"))));
  EXPECT_THAT(own, Contains(Key("OMPI_MCA_oob_tcp_if_include")));
  auto facts = two_hosts();
  facts.several.networks.clear();
  EXPECT_THAT(command_for(options_for(3), facts).set_env,
              Contains(Pair("OMPI_MCA_btl_tcp_if_exclude", "127.0.0.1/8,172.17.0.0/16")));
}

TEST(MpirunCommandTest, VariablesForOtherHosts) {
  for (const char* name : {"LOCKSTEP_LR", "NCCL_DEBUG", "OMP_NUM_THREADS"}) EXPECT_TRUE(goes_along(name)) << name;
  for (const char* name : {"LOCKSTEP_JOB", "LOCKSTEP_LAUNCHER", "LOCKSTEP_HOST_NAME", "LOCKSTEP_SHM",
                           "LOCKSTEP_JOB_SECRET", "PATH", "HOME", "CUDA_VISIBLE_DEVICES"})
    EXPECT_FALSE(goes_along(name)) << name;
}

TEST(MpirunCommandTest, NoArgumentIsASeparator) {
  for (const std::string argument : {":", ":\\", ":\\\\", "", "a", "\\", "a:b", "::", ":x"}) {
    EXPECT_NE(protect_argument(argument), ":");
    EXPECT_EQ(unprotect_argument(protect_argument(argument)), argument);
  }
  EXPECT_EQ(protect_argument("a:b"), "a:b");
}

TEST(MpirunCommandTest, ThereIsACoreToRunOn) { EXPECT_GE(usable_cores(), 1); }

}  // namespace
}  // namespace lockstep::launcher
