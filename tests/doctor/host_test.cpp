// Each fault that the doctor knows, planted in a host that is made of files and answers, and found with its remedy.
#include "doctor/host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/support/temporary_directory.h"

namespace lockstep::doctor {
namespace {

using ::testing::HasSubstr;

/// A host in good health: two processors, one NUMA node, one interface.
class Host {
 public:
  Host() {
    for (const char* cpu : {"cpu0", "cpu1"}) {
      const std::string at = std::string("sys/devices/system/cpu/") + cpu + "/cpufreq/";
      write(at + "scaling_governor", "performance");
      write(at + "scaling_driver", "acpi-cpufreq");
      write(at + "scaling_max_freq", "3000000");
      write(at + "cpuinfo_max_freq", "3000000");
    }
    write("sys/devices/system/cpu/online", "0-1");
    write("sys/devices/system/cpu/cpufreq/boost", "1");
    write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 16000000 kB");
    write("sys/devices/system/node/node0/cpulist", "0-1");
    write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
    write("proc/meminfo",
          "MemTotal: 16000000 kB\nMemFree: 9000000 kB\nMemAvailable: 12000000 kB\nSwapTotal: 4000000 kB\n"
          "SwapFree: 4000000 kB");
    write("proc/vmstat", "oom_kill 0");
    write("proc/loadavg", "0.10 0.10 0.10 1/80 4711");
    write("proc/stat", "cpu  1000 0 1000 8000 0 0 0 0 0 0\ncpu0 1 1 1");
    write("proc/sys/vm/overcommit_memory", "0");
    write("proc/sys/net/core/rmem_max", "4194304");
    write("proc/sys/net/core/wmem_max", "4194304");
    write("sys/class/net/eth0/speed", "10000");
    write("sys/class/net/eth0/mtu", "9000");
    write("sys/class/net/eth0/duplex", "full");
    write("sys/class/net/eth0/statistics/rx_errors", "0");
    write("proc/self/cgroup", "0::/job");
    write("proc/self/mountinfo", "36 25 0:31 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw");
    write("sys/fs/cgroup/job/cpu.max", "max 100000");
    write("sys/fs/cgroup/job/pids.max", "max");

    view.root = directory_.path().string();
    view.env = [this](const std::string& name) -> std::optional<std::string> {
      const auto at = variables.find(name);
      return at == variables.end() ? std::nullopt : std::optional(at->second);
    };
    view.host_name = "a";
    view.several_hosts = true;
    view.allowed.set(0).set(1);
    view.has_cuda = true;
    NetworkInterface eth0{.name = "eth0", .address = *parse_address("10.0.0.1", 0), .prefix_bits = 24, .is_up = true};
    view.interfaces = {eth0};
    view.limit = [this](int resource) -> std::optional<std::uint64_t> {
      const auto at = limits.find(resource);
      return at == limits.end() ? std::nullopt : std::optional(at->second);
    };
    view.space = [this](const std::string& path) -> std::optional<Space> {
      const auto at = spaces.find(path);
      return at == spaces.end() ? std::nullopt : std::optional(at->second);
    };
    view.measure_disk = [this](const std::string&) { return disk; };
    view.resolve = [this](const std::string&) { return resolved; };
    view.clock_synchronised = true;
  }

  void write(const std::string& name, const std::string& text) { directory_.write(name, text + "\n"); }

  View view;
  std::map<std::string, std::string> variables;
  std::map<int, std::uint64_t> limits;
  std::map<std::string, Space> spaces = {{".", {1ull << 40, 1ull << 39, 1'000'000, true, ""}},
                                         {"/dev/shm", {1ull << 33, 1ull << 33, 1'000'000, true, ""}}};
  std::optional<DiskSpeed> disk = DiskSpeed{1e9, 1};
  Resolved resolved{.addresses = {*parse_address("10.0.0.1", 0)}};

