// What checkpoints say of their data, and which other data a run that resumes is refused.
#include "trainer/resume.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/data/open.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::trainer {
namespace {

using checkpoint::Facts;
using data::Dataset;
using ::testing::HasSubstr;
using ::testing::Not;

// Sample i is i, but for those that a test changes.
class Numbers final : public Dataset {
 public:
  explicit Numbers(std::uint64_t size, std::vector<std::string> names = {}, std::optional<std::uint64_t> changed = {})
      : Dataset({.name = "numbers", .size = size, .dims = {2}, .classes = 2, .class_names = std::move(names)}),
        changed_(changed) {}
  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    std::ranges::fill(x, static_cast<float>(index) + (index == changed_ ? 0.5F : 0.0F));
    label = static_cast<std::int32_t>(index % 2);
  }

 private:
  std::optional<std::uint64_t> changed_;
};

// All kinds of arrays, of which one is changed.
class Everything final : public Dataset {
 public:
  explicit Everything(int changed)
      : Dataset({.name = "everything",
                 .size = 3,
                 .dims = {4},
                 .classes = 5,
                 .tokens = true,
                 .own_targets = true,
                 .target_dims = {2},
                 .numeric_targets = true,
                 .further_inputs = {{.name = "mask", .dims = {4}}, {.name = "length", .integers = true}}}),
        changed_(changed) {}
  void read_sample(std::uint64_t, const data::Sample& sample) const override {
    std::ranges::fill(sample.tokens, changed_ == 0 ? 1 : 0);
    std::ranges::fill(sample.targets, changed_ == 1 ? 1.0F : 0.0F);
    std::ranges::fill(sample.further[0].numbers, changed_ == 2 ? 1.0F : 0.0F);
    std::ranges::fill(sample.further[1].integers, changed_ == 3 ? 1 : 0);
  }

 private:
  int changed_;
};

Facts facts_of(const Dataset& dataset) {
  comm::SelfGroup alone{std::chrono::seconds(10)};
  return data_facts_of(dataset, alone);
}

std::string complaint(const Facts& there, const Facts& here, bool accepted = false) {
  try {
    check_same_data(there, here, "c/step-1", accepted);
  } catch (const CheckpointError& error) {
    return error.what() + (" → " + error.remedy());
  }
  return "";
}

TEST(DataFacts, AreTheSameForTheSameData) {
  for (const std::uint64_t size : {1u, 2u, 63u, 64u, 65u, 1000u})
    EXPECT_EQ(facts_of(Numbers(size)), facts_of(Numbers(size))) << size;
  EXPECT_EQ(complaint(facts_of(Numbers(7)), facts_of(Numbers(7))), "");
  const auto digits = data::open_data("digits", {});
  EXPECT_EQ(facts_of(*digits.train), facts_of(*data::open_data("digits", {}).train));
  EXPECT_NE(facts_of(*digits.train), facts_of(*digits.validation));
}

TEST(DataFacts, SmallSetsAreHashedWhole) {
  const Facts there = facts_of(Numbers(1000));
  for (const std::uint64_t changed : {0u, 1u, 500u, 998u, 999u})
    EXPECT_THAT(complaint(there, facts_of(Numbers(1000, {}, changed))),
                HasSubstr("checkpoint c/step-1 is of other data: 1 of 64 digests of its samples are others → give the "
                          "data that it was made with, or add --resume-data-changed"))
        << changed;
}

TEST(DataFacts, EveryArrayCounts) {
  const Facts there = facts_of(Everything(-1));
  for (int changed = 0; changed < 4; ++changed) EXPECT_NE(facts_of(Everything(changed)), there) << changed;
}

TEST(DataFacts, NamesOfClassesCount) {
  const Facts there = facts_of(Numbers(8, {"cat", "dog", "owl"}));
  const std::string said = complaint(there, facts_of(Numbers(8, {"cat", "owl", "dog"})));
  EXPECT_THAT(said, HasSubstr("class 1 is 'dog' there and 'owl' here, and 1 more differ → "));
  EXPECT_THAT(said, Not(HasSubstr("digests")));
  EXPECT_THAT(complaint(there, facts_of(Numbers(8, {"cat", "dog"}))), HasSubstr("class names: 3 there and 2 here"));
  EXPECT_EQ(complaint(there, facts_of(Numbers(8, {"cat", "owl", "dog"})), /*accepted=*/true), "");
  // Many are one digest; bytes that are no UTF-8 are as they come back from a manifest.
  std::vector<std::string> many;
  for (int i = 0; i < 10'000; ++i) many.push_back("class " + std::to_string(i));
  const Facts of_many = facts_of(Numbers(8, many));
  std::swap(many[17], many[18]);
  EXPECT_THAT(complaint(of_many, facts_of(Numbers(8, many))), HasSubstr("class names differ → "));
  EXPECT_EQ(complaint(facts_of(Numbers(8, {"\xff"})), facts_of(Numbers(8, {"\xff"}))), "");
}

TEST(DataFacts, AnAlphabetCannotBeAnother) {
  const testing::TemporaryDirectory directory;
  const auto facts_of_text = [&](const std::string& line) {
    const std::string path = (directory.path() / "t.txt").string();
    std::ofstream file(path);
    for (int i = 0; i < 40; ++i) file << line;
    file.close();
    return facts_of(*data::open_data("text:" + path, {.context = 4}).train);
  };
  const Facts there = facts_of_text("aqüz");
  for (const bool accepted : {false, true}) {
    const std::string said = complaint(there, facts_of_text("aQßz"), accepted);
    EXPECT_THAT(said, HasSubstr("the alphabet has 'q', 'ü' there and 'Q', 'ß' here"));
    EXPECT_THAT(said, HasSubstr("give the text that it was made with"));
  }
  EXPECT_THAT(complaint(there, facts_of_text("zaqü")), HasSubstr("digests"));
  EXPECT_EQ(complaint(there, facts_of_text("zaqü"), /*accepted=*/true), "");
}

TEST(DataFacts, UnknownFactsAreNotCompared) {
  EXPECT_EQ(complaint({}, facts_of(Numbers(8))), "");
  EXPECT_EQ(complaint(facts_of(Numbers(8)), {}), "");
  EXPECT_EQ(complaint({{"class names", "["}, {"of a later version", "1"}}, {{"class names", "["}}), "");
  EXPECT_THAT(complaint({{"class names", "[[[[\"a\"]]]]"}}, {{"class names", "[1]"}}), HasSubstr("class names differ"));
}

}  // namespace
}  // namespace lockstep::trainer
