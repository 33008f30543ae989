#include "simulate/step_profile.h"

#include <gmock/gmock.h>

#include "lockstep/base/error.h"
#include "tests/simulate/example_profile.h"

namespace lockstep::simulate {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(StepProfile, IsReadAsItWasWritten) {
  StepProfile p = example_profile();
  p.gradients[3].slot.dtype = DType::kF64;
  p.memory_bytes = 123456789;
  const StepProfile q = parse_profile(text_of(p), "file");
  EXPECT_EQ(text_of(q), text_of(p));
  EXPECT_EQ(q.gradients.size(), 10u);
  EXPECT_EQ(q.gradient_bytes(), 44u << 20);
}

TEST(StepProfile, BucketsTakeGradientsAsTheyBecomeReady) {
  StepProfile p = example_profile();
  p.gradients.resize(4);
  p.gradients[0].ready_ms = 5;
  p.gradients[1].ready_ms = 9;
  p.gradients[2].ready_ms = 5;
  p.gradients[3].ready_ms = 1;
  EXPECT_THAT(p.ready_order(), ElementsAre(3, 2, 0, 1));
}

TEST(StepProfile, IsScaledToAnotherDevicesSteps) {
  StepProfile p = example_profile();
  p.scale_to(55);
  EXPECT_DOUBLE_EQ(p.backward_ms, 50);
  EXPECT_DOUBLE_EQ(p.update_ms, 5);
  EXPECT_DOUBLE_EQ(p.gradients[9].ready_ms, 10);
  EXPECT_DOUBLE_EQ(p.step_ms[4], 60.5);
}

TEST(StepProfile, NoPartOfOneIsOne) {
  const std::string whole = text_of(example_profile());
  for (std::size_t bytes = 0; bytes + 2 < whole.size(); bytes += 7)
    EXPECT_THROW(parse_profile(whole.substr(0, bytes), "file"), IoError) << bytes;
}

TEST(StepProfile, ImpossibleValuesAreRefusedByName) {
  const std::string whole = text_of(example_profile());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = whole;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return changed.replace(at, from.size(), to);
  };
  const std::pair<std::string, const char*> cases[] = {
      {with("\"format\":1", "\"format\":2"), "another version"},
      {with("step profile", "something else"), "no profile"},
      {with("\"batch\":8", "\"batch\":0"), "'batch'"},
      {with("\"batch\":8", "\"batch\":-8"), "'batch'"},
      {with("\"threads\":1", "\"threads\":1.5"), "'threads'"},
      {with("\"backward_ms\":100.0", "\"backward_ms\":0"), "no time"},
      {with("\"backward_ms\":100.0", "\"backward_ms\":null"), "'backward_ms'"},
      {with("\"rows\":1024", "\"rows\":0"), "'rows'"},
      {with("\"dtype\":\"f32\"", "\"dtype\":\"bf16\""), "dtype"},
      {with("\"ready_ms\":92", "\"ready_ms\":-1"), "'ready_ms'"},
      {with("[105.0", "[\"105\""), "'step_ms'"},
      {with("[105.0", "[0"), "no time"},
      {with("\"model\":\"example\",", ""), "'model'"},
  };
  for (const auto& [text, problem] : cases) {
    try {
      parse_profile(text, "file");
      ADD_FAILURE() << problem;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(problem));
      EXPECT_THAT(error.remedy(), HasSubstr("--profile-out"));
    }
  }
}

}  // namespace
}  // namespace lockstep::simulate
