#include "comm/binding.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "comm/self_group.h"

namespace lockstep::comm {
namespace {

/// `count` cores of two processors each, `per_socket` to a socket; core c has processors c and c + count.
std::vector<Core> make_cores(int count, int per_socket) {
  std::vector<Core> cores;
  for (int c = 0; c < count; ++c) {
    Core core;
    core.cpus.set(static_cast<std::size_t>(c));
    core.cpus.set(static_cast<std::size_t>(c + count));
    core.socket = c / per_socket;
    cores.push_back(core);
  }
  return cores;
}

CpuMask cpus_of(const std::vector<Core>& cores) {
  CpuMask all;
  for (const Core& core : cores) all |= core.cpus;
  return all;
}

TEST(CoreShare, PartsAreDisjointAndTakeAll) {
  for (int cores = 1; cores <= 17; ++cores)
    for (int ranks = 1; ranks <= cores; ++ranks) {
      const auto all = make_cores(cores, 4);
      CpuMask seen;
      std::size_t least = all.size(), most = 0;
      for (int r = 0; r < ranks; ++r) {
        const auto share = core_share(all, r, ranks);
        EXPECT_TRUE((seen & cpus_of(share)).none());
        seen |= cpus_of(share);
        least = std::min(least, share.size());
        most = std::max(most, share.size());
      }
      EXPECT_EQ(seen, cpus_of(all));
      EXPECT_LE(most - least, 1u);
    }
}

TEST(CoreShare, MoreProcessesThanCoresTakeTurns) {
  const auto cores = make_cores(2, 2);
  for (int r = 0; r < 5; ++r) {
    const auto share = core_share(cores, r, 5);
    ASSERT_EQ(share.size(), 1u);
    EXPECT_EQ(share[0].cpus, cores[static_cast<std::size_t>(r % 2)].cpus);
  }
}

TEST(SocketShare, ASocketEach) {
  const auto cores = make_cores(8, 4);
  EXPECT_EQ(cpus_of(socket_share(cores, 0, 2)), cpus_of({cores.begin(), cores.begin() + 4}));
  EXPECT_EQ(cpus_of(socket_share(cores, 1, 2)), cpus_of({cores.begin() + 4, cores.end()}));
}

TEST(SocketShare, NeighboursShareASocket) {
  const auto cores = make_cores(8, 4);
  for (int r = 0; r < 4; ++r) {
    const auto share = socket_share(cores, r, 4);
    ASSERT_EQ(share.size(), 4u);
    EXPECT_EQ(share[0].socket, r / 2);
  }
  EXPECT_EQ(socket_share(cores, 0, 1).size(), 8u);
}

TEST(DiscoverCores, CoversExactlyWhatIsAllowed) {
  const CpuMask allowed = allowed_cpus();
  ASSERT_TRUE(allowed.any());
  EXPECT_EQ(cpus_of(discover_cores(allowed)), allowed);
  // One processor alone.
  CpuMask one;
  for (std::size_t cpu = 0; cpu < allowed.size() && one.none(); ++cpu) one[cpu] = allowed[cpu];
  EXPECT_EQ(cpus_of(discover_cores(one)), one);
  EXPECT_EQ(discover_cores(one).size(), 1u);
}

EnvLookup bind(const char* value) {
  return [value](const std::string& name) {
    return name == "LOCKSTEP_BIND" ? std::optional<std::string>(value) : std::nullopt;
  };
}

TEST(BindToShare, AWorldOfOneKeepsAllItHas) {
  SelfGroup group(std::chrono::seconds(1));
  const CpuMask before = allowed_cpus();
  for (const char* policy : {"core", "socket", "none"}) {
    const Binding binding = bind_to_share(group, bind(policy));
    EXPECT_EQ(binding.cores, static_cast<int>(discover_cores(before).size()));
    EXPECT_FALSE(binding.oversubscribed);
    EXPECT_EQ(binding.spare_core, binding.cores > 1);
    EXPECT_EQ(allowed_cpus(), before);
  }
}

TEST(BindToShare, AnUnknownPolicyIsNamed) {
  SelfGroup group(std::chrono::seconds(1));
  try {
    bind_to_share(group, bind("cores"));
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("LOCKSTEP_BIND=\"cores\""), std::string::npos);
    EXPECT_NE(error.remedy().find("core"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::comm
