// What ranks that the launcher starts itself are started with.
#include "launcher/own_ranks.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <map>

namespace lockstep::launcher {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;
using ::testing::Pair;

EnvLookup only(const std::string& name) {
  return [=](const std::string& asked) { return asked == name ? std::optional<std::string>("1") : std::nullopt; };
}

constexpr const char* kSelf = "/proc/self/exe";

TEST(OwnRanksTest, TheBinaryIsRecognised) {
  EXPECT_TRUE(is_own_binary("lockstep", kSelf));
  EXPECT_TRUE(is_own_binary(kSelf, kSelf));
  EXPECT_FALSE(is_own_binary("sh", kSelf));
  EXPECT_FALSE(is_own_binary("/bin/sh", kSelf));
  EXPECT_FALSE(is_own_binary("no-such-program", kSelf));
  EXPECT_FALSE(is_own_binary("", kSelf));
}

TEST(OwnRanksTest, OthersAreForMpirun) {
  LaunchOptions options;
  options.program = {"lockstep", "train"};
  EXPECT_TRUE(starts_own_ranks(options, kSelf, only("")));
  for (const char* scheduler : {"SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE"})
    EXPECT_FALSE(starts_own_ranks(options, kSelf, only(scheduler))) << scheduler;
  options.mpi = true;
  EXPECT_FALSE(starts_own_ranks(options, kSelf, only("")));
  options.mpi = false;
  options.hosts = {{"a", "", 2}};
  EXPECT_TRUE(starts_own_ranks(options, kSelf, only("SLURM_JOB_ID"))) << "hosts that are named are not Slurm's to name";
  options.hosts.clear();
  options.program = {"./my_program"};
  EXPECT_FALSE(starts_own_ranks(options, kSelf, only("")));
  // Without one in PATH the launcher starts them itself, on this host alone.
  const auto without_mpirun = [](const std::string& asked) {
    return asked == "PATH" ? std::optional<std::string>("/proc/self") : std::nullopt;
  };
  EXPECT_TRUE(starts_own_ranks(options, kSelf, without_mpirun));
  options.mpi = true;
  EXPECT_FALSE(starts_own_ranks(options, kSelf, without_mpirun));
  options.mpi = false;
  options.hosts = {{"a", "", 2}};
  EXPECT_FALSE(starts_own_ranks(options, kSelf, without_mpirun));
}

TEST(OwnRanksTest, OtherProgramsStayWhatTheyAre) {
  LaunchOptions options;
  options.program = {"/bin/sh", "-c", "true"};
  HostFacts facts;
  facts.self = "/opt/lockstep";
  EXPECT_THAT(own_rank(options, facts, {}).argv, ElementsAre("/opt/lockstep", "_rank", "--", "/bin/sh", "-c", "true"));
}

TEST(OwnRanksTest, RankVariablesAreSet) {
  LaunchOptions options;
  options.program = {"lockstep", "train", ":"};
  HostFacts facts;
  facts.self = "/opt/lockstep";
  facts.job_dir = "/tmp/job";
  facts.socket_path = "/tmp/job/s";
  facts.secret = "xyz";
  facts.attempt = 3;
  const RankPlace place{.rank = 1, .ranks = 4, .local_rank = 1, .local_ranks = 4, .port = 4711};
  const SpawnRequest request = own_rank(options, facts, place);
  EXPECT_THAT(request.argv,
              ElementsAre("/opt/lockstep", "_rank", "--", "/opt/lockstep", "train", protect_argument(":")));
  for (const auto& [name, value] : std::map<std::string, std::string>{{"RANK", "1"},
                                                                      {"WORLD_SIZE", "4"},
                                                                      {"LOCAL_RANK", "1"},
                                                                      {"LOCAL_WORLD_SIZE", "4"},
                                                                      {"MASTER_ADDR", "127.0.0.1"},
                                                                      {"MASTER_PORT", "4711"},
                                                                      {"LOCKSTEP_LAUNCHER", "unix:/tmp/job/s"},
                                                                      {"LOCKSTEP_JOB", "/tmp/job"},
                                                                      {"LOCKSTEP_JOB_SECRET", "xyz"},
                                                                      {"LOCKSTEP_BIND", "core"},
                                                                      {"LOCKSTEP_ATTEMPT", "3"}})
    EXPECT_THAT(request.set_env, Contains(Pair(name, value)));
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "TORCHELASTIC_RUN_ID", "LOCKSTEP_MEETING"})
    EXPECT_THAT(request.unset_env, Contains(name));
  for (const auto& argument : request.argv) EXPECT_EQ(argument.find("xyz"), std::string::npos) << "the secret";
}

TEST(OwnRanksTest, RankVariablesAreSetOnSeveralHosts) {
  LaunchOptions options;
  options.program = {"lockstep", "train"};
  HostFacts facts;
  facts.self = "/opt/lockstep";
  facts.job_dir = "/tmp/job";
  facts.secret = "xyz";
  facts.name = "here";
  facts.several.shares = {{"a", 3}, {"b", 2}};
  facts.several.job_id = "id";
  facts.several.exported = {"LOCKSTEP_LR", "NCCL_A"};
  const RankPlace place{.rank = 4, .ranks = 5, .local_rank = 1, .local_ranks = 2, .address = "10.0.0.1", .port = 4711};
  const std::map<std::string, std::string> both = {
      {"RANK", "4"},           {"WORLD_SIZE", "5"},         {"LOCAL_RANK", "1"},       {"LOCAL_WORLD_SIZE", "2"},
      {"MASTER_PORT", "4711"}, {"MASTER_ADDR", "10.0.0.1"}, {"LOCKSTEP_MEETING", "id"}};
  const SpawnRequest here = own_rank(options, facts, place);
  const StartRank there = remote_rank(options, facts, place, only("LOCKSTEP_LR"));
  for (const auto& [name, value] : both) {
    EXPECT_THAT(here.set_env, Contains(Pair(name, value)));
    EXPECT_THAT(there.set_env, Contains(Pair(name, value)));
  }
  EXPECT_THAT(here.set_env, Contains(Pair("LOCKSTEP_HOST_NAME", "here")));
  EXPECT_THAT(here.unset_env, Not(Contains("LOCKSTEP_MEETING")));
  EXPECT_THAT(there.set_env, Contains(Pair("LOCKSTEP_LR", "1")));
  EXPECT_THAT(there.set_env, Not(Contains(Pair("NCCL_A", ::testing::_))));
  EXPECT_EQ(there.rank, 4);
  EXPECT_EQ(there.argv, here.argv);
}

/// errno of a listener at the port, 0 where it listens.
int listen_at_port(int port, bool reuse) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int value = reuse ? 1 : 0;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &value, sizeof value);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return errno;
  return ::listen(socket.get(), 1) == 0 ? 0 : errno;
}

TEST(OwnRanksTest, AHeldPortIsForRank0) {
  const HeldPort port;
  EXPECT_EQ(listen_at_port(port.number(), true), 0) << "as rank 0 does";
  EXPECT_EQ(listen_at_port(port.number(), false), EADDRINUSE);
  std::vector<HeldPort> others(50);
  EXPECT_TRUE(std::ranges::none_of(others, [&](const auto& other) { return other.number() == port.number(); }));
}

}  // namespace
}  // namespace lockstep::launcher