 private:
  const testing::TemporaryDirectory directory_;
};

/// Of the row `check` alone what is no good news.
std::string complaints(const Host& host, const std::string& check) {
  std::string text;
  for (const Finding& finding : check_host(host.view)) {
    if (finding.severity < Severity::kWarning) continue;
    EXPECT_FALSE(finding.remedy.empty()) << finding.what;
    text += finding.check == check ? std::string(name_of(finding.severity)) + ": " + finding.what + "\n"
                                   : "elsewhere: " + finding.check + ": " + finding.what + "\n";
  }
  return text;
}

TEST(Doctor, FindsNothingOnAHostInGoodHealth) {
  const Host host;
  EXPECT_EQ(complaints(host, "none"), "");
  std::vector<std::string> asked, answered;
  for (const auto& [name, about] : host_checks()) asked.push_back(name);
  for (const Finding& finding : check_host(host.view))
    if (answered.empty() || answered.back() != finding.check) answered.push_back(finding.check);
  EXPECT_EQ(asked, answered) << "every row says something";
}

struct Fault {
  const char* check;
  const char* found;  // how it is reported, from the severity on
  std::function<void(Host& host)> plant;
};

devices::Gpus one_gpu(const std::function<void(devices::Gpu&)>& change) {
  devices::Gpus gpus;
  gpus.driver_version = "580.1";
  devices::Gpu gpu;
  gpu.memory =
      devices::Memory{.total_bytes = 80ll << 30, .free_bytes = 80ll << 30, .used_bytes = 0, .reserved_bytes = {}};
  gpu.persistence = true;
  change(gpu);
  gpus.list = {gpu};
  return gpus;
}

/// All pairs reach each other.
devices::Gpus two_gpus(const std::function<void(devices::GpuPair&)>& change) {
  devices::Gpus gpus = one_gpu([](auto&) {});
  gpus.list.push_back(gpus.list.front());
  gpus.list.back().index = 1;
  gpus.pairs = {{.first = 0, .second = 1, .reads = true, .reason = {}, .nvlink = true}};
  change(gpus.pairs.front());
  return gpus;
}

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all = {
      {"open-files", "failure: open files: at most 200", [](Host& h) { h.limits[RLIMIT_NOFILE] = 200; }},
      {"open-files", "warning: open files: at most 1024", [](Host& h) { h.limits[RLIMIT_NOFILE] = 1024; }},
      {"processes", "failure: processes and threads", [](Host& h) { h.limits[RLIMIT_NPROC] = 60; }},
      {"processes", "warning: the control group /job allows 100",
       [](Host& h) { h.write("sys/fs/cgroup/job/pids.max", "100"); }},
      {"locked-memory", "warning: locked memory, which RDMA needs",
       [](Host& h) {
         h.write("sys/class/infiniband/mlx5_0/node_type", "1");
         h.limits[RLIMIT_MEMLOCK] = 65536;
       }},
      {"locked-memory", "warning: locked memory, in bytes: at most 65536",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto&) {});
         h.limits[RLIMIT_MEMLOCK] = 65536;
       }},
      {"address-space", "warning: ulimit -v allows", [](Host& h) { h.limits[RLIMIT_AS] = 1 << 30; }},
      {"shared-memory", "warning: /dev/shm: 60.0 MB of 64.0 MB free, which NCCL",
       [](Host& h) {
         h.spaces["/dev/shm"].total_bytes = 64'000'000;
         h.spaces["/dev/shm"].free_bytes = 60'000'000;
       }},
      {"shared-memory", "warning: /dev/shm: 1.0 MB of", [](Host& h) { h.spaces["/dev/shm"].free_bytes = 1'000'000; }},
      {"shared-memory", "warning: /dev/shm is not there", [](Host& h) { h.spaces.erase("/dev/shm"); }},
      {"memory", "failure: the machine leaves",
       [](Host& h) { h.write("proc/meminfo", "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 100000 kB"); }},
      {"memory", "warning: 3.1 GB of memory are swapped out",
       [](Host& h) {
         h.write("proc/meminfo",
                 "MemTotal: 16000000 kB\nMemFree: 9000000 kB\nMemAvailable: 12000000 kB\n"
                 "SwapTotal: 4000000 kB\nSwapFree: 1000000 kB");
       }},
      {"memory", "warning: vm.overcommit_memory is 2", [](Host& h) { h.write("proc/sys/vm/overcommit_memory", "2"); }},
      {"memory-kills", "warning: the kernel has ended 3 processes",
       [](Host& h) { h.write("proc/vmstat", "oom_kill 3"); }},
      {"huge-pages", "warning: transparent huge pages are off",
       [](Host& h) { h.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"); }},
      {"numa", "warning: NUMA node1 has processors (2-3) and no memory",
       [](Host& h) {
         h.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB");
         h.write("sys/devices/system/node/node1/cpulist", "2-3");
       }},
      {"numa", "warning: the kernel moves pages",
       [](Host& h) {
         h.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 16000000 kB");
         h.write("proc/sys/kernel/numa_balancing", "1");
       }},
      {"instructions", "warning: ONEDNN_MAX_CPU_ISA=SSE41",
       [](Host& h) { h.variables["ONEDNN_MAX_CPU_ISA"] = "SSE41"; }},
      {"frequency", "warning: the frequency governor of 1 of 2 processors is powersave",
       [](Host& h) { h.write("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave"); }},
      {"frequency", "warning: the frequency of 1 of 2 processors is capped",
       [](Host& h) { h.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", "1200000"); }},
      {"frequency", "warning: the processors' boost is off",
       [](Host& h) { h.write("sys/devices/system/cpu/cpufreq/boost", "0"); }},
      {"affinity", "warning: 1 of 2 processors may be used (1)", [](Host& h) { h.view.allowed.reset(0); }},
      {"cpu-quota", "warning: the control group /job (cpu.max) allows 1.5 CPUs",
       [](Host& h) { h.write("sys/fs/cgroup/job/cpu.max", "150000 100000"); }},
      {"openmp", "warning: OMP_NUM_THREADS=1 is set", [](Host& h) { h.variables["OMP_NUM_THREADS"] = "1"; }},
      {"load", "warning: 2 other threads are running on 2 processors",
       [](Host& h) { h.write("proc/loadavg", "2.10 1.10 0.10 3/80 4711"); }},
      {"steal", "warning: 10.0 % of the time",
       [](Host& h) { h.write("proc/stat", "cpu  1000 0 1000 7000 0 0 0 1000 0 0"); }},
      {"host-name", "failure: the host name 'a' is 127.0.1.1",
       [](Host& h) { h.resolved.addresses = {*parse_address("127.0.1.1", 0)}; }},
      {"host-name", "warning: the host name 'a' does not resolve: Name or service not known",
       [](Host& h) { h.resolved = {.addresses = {}, .why_not = "Name or service not known"}; }},
      {"network", "failure: LOCKSTEP_SOCKET_IFNAME=eth1 names no interface",
       [](Host& h) { h.variables["LOCKSTEP_SOCKET_IFNAME"] = "eth1"; }},
      {"network", "warning: eth0 runs at 100 Mbit/s", [](Host& h) { h.write("sys/class/net/eth0/speed", "100"); }},
      {"network", "warning: eth0 is half duplex", [](Host& h) { h.write("sys/class/net/eth0/duplex", "half"); }},
      {"network", "warning: eth0 has 10 Gbit/s and an MTU of 1500",
       [](Host& h) { h.write("sys/class/net/eth0/mtu", "1500"); }},
      {"network", "warning: eth0: 17 rx_errors",
       [](Host& h) { h.write("sys/class/net/eth0/statistics/rx_errors", "17"); }},
      {"network", "failure: no interface but the loopback is up", [](Host& h) { h.view.interfaces.clear(); }},
      {"tcp-buffers", "warning: net.core.rmem_max is 212992",
       [](Host& h) { h.write("proc/sys/net/core/rmem_max", "212992"); }},
      {"clock", "warning: the clock is not synchronised", [](Host& h) { h.view.clock_synchronised = false; }},
      {"disk", "failure: .: no such directory", [](Host& h) { h.spaces.erase("."); }},
      {"disk", "failure: . cannot be written", [](Host& h) { h.spaces["."].writable = false; }},
      {"disk", "failure: .: 1.0 MB free", [](Host& h) { h.spaces["."].free_bytes = 1'000'000; }},
      {"disk", "warning: .: 10 files more", [](Host& h) { h.spaces["."].free_files = 10; }},
      {"disk", "warning: .: 20.0 MB/s written",
       [](Host& h) {
         h.disk = DiskSpeed{20e6, 1};
       }},
      {"disk", "warning: .: 1.0 GB/s written, 250.0 ms for fsync",
       [](Host& h) {
         h.disk = DiskSpeed{1e9, 250};
       }},
      {"gpus", "failure: 1 NVIDIA card is there, and the driver lists none",
       [](Host& h) {
         h.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de");
         h.write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200");
       }},
      {"gpus", "warning: 1 GPUs, and this lockstep was built without CUDA",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto&) {});
         h.view.has_cuda = false;
       }},
      {"gpus", "failure: GPU 0: it has fallen off the bus",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto& gpu) { gpu.problem = {"it has fallen off the bus", "reboot"}; });
       }},
      {"gpus", "warning: GPU 0: 3 uncorrected memory errors",
       [](Host& h) { h.view.gpus = one_gpu([](auto& gpu) { gpu.ecc_errors = 3; }); }},
      {"gpus", "failure: GPU 0: its compute mode refuses all programs",
       [](Host& h) { h.view.gpus = one_gpu([](auto& gpu) { gpu.compute_mode = devices::ComputeMode::kProhibited; }); }},
      {"gpus", "warning: GPU 0: 91 °C",
       [](Host& h) { h.view.gpus = one_gpu([](auto& gpu) { gpu.temperature_c = 91; }); }},
      {"gpus", "warning: GPU 0: it works in performance state P2",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto& gpu) {
           gpu.performance_state = 2;
           gpu.utilisation_percent = 100;
         });
       }},
      {"gpus", "warning: GPU 0: the driver unloads it",
       [](Host& h) { h.view.gpus = one_gpu([](auto& gpu) { gpu.persistence = false; }); }},
      {"gpus", "warning: GPU 0: 42.9 GB of",
       [](Host& h) { h.view.gpus = one_gpu([](auto& gpu) { gpu.memory->used_bytes = 40ll << 30; }); }},
      {"gpus", "failure: CUDA_VISIBLE_DEVICES=7 leaves none of 1 GPUs",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto&) {});
         h.variables["CUDA_VISIBLE_DEVICES"] = "7";
       }},
      {"gpus", "warning: GPU 0: slowed down now, by power brake",
       [](Host& h) { h.view.gpus = one_gpu([](auto& gpu) { gpu.slowed_by = {"power brake"}; }); }},
      {"gpu-links", "warning: GPU 0 runs at PCIe x8, not x16",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto& gpu) {
           gpu.pcie_width = 8;
           gpu.most_pcie_width = 16;
         });
       }},
      {"gpu-links", "warning: GPU 0: 1 of 18 NVLinks are down",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto& gpu) {
           gpu.nvlinks_up = 17;
           gpu.nvlinks_down = 1;
         });
       }},
      {"gpu-links", "warning: GPU 0 and GPU 1 do not reach each other's memory (the driver's settings forbid it)",
       [](Host& h) {
         h.view.gpus = two_gpus([](auto& pair) {
           pair.reads = false;
           pair.nvlink = false;
           pair.reason = "the driver's settings forbid it";
         });
       }},
      {"nccl", "warning: none of 1 InfiniBand port is active: NCCL uses TCP",
       [](Host& h) {
         h.view.gpus = one_gpu([](auto&) {});
         h.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
       }},
      {"libraries", "warning: NCCL_P2P_DISABLE=1: GPUs of a host",
       [](Host& h) { h.variables["NCCL_P2P_DISABLE"] = "1"; }},
      {"libraries", "warning: CUDA_LAUNCH_BLOCKING=1", [](Host& h) { h.variables["CUDA_LAUNCH_BLOCKING"] = "1"; }},
      {"libraries", "warning: LD_PRELOAD=/lib/x.so", [](Host& h) { h.variables["LD_PRELOAD"] = "/lib/x.so"; }},
  };
  return all;
}

