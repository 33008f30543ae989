// Lists of families that have names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "lockstep/base/settings.h"
#include "tests/support/refusal.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Fruit {
  std::string name;
  int weight = 0;
};
struct Tree {
  std::vector<std::string> all;
  std::vector<std::string> names() const { return all; }
};

const Fruit kApple{"apple", 1}, kPear{"pear", 2};

template <class Family>
std::string refusal(Registry<Family>& registry, const Family& family) {
  const auto before = registry.all();
  const auto error = testing::thrown<UsageError>([&] { registry.add(family); });
  EXPECT_EQ(registry.all(), before);
  return error.what();
}

TEST(Registry, FindsFamiliesByName) {
  const Registry<Fruit> fruit("fruit", {&kApple, &kPear});
  EXPECT_EQ(fruit.find("pear"), &kPear);
  EXPECT_EQ(fruit.find("plum"), nullptr);
  EXPECT_EQ(&fruit.named("apple"), &kApple);
  EXPECT_THAT(fruit.names(), ElementsAre("apple", "pear"));
  EXPECT_THAT(testing::thrown<UsageError>([&] { fruit.named("paer"); }).line(),
              HasSubstr("unknown fruit 'paer' → did you mean 'pear'?"));
}

TEST(Registry, AcceptsFamiliesOfAProgram) {
  Registry<Fruit> fruit("fruit", {&kApple, &kPear});
  fruit.add({"plum", 3});
  const Fruit* const plum = fruit.find("plum");
  fruit.add({"fig", 4});
  EXPECT_EQ(fruit.find("plum"), plum);  // where it was
  // The same name again replaces it, in its place; whoever has the old one may keep it.
  fruit.add({"plum", 5});
  EXPECT_THAT(fruit.names(), ElementsAre("apple", "pear", "plum", "fig"));
  EXPECT_EQ(fruit.named("plum").weight, 5);
  EXPECT_EQ(plum->weight, 3);
  EXPECT_EQ(refusal(fruit, {"apple", 6}), "a second fruit named 'apple'");
  EXPECT_THAT(refusal(fruit, {"an apple", 6}), HasSubstr("fruit"));
}

TEST(Registry, FamiliesOfSeveralNames) {
  const Tree oak{{"oak", "quercus"}};
  Registry<Tree> trees("tree", {&oak});
  EXPECT_EQ(trees.find("quercus"), &oak);
  trees.add({{"elm", "ulmus"}});
  EXPECT_THAT(trees.names(), ElementsAre("oak", "quercus", "elm", "ulmus"));
  trees.add({{"elm", "ulmus"}});
  EXPECT_EQ(trees.all().size(), 2u);
  EXPECT_EQ(refusal(trees, {{"ash", "ulmus"}}), "a second tree named 'ulmus'");
  EXPECT_EQ(refusal(trees, {{"elm"}}), "a second tree named 'elm'");
  EXPECT_EQ(refusal(trees, {{"ash", "oak"}}), "a second tree named 'oak'");
}

}  // namespace
}  // namespace lockstep
