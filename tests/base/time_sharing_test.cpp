#include "base/cpu.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace lockstep {
namespace {

EnvLookup environment(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
}

TEST(OpenmpSpinCount, IsAFractionOfLibgompsOwn) {
  const auto spins = openmp_spin_count(environment({}), 2);
  ASSERT_TRUE(spins);
  EXPECT_GE(std::stol(*spins), 100);
  EXPECT_LE(std::stol(*spins), 300'000);
}

TEST(OpenmpSpinCount, RespectsTheUsersSetting) {
  EXPECT_FALSE(openmp_spin_count(environment({{"GOMP_SPINCOUNT", "0"}}), 8));
  EXPECT_FALSE(openmp_spin_count(environment({{"OMP_WAIT_POLICY", "active"}}), 8));
}

TEST(OpenmpSpinCount, NeedsAnotherThreadToWaitFor) { EXPECT_FALSE(openmp_spin_count(environment({}), 1)); }

TEST(OpenmpSpinCount, KeepsTheProcessUnderValgrind) {
  EXPECT_FALSE(openmp_spin_count(environment({{"LD_PRELOAD", "/usr/libexec/valgrind/vgpreload_core.so"}}), 8));
  EXPECT_TRUE(openmp_spin_count(environment({{"LD_PRELOAD", "/usr/lib/libother.so"}}), 8));
}

}  // namespace
}  // namespace lockstep
