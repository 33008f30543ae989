// Sizes that no machine has: every subcommand that builds a model says so at once, and takes nothing.
#include <gmock/gmock.h>

#include "tests/program/command.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::testing {
namespace {

#if defined(LOCKSTEP_SANITIZED)
constexpr const char* kLimit = "";  // sanitizers reserve terabytes of addresses for themselves
#else
constexpr const char* kLimit = "ulimit -v 16000000; ";
#endif

class Memory : public ::testing::Test {
 protected:
  // One line, before anything is taken: a shell's limit on memory would end it otherwise, with another line.
  void expect_refused(const std::string& line, const std::string& what, bool one_line = true) {
    const Outcome outcome = run(kLimit + line, directory_.path());
    EXPECT_THAT(outcome, fails_with(4, "this run needs at least", what, " free"));
    if (one_line) {
      EXPECT_EQ(lines_of(outcome.err).size(), 1u) << line << "\n" << outcome.err;
    }
  }

  const std::filesystem::path& path() const { return directory_.path(); }

 private:
  TemporaryDirectory directory_;
};

constexpr const char* kHuge = " --data random:784,100 --hidden 1000000,1000000 --device cpu --quiet";

TEST_F(Memory, Train) {
  expect_refused(std::string("lockstep train mlp") + kHuge, "parameters 4.0 TB, gradients 4.0 TB, moments 8.0 TB");
  expect_refused(std::string("lockstep train mlp --optimizer sgd --momentum 0") + kHuge,
                 "parameters 4.0 TB, gradients 4.0 TB");
  expect_refused(std::string("lockstep train mlp --parallel dp --device cpu:0,1 --data random:784,100 --quiet ") +
                     "--hidden 1000000,1000000",
                 "parameters 8.0 TB");
}

TEST_F(Memory, ABatch) {
  expect_refused("lockstep train mlp --data random:784,16000000 --batch 16000000 --device cpu --quiet --hidden 1000000",
                 "activations");
}

TEST_F(Memory, BenchStep) {
  expect_refused("lockstep bench step mlp --hidden 1000000,1000000 --device cpu", "parameters 4.0 TB");
}

TEST_F(Memory, Infer) {
  expect_refused("lockstep infer mlp --hidden 1000000,1000000 --input random:1x784 --device cpu", "parameters 4.0 TB");
}

TEST_F(Memory, InferWithWeights) {
  run_well("lockstep train mlp --data digits --steps 1 --hidden 8 --quiet --save w.safetensors", path());
  expect_refused("lockstep infer mlp --weights w.safetensors --input random:16000000x64,200 --threads 200 --device cpu",
                 "activations");
}

TEST_F(Memory, EveryRankEnds) {
  expect_refused(std::string("lockstep launch -n 2 --no-prefix -- lockstep train mlp") + kHuge,
                 "for 2 ranks: parameters 4.0 TB", /*one_line=*/false);  // the launcher has its own
}

}  // namespace
}  // namespace lockstep::testing
