// On the CPU: the gradients of all operators are checked, and this is the device.
#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/nn/gradient_backend.h"
#include "tests/nn/operator_cases.h"

namespace lockstep::nn {

namespace {

// "conv2d" → "Conv2d", "batch_norm" → "BatchNorm".
std::string camel(const std::string& snake) {
  std::string text;
  bool upper = true;
  for (const char c : snake) {
    if (c != '_') text += upper ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    upper = c == '_';
  }
  return text;
}

TEST(GradientCoverage, EveryOperatorOfTheHeaderIsChecked) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/include/lockstep/nn/autograd/functions.h");
  ASSERT_TRUE(file);
  std::stringstream header;
  header << file.rdbuf();
  const std::string text = header.str();
  const std::regex declaration(R"(\n(?:inline )?(?:Var|Loss) (\w+)\(Tape&)");
  std::set<std::string> operators;
  for (std::sregex_iterator it(text.begin(), text.end(), declaration); it != std::sregex_iterator(); ++it)
    operators.insert((*it)[1]);
  EXPECT_GE(operators.size(), 9u) << "the pattern no longer finds the declarations";

  std::set<std::string> tests;
  const auto* const suite = ::testing::UnitTest::GetInstance();
  for (int s = 0; s < suite->total_test_suite_count(); ++s)
    if (const std::string name = suite->GetTestSuite(s)->name(); name == "Gradient" || name == "Layout")
      for (int t = 0; t < suite->GetTestSuite(s)->total_test_count(); ++t)
        tests.insert(suite->GetTestSuite(s)->GetTestInfo(t)->name());
  std::size_t rows = 0;
  const auto note = [&](const auto& each, auto, const char* name) {
    tests.insert(camel(name));
    EXPECT_EQ(static_cast<std::size_t>(each.op), rows++) << name << ": one row each, in their order";
  };
  for_cases(testing::kUnaryCases, note);
  EXPECT_EQ(rows, kUnaryOps);
  rows = 0;
  for_cases(testing::kBinaryCases, note);
  EXPECT_EQ(rows, kBinaryOps);
  rows = 0;
  testing::for_operators([&](const testing::OperatorCase& each, const auto& op) {
    tests.insert(camel(op.kName));
    EXPECT_EQ(each.op.index(), rows++) << op.kName << ": one row each, in their order";
  });
  EXPECT_EQ(rows, std::variant_size_v<Operator::variant>);
  for (const auto& name : operators) {
    const auto at = tests.lower_bound(camel(name));
    EXPECT_TRUE(at != tests.end() && at->starts_with(camel(name))) << name << " has no gradient check";
  }
}

}  // namespace
}  // namespace lockstep::nn
