#include "options/table.h"

#include <gmock/gmock.h>

#include "tests/options/example_table.h"

namespace lockstep::options {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

NormalisedArgs normalised(std::vector<std::string> args) {
  Example example;
  return normalise(example_table(example), args);
}

TEST(Normalise, UnderscoresInFlagsAreDashes) {
  EXPECT_THAT(normalised({"--batch_size", "64"}).words, ElementsAre("--batch=64"));
  EXPECT_THAT(normalised({"--global_batch=64"}).words, ElementsAre("--global-batch=64"));
}

TEST(Normalise, ValuesKeepTheirUnderscoresAndEqualsSigns) {
  EXPECT_THAT(normalised({"--save", "a_b=c"}).words, ElementsAre("--save=a_b=c"));
  EXPECT_THAT(normalised({"--save=a_b=c"}).words, ElementsAre("--save=a_b=c"));
}

TEST(Normalise, SynonymsGetTheirCanonicalName) {
  for (const char* spelling : {"-n", "--n", "-np", "--np", "--nproc-per-node", "--nproc_per_node"})
    EXPECT_THAT(normalised({spelling, "4"}).words, ElementsAre("--np=4")) << spelling;
  EXPECT_THAT(normalised({"-n=4"}).words, ElementsAre("--np=4"));
  EXPECT_THAT(normalised({"-H", "a:4,b:4"}).words, ElementsAre("--hosts=a:4,b:4"));
  EXPECT_THAT(normalised({"--opt", "sgd"}).words, ElementsAre("--optimizer=sgd"));
  EXPECT_THAT(normalised({"--max-steps", "5"}).words, ElementsAre("--steps=5"));
}

TEST(Normalise, LettersOfNamesKeepTheirCase) { EXPECT_THAT(normalised({"-N", "4"}).words, ElementsAre("--N", "4")); }

TEST(Normalise, NegativeNumbersAndASingleDashAreValues) {
  EXPECT_THAT(normalised({"--lr", "-0.5"}).words, ElementsAre("--lr=-0.5"));
  EXPECT_THAT(normalised({"--lr", "-.5"}).words, ElementsAre("--lr=-.5"));
  EXPECT_THAT(normalised({"--save", "-"}).words, ElementsAre("--save=-"));
  EXPECT_THAT(normalised({"-5"}).words, ElementsAre("-5"));
}

TEST(Normalise, AMissingValueDoesNotEatTheNextFlag) {
  EXPECT_THAT(normalised({"--lr", "--quiet"}).words, ElementsAre("--lr", "--quiet"));
  EXPECT_THAT(normalised({"--lr", "--", "x"}).words, ElementsAre("--lr"));
  EXPECT_THAT(normalised({"--lr"}).words, ElementsAre("--lr"));
}

TEST(Normalise, FlagsWithoutValueLeaveTheNextWordAlone) {
  EXPECT_THAT(normalised({"--quiet", "cnn"}).words, ElementsAre("--quiet", "cnn"));
  EXPECT_THAT(normalised({"--bach", "64"}).words, ElementsAre("--bach", "64"));
}

TEST(Normalise, WhatFollowsTwoDashesIsUntouched) {
  const auto out = normalised({"-n", "2", "--", "prog", "--batch_size", "3", "--", "-n", "1"});
  EXPECT_THAT(out.words, ElementsAre("--np=2"));
  EXPECT_TRUE(out.has_program);
  EXPECT_THAT(out.program, ElementsAre("prog", "--batch_size", "3", "--", "-n", "1"));
}

TEST(Normalise, NothingAfterTwoDashes) {
  EXPECT_TRUE(normalised({"--"}).has_program);
  EXPECT_THAT(normalised({"--"}).program, IsEmpty());
  EXPECT_FALSE(normalised({"cnn"}).has_program);
}

TEST(Normalise, OddWordsPassThrough) {
  EXPECT_THAT(normalised({"", "-", "--=3", "---", "-=", "--lr="}).words,
              ElementsAre("", "-", "--=3", "---", "--=", "--lr="));
}

TEST(Normalise, EnvironmentNames) { EXPECT_EQ(environment_name("global-batch"), "LOCKSTEP_GLOBAL_BATCH"); }

}  // namespace
}  // namespace lockstep::options