TEST(Doctor, FindsEachFaultAndNothingElse) {
  for (const Fault& fault : faults()) {
    Host host;
    fault.plant(host);
    const std::string text = complaints(host, fault.check);
    EXPECT_THAT(text, HasSubstr(fault.found)) << fault.check;
    EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  }
}

std::string answer_of(const Host& host, const std::string& check) {
  for (const Finding& finding : check_host(host.view))
    if (finding.check == check) return finding.what;
  return "nothing";
}

TEST(Doctor, SaysByWhatNcclWillMoveData) {
  Host host;
  EXPECT_EQ(answer_of(host, "nccl"), "no GPU");
  host.view.gpus = two_gpus([](auto&) {});
  EXPECT_EQ(answer_of(host, "gpu-links"), "NVLink between all GPUs");
  EXPECT_EQ(answer_of(host, "nccl"), "NCCL will move data on this host by NVLink, between hosts by TCP");
  host.view.gpus = two_gpus([](auto& pair) { pair.nvlink = false; });
  host.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  host.write("sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN");
  host.write("sys/module/nvidia_peermem/version", "580.1");
  EXPECT_EQ(answer_of(host, "gpu-links"), "all GPUs reach each other's memory");
  EXPECT_EQ(answer_of(host, "nccl"),
            "NCCL will move data on this host by PCIe, from GPU to GPU, between hosts by RDMA (mlx5_0)");
  host.variables["NCCL_P2P_DISABLE"] = "1";
  host.variables["NCCL_IB_DISABLE"] = "1";
  EXPECT_EQ(answer_of(host, "nccl"), "NCCL will move data on this host by the host's memory, between hosts by TCP");
  host.view.gpus = two_gpus([](auto& pair) { pair.reads = {}; });
  EXPECT_EQ(answer_of(host, "gpu-links"), "the driver does not say what GPUs reach");
}

// What matters between hosts is no complaint about one.
TEST(Doctor, OneHostNeedsNoNetwork) {
  Host host;
  host.view.several_hosts = false;
  host.view.interfaces.clear();
  host.resolved = {.addresses = {*parse_address("127.0.1.1", 0)}};
  host.view.clock_synchronised = false;
  host.write("proc/sys/net/core/rmem_max", "212992");
  EXPECT_EQ(complaints(host, "none"), "");
}

TEST(Doctor, AHostThatSaysNothingIsNoFault) {
  Host host;
  const testing::TemporaryDirectory empty;
  host.view.root = empty.path().string();
  EXPECT_EQ(complaints(host, "none"), "");
}

TEST(Doctor, LooksAtThisHost) {
  const auto findings = check_host(View::of_this_host(".", false, false));
  EXPECT_GE(findings.size(), host_checks().size());
  for (const Finding& finding : findings) EXPECT_FALSE(finding.what.empty()) << finding.check;
}

}  // namespace
}  // namespace lockstep::doctor
