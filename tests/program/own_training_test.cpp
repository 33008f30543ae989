// A program of somebody else's that trains its own model on its own data with its own loss: examples/regression.cpp.
#include <gmock/gmock.h>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class OwnTraining : public ::testing::Test {
 protected:
  /// `regression` in `line` is the program.
  Outcome start(const std::string& line) { return run(line, directory_.path(), 120, REGRESSION_PROGRAM); }
  Metrics metrics(const std::string& name) { return read_metrics(directory_.path() / name); }

  TemporaryDirectory directory_;
};

TEST_F(OwnTraining, LearnsOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3}) {
    const auto outcome =
        ended_well(start(on_ranks(ranks) + "regression --epochs 6 --threads 1 --global-batch 32 --metrics m.jsonl"));
    EXPECT_THAT(outcome.out, HasSubstr("training net on waves (4000 samples)"));
    EXPECT_THAT(outcome.out, Not(HasSubstr("accuracy"))) << "targets are numbers";
    const Metrics all = metrics("m.jsonl");
    EXPECT_LT(all.final["loss"].get<double>(), 0.005) << ranks;
    EXPECT_TRUE(all.final["accuracy"].is_null());
    EXPECT_EQ(all.evaluations.size(), 6U);
    EXPECT_NEAR(all.losses.front(), 0.3, 0.1);
  }
}

// Another order of sums is all that the number of ranks changes.
TEST_F(OwnTraining, FirstLossesAreThoseOfOneRank) {
  const std::string rest = "regression --steps 5 --threads 1 --global-batch 32 --quiet --metrics ";
  ended_well(start(rest + "one.jsonl"));
  ended_well(start(on_ranks(3) + rest + "three.jsonl"));
  const auto one = metrics("one.jsonl").losses, three = metrics("three.jsonl").losses;
  ASSERT_EQ(one.size(), 5U);
  ASSERT_EQ(three.size(), 5U);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], three[i], 1e-6) << i;
}

TEST_F(OwnTraining, ResumesToTheSameBits) {
  const std::string command =
      on_ranks(2) + "regression --epochs 4 --threads 1 --global-batch 64 --quiet --checkpoint-dir c --keep 0 ";
  ended_well(start(command + "--metrics whole.jsonl"));
  for (const auto& entry : fs::directory_iterator(directory_.path() / "c"))
    if (entry.path().filename() > "step-0000000126") fs::remove_all(entry.path());
  const auto resumed = ended_well(start(command + "--resume auto --metrics resumed.jsonl"));
  EXPECT_EQ(metrics("resumed.jsonl").final["params_sha256"], metrics("whole.jsonl").final["params_sha256"]);
  EXPECT_EQ(metrics("resumed.jsonl").evaluations.front()["step"], 126) << "of the checkpoint, which comes before it";
}

TEST_F(OwnTraining, HasTheFlagsThatApply) {
  const auto help = ended_well(start("regression --help"));
  EXPECT_THAT(help.out, HasSubstr("Usage: regression [flags]"));
  for (const char* flag : {"--epochs", "--clip-norm", "--checkpoint-dir", "--momentum", "(default 0.02)", "cosine"})
    EXPECT_THAT(help.out, HasSubstr(flag));
  for (const char* flag : {"--data ", "--hidden", "--classes", "--context", "MODEL", "--vocab", "--cased"})
    EXPECT_THAT(help.out, Not(HasSubstr(flag)));
  EXPECT_THAT(help.out, HasSubstr("step (a tenth"));
  EXPECT_THAT(start("regression --hidden 3"),
              fails_with(2, "unknown flag --hidden on the command line → regression --help lists them all"));
  EXPECT_THAT(start("regression mlp").err, HasSubstr("regression takes flags only"));
  EXPECT_THAT(start("regression --momentum 0.9").err, HasSubstr("the optimizer is adamw"));
  EXPECT_THAT(start("regression --loss cross_entropy").err,
              HasSubstr("the targets of waves are numbers, and the loss cross_entropy takes labels"));
  ended_well(start("regression --loss squared_error --steps 2 --quiet"));
}

}  // namespace
}  // namespace lockstep::testing
