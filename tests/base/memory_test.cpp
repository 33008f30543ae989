// What the kernel says of free memory and of processors' time, in trees of files as it writes them.
#include "base/resource_limits.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_directory.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

class MemoryBounds : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path at = root() + path;
    std::filesystem::create_directories(at.parent_path());
    std::ofstream(at) << text;
  }
  std::string root() const { return directory_.path().string(); }
  void machine(const std::string& swap = "0") {
    write("/proc/meminfo",
          "MemTotal:       16000 kB\nMemFree:        100 kB\nMemAvailable:   8000 kB\nSwapFree:  " + swap + " kB\n");
    write("/proc/sys/kernel/random/boot_id", "boot\n");
  }
  // A group of the second version: `group` of a hierarchy whose part `shown` is mounted.
  void unified(const std::string& group, const std::string& shown = "/") {
    write("/proc/self/cgroup", "0::" + group + "\n");
    write("/proc/self/mountinfo", "25 1 0:2 / /proc rw - proc proc rw\n36 25 0:31 " + shown +
                                      " /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  static constexpr std::uint64_t kKib = 1024;

 private:
  testing::TemporaryDirectory directory_;
};

TEST_F(MemoryBounds, OfThisMachine) {
  const auto bounds = memory_bounds();
  ASSERT_FALSE(bounds.empty());
  EXPECT_EQ(bounds.front().name, "the machine");
  EXPECT_GT(bounds.front().free_bytes, 1u << 20);
}

TEST_F(MemoryBounds, WithoutCgroups) {
  EXPECT_TRUE(memory_bounds(root()).empty());  // says nothing
  machine();
  auto bounds = memory_bounds(root());
  ASSERT_EQ(bounds.size(), 1u);
  EXPECT_EQ(bounds[0].free_bytes, 8000 * kKib);
  machine("500");
  bounds = memory_bounds(root());
  EXPECT_EQ(bounds[0].free_bytes, 8500 * kKib);
}

TEST_F(MemoryBounds, AllAncestorsOfACgroup) {
  machine();
  unified("/jobs/one/task");
  write("/sys/fs/cgroup/jobs/memory.max", "4096000\n");
  write("/sys/fs/cgroup/jobs/memory.current", "3000000\n");
  write("/sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 1000000\nactive_file 500000\nfile 9\n");
  write("/sys/fs/cgroup/jobs/one/memory.max", "max\n");
  write("/sys/fs/cgroup/jobs/one/memory.high", "2048000\n");
  write("/sys/fs/cgroup/jobs/one/memory.current", "48000\n");
  write("/sys/fs/cgroup/jobs/one/task/memory.max", "1000\n");
  write("/sys/fs/cgroup/jobs/one/task/memory.current", "5000\n");  // over it already
  const auto bounds = memory_bounds(root());
  ASSERT_EQ(bounds.size(), 4u);
  EXPECT_EQ(bounds[1].free_bytes, 0u);
  EXPECT_THAT(bounds[1].name, HasSubstr("/jobs/one/task (memory.max"));
  EXPECT_EQ(bounds[2].free_bytes, 2000000u);
  EXPECT_THAT(bounds[2].name, HasSubstr("/jobs/one (memory.high"));
  EXPECT_EQ(bounds[3].free_bytes, 4096000u - 1500000u);  // files in the page cache can go
  EXPECT_NE(bounds[2].id, bounds[3].id);
}

TEST_F(MemoryBounds, SwapLimitOfACgroup) {
  machine("1000");
  unified("/job");
  write("/sys/fs/cgroup/job/memory.max", "2000000\n");
  EXPECT_EQ(memory_bounds(root())[1].free_bytes, 2000000 + 1000 * kKib);
  write("/sys/fs/cgroup/job/memory.swap.max", "600000\n");
  write("/sys/fs/cgroup/job/memory.swap.current", "100000\n");
  EXPECT_EQ(memory_bounds(root())[1].free_bytes, 2500000u);
  write("/sys/fs/cgroup/job/memory.swap.max", "max\n");
  EXPECT_EQ(memory_bounds(root())[1].free_bytes, 2000000 + 1000 * kKib);
}

TEST_F(MemoryBounds, InAContainer) {
  machine();
  write("/sys/fs/cgroup/memory.max", "3000000\n");
  for (const auto& [group, shown] : {std::pair("/", "/"), std::pair("/docker/abc", "/docker/abc"),
                                     std::pair("/../outside", "/"), std::pair("/elsewhere", "/docker/abc")}) {
    unified(group, shown);
    const auto bounds = memory_bounds(root());
    ASSERT_EQ(bounds.size(), 2u) << group << " of " << shown;
    EXPECT_EQ(bounds[1].free_bytes, 3000000u);
  }
}

TEST_F(MemoryBounds, OfVersion1) {
  machine();
  write("/proc/self/cgroup", "9:cpu,cpuacct:/other\n4:memory:/slurm/job\n0::/\n");
  write("/proc/self/mountinfo",
        "31 1 0:2 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 1 0:3 / /cg/memory rw - cgroup cgroup rw,memory\n");
  write("/cg/memory/slurm/job/memory.limit_in_bytes", "5000000\n");
  write("/cg/memory/slurm/job/memory.usage_in_bytes", "2000000\n");
  write("/cg/memory/slurm/job/memory.stat", "inactive_file 7\ntotal_inactive_file 100000\ntotal_active_file 200000\n");
  write("/cg/memory/slurm/memory.limit_in_bytes", "9223372036854771712\n");  // none
  const auto bounds = memory_bounds(root());
  ASSERT_EQ(bounds.size(), 2u);
  EXPECT_EQ(bounds[1].free_bytes, 3300000u);
}

TEST_F(MemoryBounds, MalformedFiles) {
  machine();
  unified("/job");
  for (const std::string text : {"", "\n", "lots\n", "-1\n", "99999999999999999999999\n"}) {
    write("/sys/fs/cgroup/job/memory.max", text);
    EXPECT_EQ(memory_bounds(root()).size(), 1u) << text;
  }
  write("/proc/self/mountinfo", "-\n - \n1 2 3 - cgroup2\n\n");
  write("/proc/self/cgroup", "0:\n:::\n");
  EXPECT_EQ(memory_bounds(root()).size(), 1u);
  write("/proc/meminfo", "MemAvailable: none\n");
  EXPECT_TRUE(memory_bounds(root()).empty());
}

TEST_F(MemoryBounds, CountsOomKills) {
  EXPECT_EQ(memory_kills(root()), std::nullopt);
  write("/proc/vmstat", "pgfault 12\noom_kill 3\nnuma_hit 7\n");
  EXPECT_EQ(memory_kills(root()), 3u);
  write("/proc/vmstat", "pgfault 12\noom_kill many\n");
  EXPECT_EQ(memory_kills(root()), std::nullopt);
}

// As memory's, of either version.
class CpuQuotas : public MemoryBounds {
 protected:
  void of_version_1(const std::string& group) {
    write("/proc/self/cgroup", "3:cpu,cpuacct:" + group + "\n2:memory:/other\n");
    write("/proc/self/mountinfo",
          "30 25 0:26 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
          "31 25 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n");
  }
};

TEST_F(CpuQuotas, SmallestQuotaOfAllAncestors) {
  EXPECT_FALSE(cpu_quota(root()));  // no /proc
  unified("/jobs/one/task");
  EXPECT_FALSE(cpu_quota(root()));
  write("/sys/fs/cgroup/jobs/one/task/cpu.max", "max 100000\n");
  EXPECT_FALSE(cpu_quota(root()));
  write("/sys/fs/cgroup/jobs/cpu.max", "150000 100000\n");
  ASSERT_TRUE(cpu_quota(root()));
  EXPECT_EQ(cpu_quota(root())->cpus, 1.5);
  EXPECT_EQ(cpu_quota(root())->name, "the control group /jobs (cpu.max)");
  write("/sys/fs/cgroup/jobs/one/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpu_quota(root())->cpus, 0.5);
}

TEST_F(CpuQuotas, OfVersion1) {
  of_version_1("/docker/abc");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n");
  EXPECT_FALSE(cpu_quota(root()));
  write("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us", "250000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(cpu_quota(root())->cpus, 5);
  EXPECT_EQ(cpu_quota(root())->name, "the control group /docker (cpu.cfs_quota_us)");
}

TEST_F(CpuQuotas, InAContainer) {
  unified("/../outside");
  write("/sys/fs/cgroup/cpu.max", "200000 100000\n");
  EXPECT_EQ(cpu_quota(root())->name, "the control group / (cpu.max)");
  EXPECT_EQ(cpu_quota(root())->cpus, 2);
}

TEST_F(CpuQuotas, AreRoundedUpToThreads) {
  EXPECT_EQ(threads_within(std::nullopt, 8), 8);
  for (const auto& [cpus, threads] : {std::pair(0.1, 1), std::pair(1.0, 1), std::pair(1.5, 2), std::pair(100.0, 8)})
    EXPECT_EQ(threads_within(CpuQuota{cpus, ""}, 8), threads) << cpus;
}

}  // namespace
}  // namespace lockstep
