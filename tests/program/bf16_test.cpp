// Training in bf16 on the CPU: any number of ranks, shards, checkpoints, and processors that have no bf16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "tests/program/command.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

const std::string kTrainF32 = "lockstep train cnn --data digits --device cpu --threads 1 --seed 3 ";
const std::string kTrainBf16 = kTrainF32 + "--precision bf16 ";

/// Where this CPU has no AVX-512, what is tested instead is that everything says so.
class Bf16Training : public ::testing::Test {
 protected:
  Outcome run(const std::string& line) { return lockstep::testing::run(line, directory.path()); }

  std::string hash_of(const std::string& line) {
    const Outcome outcome = run(line);
    if (how == "not on this CPU") {
      EXPECT_EQ(outcome.code, 2) << line;
      EXPECT_THAT(outcome.out + outcome.err, HasSubstr("bf16 needs AVX-512 at least"));
      return "refused";
    }
    EXPECT_EQ(outcome.code, 0) << line << outcome.out << outcome.err;
    std::smatch found;
    EXPECT_TRUE(std::regex_search(outcome.out, found, std::regex("params_sha256 ([0-9a-f]{64})"))) << outcome.out;
    return found[1];
  }

  TemporaryDirectory directory;
  const std::string how = bf16_of_cpu();
};

TEST_F(Bf16Training, ShardsHaveTheSameBitsOnAnyNumberOfRanks) {
  const std::string flags = "--global-batch 40 --shards 4 --steps 5";
  const std::string one = hash_of(kTrainBf16 + flags);
  for (const char* ranks : {"2", "3"})
    EXPECT_EQ(hash_of("lockstep launch -n " + std::string(ranks) + " -- " + kTrainBf16 + flags), one) << ranks;
}

TEST_F(Bf16Training, RanksHaveTheSameParameters) {
  hash_of("lockstep launch -n 2 -- " + kTrainBf16 + "--steps 6 --batch 7 --check-replicas 1");
}

// Parameters and moments are f32, and the copies of bf16 are made of them.
TEST_F(Bf16Training, ResumesToTheBit) {
  for (const std::string model : {"cnn", "lstm"}) {
    const std::string train = std::regex_replace(kTrainBf16, std::regex("cnn"), model);
    const std::string whole = hash_of(train + "--steps 7");
    if (whole == "refused") continue;
    const std::string kept = train + "--checkpoint-dir kept-" + model + " --checkpoint-every 3 --keep 9 ";
    EXPECT_EQ(hash_of(kept + "--steps 7"), whole);
    for (const char* later : {"6", "7"})
      std::filesystem::remove_all(directory.path() / ("kept-" + model) / ("step-000000000" + std::string(later)));
    EXPECT_EQ(hash_of(kept + "--steps 7 --resume auto"), whole);
  }
}

TEST_F(Bf16Training, IsNotF32) {
  const std::string bf16 = hash_of(kTrainBf16 + "--steps 2");
  if (bf16 == "refused") return;
  EXPECT_NE(hash_of(kTrainF32 + "--steps 2"), bf16);
}

TEST_F(Bf16Training, SaysOnceWhereItIsEmulated) {
  const std::string capped = "ONEDNN_MAX_CPU_ISA=AVX512_CORE lockstep ";
  const bool emulates = run(capped + "version").out.find("bf16: emulated") != std::string::npos;
  const Outcome outcome = run(capped + "launch -n 2 -- " + kTrainBf16 + "--steps 2");
  const std::string all = outcome.out + outcome.err, warning = "oneDNN emulates them, which is slower than f32";
  EXPECT_EQ(outcome.code, emulates ? 0 : 2) << all;
  const auto first = all.find(warning);
  EXPECT_EQ(first != std::string::npos, emulates) << all;
  if (emulates) {
    EXPECT_EQ(all.find(warning, first + 1), std::string::npos) << all;
  }
}

// The first line of a run, and of a benchmark; also where the processor has more than oneDNN may use.
TEST_F(Bf16Training, SaysWithWhichInstructions) {
  if (how == "not on this CPU") GTEST_SKIP() << "it is refused";
  for (const std::string capped : {"", "ONEDNN_MAX_CPU_ISA=AVX512_CORE "}) {
    const std::string by = capped.empty() ? how : "emulated, slower than f32";
    const Outcome trained = run(capped + kTrainBf16 + "--steps 1");
    EXPECT_THAT(trained.out + trained.err, HasSubstr(", bf16 (" + by + ")"));
    const std::string bench = capped + "lockstep bench step linear --batch 4 --steps 2 --warmup-steps 1 ";
    EXPECT_THAT(run(bench + "--precision bf16").out, HasSubstr(", bf16 (" + by + ")"));
    EXPECT_THAT(run(bench + "--precision bf16 --json").out, HasSubstr("\"bf16_by\":\"" + by + "\""));
    EXPECT_EQ(run(bench + "--json").out.find("bf16_by"), std::string::npos);
  }
  const Outcome f32 = run(kTrainF32 + "--steps 1");
  EXPECT_EQ((f32.out + f32.err).find(", bf16"), std::string::npos);
}

TEST_F(Bf16Training, TheVersionSaysHow) {
  EXPECT_THAT(run("ONEDNN_MAX_CPU_ISA=AVX2 lockstep version").out, HasSubstr("bf16: not on this CPU"));
  EXPECT_THAT(how, ::testing::AnyOf("AMX", "AVX512-BF16", "emulated, slower than f32", "not on this CPU"));
}

}  // namespace
}  // namespace lockstep::testing
