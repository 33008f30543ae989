// What a run says on stdout: of its files, and nothing where that is asked for or nobody reads it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/program/command.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const std::string kShort = "lockstep train mlp --hidden 8 --data digits --global-batch 96 --threads 1 --epochs 3 ";
const std::string kFiles = "--save w.safetensors --trace t.json --checkpoint-dir c ";

TEST(ProgressOfARun, EachFileHasALine) {
  const TemporaryDirectory directory;
  for (const int ranks : {1, 2}) {
    const auto outcome =
        run_well("rm -rf c; " + on_ranks(ranks) + kShort + kFiles + "--log-every 20", directory.path());
    for (const char* name : {"w.safetensors", "t.json"})
      EXPECT_THAT(outcome.out, ContainsRegex("\nsaved " + std::string(name) + ": [0-9.]+ [kM]?B in [0-9.]+ s\n"));
    EXPECT_THAT(outcome.out, ContainsRegex("\nstep 15  checkpoint of [0-9.]+ [kM]B written in [0-9.]+ s, "));
    EXPECT_THAT(outcome.out,
                ContainsRegex("\nepoch 2/3  step 20/45  loss [0-9.]+  lr 0.001  [0-9.]+ samples/s  [0-9.e-]+ s/epoch  "
                              "elapsed [0-9:]+  ETA [0-9:]+\n"));
    EXPECT_THAT(outcome.out, ContainsRegex("\nepoch 1/3  step 15  validation loss [0-9.]+  accuracy [0-9.]+ % of 360, "
                                           "the best so far  "));
  }
  const auto best = run_well(kShort + "--save-best accuracy --save best.safetensors", directory.path());
  EXPECT_THAT(best.out, ContainsRegex(", the best so far [^\n]*\nsaved best.safetensors: [0-9.]+ kB in [0-9.]+ s\n"));
  const std::string eval = "lockstep eval mlp --data digits --weights w.safetensors --predictions p.csv ";
  EXPECT_THAT(run_well(eval, directory.path()).out, ContainsRegex("\nsaved p.csv: [0-9.]+ [kM]B in [0-9.]+ s\n"));
  EXPECT_THAT(run_well(eval + "--json", directory.path()).out, AllOf(StartsWith("{"), Not(HasSubstr("saved"))));
}

TEST(ProgressOfARun, QuietIsSilent) {
  const TemporaryDirectory directory;
  for (const int ranks : {1, 2}) {
    const auto outcome = run_well("rm -rf c; " + on_ranks(ranks) + kShort + kFiles + "--quiet", directory.path());
    EXPECT_EQ(outcome.out, "");
    // Of two ranks on a busy machine one may hold the other up.
    for (const std::string& line : lines_of(outcome.err)) EXPECT_THAT(line, HasSubstr("holds the others up"));
  }
  const auto diverged = run(kShort + "--lr 1e30 --quiet", directory.path());
  EXPECT_THAT(diverged, fails_with(7, "at step"));
  EXPECT_EQ(diverged.out, "");
}

TEST(ProgressOfARun, NobodyHasToReadIt) {
  const TemporaryDirectory directory;
  const auto closed = run_well("{ " + kShort + "--log-every 1 --save w.safetensors; echo $? >code; } 2>&1 | head -n 1",
                               directory.path());
  EXPECT_EQ(lines_of(closed.out).size(), 1u);
  EXPECT_EQ(read_file(directory.path() / "code"), "0\n");
  EXPECT_TRUE(std::filesystem::exists(directory.path() / "w.safetensors"));
  const auto full = run_well(kShort + "--save v.safetensors >/dev/full", directory.path());
  EXPECT_THAT(full.err, HasSubstr("standard output: No space left on device"));
  EXPECT_TRUE(std::filesystem::exists(directory.path() / "v.safetensors"));
}

}  // namespace
}  // namespace lockstep::testing
