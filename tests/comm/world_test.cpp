#include "lockstep/comm/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "tests/support/refusal.h"

namespace lockstep::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

World discover(const Variables& variables) {
  return discover_world([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string complaint(const Variables& variables) {
  const auto error = testing::thrown<UsageError>([&] { discover(variables); });
  EXPECT_EQ(error.code(), 2);
  EXPECT_FALSE(error.remedy().empty());
  return error.what();
}

void expect_world(const World& world, int rank, int size, int local_rank, int local_size, Starter starter) {
  EXPECT_EQ(world.rank, rank);
  EXPECT_EQ(world.size, size);
  EXPECT_EQ(world.local_rank, local_rank);
  EXPECT_EQ(world.local_size, local_size);
  EXPECT_EQ(world.starter, starter);
}

TEST(World, NothingSetIsAWorldOfOne) { expect_world(discover({}), 0, 1, 0, 1, Starter::kNone); }

TEST(World, OpenMpi) {
  expect_world(discover({{"OMPI_COMM_WORLD_RANK", "5"},
                         {"OMPI_COMM_WORLD_SIZE", "8"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}),
               5, 8, 1, 4, Starter::kOpenMpi);
}

TEST(World, OpenMpiComesBeforeTheOthers) {
  const World world = discover({{"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                {"RANK", "7"},
                                {"WORLD_SIZE", "9"},
                                {"SLURM_PROCID", "0"},
                                {"SLURM_NTASKS", "64"}});
  expect_world(world, 1, 2, 1, 2, Starter::kOpenMpi);
}

TEST(World, Torchrun) {
  expect_world(discover({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}}), 3, 4, 1,
               2, Starter::kTorchrun);
}

TEST(World, RendezvousAddress) {
  const Variables ranks = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  const auto rendezvous_with = [&](Variables more) {
    more.insert(ranks.begin(), ranks.end());
    return discover(more).rendezvous;
  };
  EXPECT_EQ(rendezvous_with({}).host, "127.0.0.1");
  EXPECT_EQ(rendezvous_with({}).port, 29500);
  EXPECT_EQ(rendezvous_with({}).job, "");
  const auto rendezvous =
      rendezvous_with({{"MASTER_ADDR", "::1"}, {"MASTER_PORT", "65535"}, {"TORCHELASTIC_RUN_ID", "a"}});
  EXPECT_EQ(rendezvous.host, "::1");
  EXPECT_EQ(rendezvous.port, 65535);
  EXPECT_EQ(rendezvous.job, "a");
  // torchrun has a store of its own at the port that it names.
  EXPECT_EQ(rendezvous_with({{"MASTER_PORT", "400"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}).port, 401);
  EXPECT_EQ(rendezvous_with({{"MASTER_PORT", "400"}, {"TORCHELASTIC_USE_AGENT_STORE", "False"}}).port, 400);
  EXPECT_EQ(rendezvous_with({{"MASTER_PORT", "65535"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}).port, 65534);
  for (const char* bad : {"0", "65536", "http", ""})
    EXPECT_THAT(complaint({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", bad}}),
                HasSubstr(fmt::format("MASTER_PORT=\"{}\"", bad)));
  EXPECT_THAT(complaint({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", ""}}), HasSubstr("MASTER_ADDR"));
}

TEST(World, WhetherMpiJoinsTheRanks) {
  const auto mpi_joins = [&](Variables more) {
    more.insert({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
    return discover(more).mpi_joins;
  };
  EXPECT_FALSE(mpi_joins({}));
  // srun --mpi=pmix or pmi2, with RANK and WORLD_SIZE exported from what Slurm says.
  EXPECT_TRUE(mpi_joins({{"PMIX_RANK", "1"}}));
  EXPECT_TRUE(mpi_joins({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"SLURM_NTASKS", "2"}}));
  // Processes that a task of srun's has started.
  EXPECT_FALSE(mpi_joins({{"PMIX_RANK", "0"}}));
  EXPECT_FALSE(mpi_joins({{"PMIX_RANK", "1"}, {"SLURM_NTASKS", "4"}}));
  EXPECT_FALSE(mpi_joins({{"PMI_RANK", "1"}, {"PMI_SIZE", "1"}}));
  EXPECT_FALSE(mpi_joins({{"PMIX_RANK", "1"}, {"TORCHELASTIC_RUN_ID", "none"}}));
  EXPECT_TRUE(discover({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}}).mpi_joins);
  EXPECT_TRUE(
      discover({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"PMIX_RANK", "0"}}).mpi_joins);
}

// A launcher of several hosts names the job: the ranks need no MPI, though it would join them.
TEST(World, ANamedJobNeedsNoMpi) {
  const Variables mpirun = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  EXPECT_FALSE(discover(mpirun).joins_over_tcp);
  Variables named = mpirun;
  named.insert({{"LOCKSTEP_MEETING", "4f2a"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "21000"}});
  const World world = discover(named);
  EXPECT_TRUE(world.mpi_joins);
  EXPECT_TRUE(world.joins_over_tcp);
  EXPECT_EQ(world.rendezvous.host, "10.0.0.1");
  EXPECT_EQ(world.rendezvous.port, 21000);
  EXPECT_EQ(world.rendezvous.job, "4f2a");
  EXPECT_TRUE(discover({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).joins_over_tcp);
}

TEST(World, SecretAndWhereToListen) {
  const Variables plain = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  EXPECT_TRUE(discover(plain).rendezvous.secret.empty());
  EXPECT_EQ(discover(plain).rendezvous.listen, "");
  Variables all = plain;
  all.insert({{"LOCKSTEP_JOB_SECRET", "0123456789abcdef"}, {"LOCKSTEP_LISTEN", "0.0.0.0"}});
  EXPECT_EQ(discover(all).rendezvous.secret.text(), "0123456789abcdef");
  EXPECT_EQ(discover(all).rendezvous.listen, "0.0.0.0");
  EXPECT_EQ(
      discover(
          {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"LOCKSTEP_JOB_SECRET", "0123456789abcdef"}})
          .rendezvous.secret.text(),
      "0123456789abcdef");
  all["LOCKSTEP_JOB_SECRET"] = "short";
  EXPECT_THROW(discover(all), UsageError);
}

TEST(World, WithoutLocalRanksAllAreOnThisHost) {
  expect_world(discover({{"RANK", "3"}, {"WORLD_SIZE", "4"}}), 3, 4, 3, 4, Starter::kTorchrun);
}

TEST(World, LocalRankWithoutLocalSize) {
  expect_world(discover({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}}), 3, 4, 0, 4, Starter::kTorchrun);
}

TEST(World, SlurmStep) {
  expect_world(discover({{"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "2"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NTASKS_PER_NODE", "2"},
                         {"PMIX_RANK", "2"}}),
               2, 4, 0, 2, Starter::kSlurm);
}

TEST(World, SlurmTellsNoLocalSize) {
  expect_world(discover({{"SLURM_STEP_ID", "3"},
                         {"SLURM_PROCID", "2"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "2"},
                         {"PMI_RANK", "2"}}),
               2, 4, 2, 3, Starter::kSlurm);
}

TEST(World, SlurmTasksPerNodeMayExceedTheStep) {
  expect_world(discover({{"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "0"},
                         {"SLURM_NTASKS", "1"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NTASKS_PER_NODE", "8"}}),
               0, 1, 0, 1, Starter::kSlurm);
}

TEST(World, ABatchScriptIsNoSlurmStep) {
  const Variables job = {{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "16"}};
  expect_world(discover(job), 0, 1, 0, 1, Starter::kNone);
  // Newer versions number the batch script's own step and that of an interactive shell from above.
  for (const char* step : {"4294967291", "4294967290", "4294967292"}) {
    Variables with_step = job;
    with_step["SLURM_STEP_ID"] = step;
    expect_world(discover(with_step), 0, 1, 0, 1, Starter::kNone);
  }
}

// Each would be a world of one, and all would write the same files.
TEST(World, RanksOfLaunchersThatAreNotJoinedAreRefused) {
  for (const auto& [rank, size] : std::map<std::string, std::string>{{"PMI_RANK", "PMI_SIZE"},
                                                                     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
                                                                     {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
                                                                     {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"}}) {
    EXPECT_THAT(complaint({{rank, "1"}, {size, "3"}}), HasSubstr(rank + " and " + size + " are set"));
    EXPECT_THAT(complaint({{rank, "0"}}), HasSubstr(rank + " is set"));
    expect_world(discover({{rank, "0"}, {size, "1"}}), 0, 1, 0, 1, Starter::kNone);
    expect_world(discover({{rank, "1"}, {size, "3"}, {"RANK", "1"}, {"WORLD_SIZE", "3"}}), 1, 3, 1, 3,
                 Starter::kTorchrun);
  }
  EXPECT_THAT(complaint({{"PALS_RANKID", "0"}}), HasSubstr("HPE's mpiexec"));
  EXPECT_THAT(complaint({{"PMIX_RANK", "2"}}), HasSubstr("prterun"));
}

TEST(World, ASlurmStepWithoutPmixIsRefusedOrJoinsOverTcp) {
  const Variables step = {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}};
  EXPECT_THAT(complaint(step), HasSubstr("srun started 2 ranks without PMIx"));
  Variables meeting = step;
  meeting["MASTER_ADDR"] = "node7";
  const World world = discover(meeting);
  EXPECT_TRUE(world.over_tcp());
  EXPECT_EQ(world.rendezvous.host, "node7");
}

TEST(World, HalfASetNamesBothVariables) {
  EXPECT_EQ(complaint({{"RANK", "1"}}), "RANK is set in the environment, but WORLD_SIZE is not");
  EXPECT_EQ(complaint({{"WORLD_SIZE", "2"}}), "WORLD_SIZE is set in the environment, but RANK is not");
  EXPECT_THAT(complaint({{"OMPI_COMM_WORLD_SIZE", "2"}}), HasSubstr("OMPI_COMM_WORLD_RANK is not"));
  EXPECT_THAT(complaint({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}}), HasSubstr("SLURM_NTASKS is not"));
  EXPECT_THAT(complaint({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}}),
              HasSubstr("LOCAL_RANK is not"));
}

TEST(World, GarbageIsNamed) {
  for (const char* bad : {"", "x", "1x", " 1", "-1", "1.0", "99999999999999999999", "4294967296"})
    EXPECT_THAT(complaint({{"RANK", bad}, {"WORLD_SIZE", "2"}}), HasSubstr(fmt::format("RANK=\"{}\"", bad)));
  EXPECT_THAT(complaint({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE=\"0\""));
  EXPECT_THAT(complaint({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "zero"}}),
              HasSubstr("LOCAL_RANK=\"zero\""));
}

// Memory is taken for each rank: this is not the number of them.
TEST(World, HugeSizesAreRefusedBeforeMemoryIsTaken) {
  for (const char* size : {"2147483647", "65537"})
    EXPECT_THAT(complaint({{"RANK", "0"}, {"WORLD_SIZE", size}}),
                AllOf(HasSubstr(fmt::format("WORLD_SIZE=\"{}\"", size)), HasSubstr("from 1 to 65536")));
}

TEST(World, Contradictions) {
  EXPECT_EQ(complaint({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "RANK=2 is not below WORLD_SIZE=2");
  EXPECT_EQ(complaint({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
            "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2");
  EXPECT_EQ(complaint({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "4"}}),
            "LOCAL_WORLD_SIZE=4 is above WORLD_SIZE=2");
}

// Numbers that no clock could count are refused, not computed with.
TEST(MakeGroup, TimeoutsHaveARange) {
  for (const double seconds :
       {0.0, -1.0, 1.1e6, 1e300, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    GroupOptions options;
    options.timeout_seconds = seconds;
    EXPECT_THROWN(UsageError, "a timeout of ", make_group({}, options));
  }
  for (const double seconds : {1e-9, 1e6}) {
    GroupOptions options;
    options.timeout_seconds = seconds;
    EXPECT_EQ(make_group({}, options)->timeout(), duration_of(seconds));
  }
}

}  // namespace
}  // namespace lockstep::comm
