#include "devices/binding.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace lockstep::devices {
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

TEST(CoreShare, MoreProcessesThanCoresShareThem) {
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

/// Processors of cores `first` … `first + count - 1` of make_cores(cores, …), as a node's.
CpuMask node_cpus(int first, int count, int cores) {
  CpuMask cpus;
  for (int c = first; c < first + count; ++c) {
    cpus.set(static_cast<std::size_t>(c));
    cpus.set(static_cast<std::size_t>(c + cores));
  }
  return cpus;
}

// 64 cores, a NUMA node and four GPUs on each socket.
TEST(NearShare, EightGpusOnTwoNodes) {
  const auto cores = make_cores(64, 32);
  const CpuMask nodes[] = {node_cpus(0, 32, 64), node_cpus(32, 32, 64)};
  // Also where the ranks do not go node by node.
  for (const std::vector<int>& node_of : {std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1}, {1, 0, 1, 0, 0, 1, 0, 1}}) {
    std::vector<CpuMask> near;
    for (const int node : node_of) near.push_back(nodes[node]);
    CpuMask seen;
    for (int r = 0; r < 8; ++r) {
      const auto share = near_share(cores, near, r);
      ASSERT_EQ(share.size(), 8u);
      EXPECT_TRUE((cpus_of(share) & ~near[static_cast<std::size_t>(r)]).none()) << r;
      EXPECT_TRUE((seen & cpus_of(share)).none()) << r;
      seen |= cpus_of(share);
    }
    EXPECT_EQ(seen, cpus_of(cores));
  }
}

TEST(NearShare, ANodeWithOneGpuGivesItAllCores) {
  const auto cores = make_cores(16, 8);
  const std::vector<CpuMask> near = {node_cpus(0, 8, 16), node_cpus(0, 8, 16), node_cpus(8, 8, 16)};
  EXPECT_EQ(near_share(cores, near, 0).size(), 4u);
  EXPECT_EQ(near_share(cores, near, 1).size(), 4u);
  EXPECT_EQ(cpus_of(near_share(cores, near, 2)), near[2]);
}

TEST(NearShare, WithoutNodesItIsAPlainShare) {
  const auto cores = make_cores(16, 8);
  const std::vector<CpuMask> nowhere(4);
  for (int r = 0; r < 4; ++r) EXPECT_EQ(cpus_of(near_share(cores, nowhere, r)), cpus_of(core_share(cores, r, 4)));
  // One that has none beside others that have: it takes what it would take of all.
  const std::vector<CpuMask> mixed = {node_cpus(8, 8, 16), {}};
  EXPECT_EQ(cpus_of(near_share(cores, mixed, 0)), mixed[0]);
  EXPECT_EQ(cpus_of(near_share(cores, mixed, 1)), cpus_of(core_share(cores, 1, 2)));
}

TEST(NearShare, ANodeWhoseCoresAreNotAllowed) {
  // The job was given socket 0; two of its GPUs are on socket 1.
  auto cores = make_cores(16, 8);
  cores.resize(8);
  const std::vector<CpuMask> near = {node_cpus(0, 8, 16), node_cpus(0, 8, 16), node_cpus(8, 8, 16),
                                     node_cpus(8, 8, 16)};
  EXPECT_EQ(near_share(cores, near, 1).size(), 4u);
  for (int r = 2; r < 4; ++r) EXPECT_EQ(cpus_of(near_share(cores, near, r)), cpus_of(core_share(cores, r, 4)));
  // Some of the node's are: those.
  cores = make_cores(16, 8);
  cores.resize(10);
  EXPECT_EQ(cpus_of(near_share(cores, near, 2)), cpus_of({cores[8]}));
  EXPECT_EQ(cpus_of(near_share(cores, near, 3)), cpus_of({cores[9]}));
}

TEST(NearShare, MoreProcessesThanCloseCores) {
  const auto cores = make_cores(4, 2);
  const std::vector<CpuMask> near(3, node_cpus(2, 2, 4));
  for (int r = 0; r < 3; ++r)
    EXPECT_EQ(cpus_of(near_share(cores, near, r)), cores[static_cast<std::size_t>(2 + r % 2)].cpus);
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

Binding bind_alone(const EnvLookup& lookup, const Locality& device = {}) {
  const std::vector<std::string> claims = {binding_claim(lookup, device)};
  return bind_to_share(claims, 0, lookup, device);
}

TEST(BindToShare, AWorldOfOneKeepsAllItHas) {
  const CpuMask before = allowed_cpus();
  for (const char* policy : {"core", "socket", "none"}) {
    const Binding binding = bind_alone(bind(policy));
    EXPECT_EQ(binding.cores, static_cast<int>(discover_cores(before).size()));
    EXPECT_FALSE(binding.oversubscribed);
    EXPECT_EQ(binding.spare_core, binding.cores > 1);
    EXPECT_EQ(allowed_cpus(), before);
  }
}

/// Restores this thread's affinity.
class KeepAffinity {
 public:
  ~KeepAffinity() { set_allowed_cpus(before_); }

 private:
  CpuMask before_ = allowed_cpus();
};

TEST(BindToShare, CloseToTheDevice) {
  const KeepAffinity keep;
  const CpuMask before = allowed_cpus();
  Locality device;
  device.node = 0;
  for (std::size_t cpu = 0; cpu < before.size() && device.cpus.none(); ++cpu) device.cpus[cpu] = before[cpu];

  Binding binding = bind_alone(bind("none"), device);
  EXPECT_EQ(binding.cores, 1);
  EXPECT_EQ(allowed_cpus(), before);
  binding = bind_alone(bind("core"), device);
  EXPECT_EQ(binding.cores, 1);
  EXPECT_EQ(cpus_of(discover_cores(before & device.cpus)), allowed_cpus() & device.cpus);
  set_allowed_cpus(before);
  bind_alone(bind("socket"), device);
  EXPECT_EQ(allowed_cpus(), device.cpus);
}

TEST(BindToShare, ADeviceFarFromAllAllowedProcessors) {
  const KeepAffinity keep;
  const CpuMask before = allowed_cpus();
  Locality device;
  device.node = 1;
  device.cpus.set(device.cpus.size() - 1);
  for (const char* policy : {"core", "socket", "none"}) {
    EXPECT_EQ(bind_alone(bind(policy), device).cores, static_cast<int>(discover_cores(before).size()));
    EXPECT_EQ(allowed_cpus(), before);
  }
}

TEST(BindToShare, AnUnknownPolicyIsNamed) {
  try {
    bind_alone(bind("cores"));
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("LOCKSTEP_BIND=\"cores\""), std::string::npos);
    EXPECT_NE(error.remedy().find("core"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::devices
