#include <gtest/gtest.h>

#include "comm/agree.h"
#include "tests/support/ranks.h"

namespace lockstep::comm {
namespace {

using comm::bind_to_share;
using devices::allowed_cpus;
using devices::Binding;
using devices::CpuMask;
using devices::discover_cores;
using devices::Locality;
using devices::set_allowed_cpus;
using testing::group;

EnvLookup bind(const char* value) {
  return [value](const std::string&) { return std::optional<std::string>(value); };
}

/// Every rank's affinity, as text.
std::vector<std::string> affinities() { return group().all_gather_text(allowed_cpus().to_string()); }

// run_ranks starts the ranks unbound: all have the same affinity, and divide it.
TEST(BindRanks, EqualAffinitiesAreDivided) {
  const CpuMask all = allowed_cpus();
  const auto cores = static_cast<int>(discover_cores(all).size());
  ASSERT_EQ(affinities(), std::vector<std::string>(static_cast<std::size_t>(group().size()), all.to_string()));

  const Binding unbound = bind_to_share(group(), bind("none"));
  EXPECT_EQ(allowed_cpus(), all);
  const Binding bound = bind_to_share(group(), bind("core"));
  EXPECT_EQ(unbound.cores, bound.cores);
  EXPECT_EQ(bound.oversubscribed, cores < group().size());
  EXPECT_GE(bound.cores, 1);
  EXPECT_EQ((allowed_cpus() & ~all).count(), 0u);
  EXPECT_EQ(static_cast<int>(discover_cores(allowed_cpus()).size()), bound.cores);

  CpuMask together;
  for (const std::string& text : affinities()) together |= CpuMask(text);
  if (!bound.oversubscribed) {
    EXPECT_EQ(together, all);
    // Now everybody has its own: a second call finds nothing to divide.
    const CpuMask mine = allowed_cpus();
    EXPECT_EQ(bind_to_share(group(), bind("core")).cores, bound.cores);
    EXPECT_EQ(allowed_cpus(), mine);
  }
  set_allowed_cpus(all);
}

// Every rank's device is close to the first processor: they divide its core.
TEST(BindRanks, RanksOfOneNodeDivideItsCores) {
  const CpuMask all = allowed_cpus();
  Locality device;
  device.node = 0;
  for (std::size_t cpu = 0; cpu < all.size() && device.cpus.none(); ++cpu) device.cpus[cpu] = all[cpu];
  const Binding bound = bind_to_share(group(), bind("core"), device);
  EXPECT_EQ(bound.cores, 1);
  EXPECT_TRUE((allowed_cpus() & device.cpus).any());
  EXPECT_EQ(discover_cores(allowed_cpus()).size(), 1u);
  set_allowed_cpus(all);
  // Those of odd ranks are nowhere in particular.
  const bool odd = group().rank() % 2 == 1;
  bind_to_share(group(), bind("core"), odd ? Locality{} : device);
  EXPECT_TRUE(odd || (allowed_cpus() & device.cpus).any());
  EXPECT_TRUE((allowed_cpus() & ~all).none());
  set_allowed_cpus(all);
}

}  // namespace
}  // namespace lockstep::comm
