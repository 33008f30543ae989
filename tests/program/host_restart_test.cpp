// Trainings on several hosts that lose one, continue on the rest, and grow back. All hosts are this machine: a script
// in the place of ssh runs what it is given here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "tests/program/command.h"
#include "tests/program/events.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kTrainOnHosts =
    "lockstep train cnn --data digits --global-batch 30 --quiet --threads 1 --metrics m.jsonl --steps ";
const std::string kOnHostsResumes = " --checkpoint-dir ck --checkpoint-every 5 --keep 2 --resume auto ";

/// A shell's words for a job with $pid. `lose HOST` kills its helper after two more checkpoints; with a second word the
/// host does not answer from then on. `until_event NAME N` waits for the N-th event in the history.
const std::string kHostWords =
    "newest() { ls ck 2>/dev/null | grep step | sort | tail -n 1; }\n"
    "newer() { from=$(newest); while [ \"$(newest)\" = \"$from\" ] && kill -0 $pid; do sleep 0.01; done; }\n"
    "lose() { newer; newer; [ $# = 1 ] || : >down-$1; kill -KILL $(cat helper-$1); }\n"
    "until_event() { until [ $(grep -c $1 logs/restarts.jsonl) -ge $2 ] || ! kill -0 $pid; do sleep 0.01; done; }\n";

class RestartedHosts : public ::testing::Test {
 protected:
  RestartedHosts() {
    const auto path = directory_.path() / "agent";
    std::ofstream(path)
        << "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\nhost=$1; shift; cd "
        << directory_.path().string()
        << "\n[ -e down-$host ] && { echo 'ssh: connect to host: No route to host' >&2; exit 255; }\n"
           "echo $$ >helper-$host\n"
           "[ -e other-$host ] && { mkdir -p disk-$host/ck ck; exec unshare -rm sh -c \"mount --bind disk-$host/ck "
           "ck && exec $*\"; }\n"
           "exec sh -c \"exec $*\"\n";
    ::chmod(path.c_str(), 0755);
  }
  Outcome launch(const std::string& flags, const std::string& train, const std::string& meanwhile) {
    return run(kHostWords + "export OMPI_MCA_plm_rsh_agent=$PWD/agent\nlockstep launch --log-dir logs " + flags +
                   " -- " + train + " & pid=$!\n" + meanwhile + "\nwait $pid",
               directory_.path());
  }
  std::vector<nlohmann::json> history(const char* event) const {
    return events_of(directory_.path() / "logs" / "restarts.jsonl", event);
  }
  Metrics metrics() const { return read_metrics(directory_.path() / "m.jsonl"); }

  TemporaryDirectory directory_;
};

TEST_F(RestartedHosts, AHostThatIsLostForAMomentChangesNoBit) {
  ended_well(launch("--hosts a:1,b:2", kTrainOnHosts + "400", ""));
  const std::string hash = metrics().final.value("params_sha256", "none");
  std::filesystem::remove(directory_.path() / "m.jsonl");
  const auto outcome = ended_well(launch("--hosts a:1,b:2 --max-restarts 9", kTrainOnHosts + "400" + kOnHostsResumes,
                                         "lose b; until_event resumed 1; lose a; until_event resumed 2; lose b"));
  EXPECT_EQ(metrics().final.value("params_sha256", "none"), hash);
  EXPECT_EQ(metrics().losses.size(), 400u);
  EXPECT_EQ(history("restart").size(), 3u) << outcome.err;
  EXPECT_EQ(history("resumed").size(), 3u);
}

TEST_F(RestartedHosts, TheFirstOneMayGoAndComeBack) {
  const auto outcome =
      ended_well(launch("--hosts a:1,b:2 --max-restarts 9 --min-ranks 1", kTrainOnHosts + "2000" + kOnHostsResumes,
                        "lose a down; until_event resumed 1; rm down-a; until_event '\"grow\"' 1"));
  EXPECT_EQ(metrics().losses.size(), 2000u);
  EXPECT_EQ(metrics().final["world_size"], 3);
  ASSERT_EQ(history("restart").size(), 1u) << outcome.err;
  EXPECT_EQ(history("restart")[0]["ranks"], 2);
  ASSERT_EQ(history("grow").size(), 1u) << outcome.err;
  EXPECT_EQ(history("grow")[0]["ranks"], 3);
  EXPECT_EQ(history("grow")[0]["lost_steps"], 0);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("restart 1 of 9: host a (rank 0) was lost"), HasSubstr("the job grows: ")));
}

// A host whose working directory is on a disk of its own, which --checkpoint-dir is relative to.
TEST_F(RestartedHosts, ADiskOfTheFirstHostIsWarnedOf) {
  const std::string train = kTrainOnHosts + "20" + kOnHostsResumes;
  auto outcome = ended_well(launch("--hosts a:1,localhost:1,b:1 --max-restarts 9", train, ""));
  EXPECT_EQ(outcome.err.find("warning: host"), std::string::npos) << outcome.err;
  for (const auto& entry : std::filesystem::directory_iterator(directory_.path() / "ck"))
    EXPECT_EQ(entry.path().filename().string().find(".probe"), std::string::npos);
  // For every process of host b the directory is another one.
  if (run("unshare -rm true", directory_.path()).code != 0) GTEST_SKIP() << "no mount namespaces here";
  std::ofstream(directory_.path() / "other-b") << "yes";
  outcome = ended_well(launch("--hosts a:1,b:1 --max-restarts 9", train, ""));
  EXPECT_THAT(outcome.err,
              HasSubstr("warning: host b does not see the checkpoints in ck of host a: if that is lost, the "
                        "job cannot resume there → put --checkpoint-dir on a file system that all hosts"));
}

}  // namespace
}  // namespace lockstep::testing
