#include "doctor/host.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/cpu.h"
#include "base/kernel.h"
#include "base/resource_limits.h"
#include "base/text.h"
#include "doctor/rows.h"

namespace lockstep::doctor {

std::optional<std::string> read(const View& view, const std::string& path) {
  std::ifstream file(view.root + path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return std::string(trim(text.str()));
}

std::optional<std::int64_t> read_number(const View& view, const std::string& path) {
  const auto text = read(view, path);
  return text ? parse_int(*text) : std::nullopt;
}

std::vector<std::string> names_in(const View& view, const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(view.root + path, error))
    names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

namespace {

bool is_numbered(const std::string& name, std::string_view stem) {
  return name.starts_with(stem) && name.size() > stem.size() &&
         std::ranges::all_of(name.substr(stem.size()), [](char c) { return c >= '0' && c <= '9'; });
}

/// Kilobytes of a line of /proc/meminfo.
std::optional<double> memory_of(const View& view, std::string_view name) {
  const auto text = read(view, "/proc/meminfo");
  if (!text) return std::nullopt;
  for (const auto& line : split(*text, '\n'))
    if (line.starts_with(name))
      if (const auto words = words_of(line); words.size() > 1)
        if (const auto kilobytes = parse_int(words[1])) return static_cast<double>(*kilobytes) * kKi;
  return std::nullopt;
}

// ---- Limits ----

void check_limit(const View& view, RowFindings& report, int resource, double fails_below, double warns_below,
                 const char* what, const char* remedy) {
  const auto limit = view.limit(resource);
  if (!limit) return report.ok(fmt::format("{}: no limit", what));
  const std::string text = fmt::format("{}: at most {}", what, *limit);
  if (static_cast<double>(*limit) < fails_below) return report.fail(text, remedy);
  if (static_cast<double>(*limit) < warns_below) return report.warn(text, remedy);
  report.ok(text);
}

void check_open_files(const View& view, RowFindings& report) {
  check_limit(view, report, RLIMIT_NOFILE, 256, 4096, "open files",
              "raise the hard limit: ulimit -Hn 1048576, or LimitNOFILE= of the service that starts jobs");
}

void check_processes(const View& view, RowFindings& report) {
  check_limit(view, report, RLIMIT_NPROC, 64, 1024, "processes and threads of this user",
              "raise the hard limit: ulimit -Hu 65536");
  for (const auto& group : control_groups("pids", true, view.root)) {
    std::ifstream file(group.directory + "/pids.max");
    std::int64_t most = 0;
    if (!(file >> most) || most >= 1024) continue;
    report.warn(fmt::format("the control group {} allows {} processes and threads", group.name, most),
                "raise its pids.max (docker run --pids-limit -1)");
  }
}

void check_locked_memory(const View& view, RowFindings& report) {
  const bool rdma = !names_in(view, "/sys/class/infiniband").empty();
  if (!rdma && view.gpus.list.empty()) return report.ok("locked memory: nothing here needs any");
  check_limit(view, report, RLIMIT_MEMLOCK, 0, 64 * kMi,
              rdma ? "locked memory, which RDMA needs, in bytes" : "locked memory, in bytes",
              "raise it: ulimit -l unlimited (docker run --ulimit memlock=-1)");
}

void check_address_space(const View& view, RowFindings& report) {
  for (const auto& [resource, name] : {std::pair{RLIMIT_AS, "ulimit -v"}, {RLIMIT_DATA, "ulimit -d"}})
    if (const auto limit = view.limit(resource))
      report.warn(fmt::format("{} allows {} of memory that is only reserved, too", name,
                              human_bytes(static_cast<double>(*limit))),
                  fmt::format("{} unlimited: CUDA and shared memory reserve far more than they use", name));
  if (view.limit(RLIMIT_AS) || view.limit(RLIMIT_DATA)) return;
  report.ok("address space: no limit");
}

// ---- Memory ----

void check_shared_memory(const View& view, RowFindings& report) {
  const auto space = view.space("/dev/shm");
  constexpr const char* kRemedy = "docker run --shm-size 1g (or --ipc host); mount -o remount,size=50% /dev/shm";
  if (!space)
    return report.warn("/dev/shm is not there: lockstep needs none, NCCL and Open MPI do", "mount a tmpfs there");
  const std::string text = fmt::format("/dev/shm: {} of {} free", human_bytes(static_cast<double>(space->free_bytes)),
                                       human_bytes(static_cast<double>(space->total_bytes)));
  if (static_cast<double>(space->total_bytes) < 256 * kMi)
    return report.warn(text + ", which NCCL and Open MPI exhaust (lockstep's own memory has no name and no such limit)",
                       kRemedy);
  if (static_cast<double>(space->free_bytes) < 256 * kMi)
    return report.warn(text + ": files of jobs that have ended may be left there", "look at them: ls -l /dev/shm");
  report.ok(text);
}

void check_memory(const View& view, RowFindings& report) {
  bool fine = true;
  std::optional<double> least;
  for (const MemoryBound& bound : memory_bounds(view.root)) {
    const auto free = static_cast<double>(bound.free_bytes);
    if (!least || free < *least) least = free;
    const std::string text = fmt::format("{} leaves {}", bound.name, human_bytes(free));
    const std::string remedy = "end what else uses it, or raise the limit";
    if (free < 256 * kMi)
      report.fail(text, remedy), fine = false;
    else if (free < 2 * kGi)
      report.warn(text, remedy), fine = false;
  }
  if (!least) return report.note("free memory: the kernel does not say");
  if (const auto total = memory_of(view, "SwapTotal:"), free = memory_of(view, "SwapFree:");
      total && free && *total > 0 && *total - *free > 0.1 * *total && *total - *free > 256 * kMi)
    report.warn(fmt::format("{} of memory are swapped out", human_bytes(*total - *free)),
                "end what else uses memory: steps that wait for the disk delay all ranks"),
        fine = false;
  if (const auto mode = read_number(view, "/proc/sys/vm/overcommit_memory"); mode == 2)
    report.warn("vm.overcommit_memory is 2: memory that is only reserved counts", "sysctl vm.overcommit_memory=0"),
        fine = false;
  if (fine) report.ok(fmt::format("memory: {} free", human_bytes(*least)));
}

void check_memory_kills(const View& view, RowFindings& report) {
  const auto kills = memory_kills(view.root);
  if (!kills) return report.note("the kernel does not say whether it has ended processes for lack of memory");
  if (*kills == 0) return report.ok("no process has been ended for lack of memory");
  report.warn(fmt::format("the kernel has ended {} process{} for lack of memory since it was booted", *kills,
                          *kills == 1 ? "" : "es"),
              "look for them: dmesg | grep -i oom; smaller batches, --recompute or --zero 1 need less");
}

void check_huge_pages(const View& view, RowFindings& report) {
  const auto mode = read(view, "/sys/kernel/mm/transparent_hugepage/enabled");
  if (!mode) return report.note("transparent huge pages: the kernel has none");
  if (mode->find("[never]") == std::string::npos) return report.ok("transparent huge pages: " + *mode);
  report.warn("transparent huge pages are off", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
}

void check_numa(const View& view, RowFindings& report) {
  std::vector<std::string> nodes;
  for (const auto& name : names_in(view, "/sys/devices/system/node"))
    if (is_numbered(name, "node")) nodes.push_back(name);
  if (nodes.empty()) return report.note("NUMA nodes: the kernel does not say");
  bool fine = true;
  for (const auto& node : nodes) {
    const auto text = read(view, "/sys/devices/system/node/" + node + "/meminfo");
    if (!text) continue;
    for (const auto& line : split(*text, '\n')) {
      const auto words = words_of(line);  // "Node 0 MemTotal: 16314980 kB"
      if (words.size() < 4 || words[2] != "MemTotal:") continue;
      const auto cpus = read(view, "/sys/devices/system/node/" + node + "/cpulist");
      if (words[3] == "0" && cpus && !cpus->empty())
        report.warn(fmt::format("NUMA {} has processors ({}) and no memory", node, *cpus),
                    "fill its memory slots: every access of its cores goes to another node"),
            fine = false;
    }
  }
  if (nodes.size() > 1 && read_number(view, "/proc/sys/kernel/numa_balancing").value_or(0) > 0)
    report.warn("the kernel moves pages between NUMA nodes while ranks run, though these are bound to theirs",
                "sysctl kernel.numa_balancing=0"),
        fine = false;
  if (fine) report.ok(fmt::format("{} NUMA node{}", nodes.size(), nodes.size() == 1 ? "" : "s"));
}

// ---- Processors ----

std::vector<std::string> cpus_of(const View& view) {
  std::vector<std::string> cpus;
  for (const auto& name : names_in(view, "/sys/devices/system/cpu"))
    if (is_numbered(name, "cpu")) cpus.push_back("/sys/devices/system/cpu/" + name);
  return cpus;
}

void check_instructions(const View& view, RowFindings& report) {
  const std::string isa = cpu_instruction_set();
  if (const auto most = view.env("ONEDNN_MAX_CPU_ISA"))
    report.warn(fmt::format("ONEDNN_MAX_CPU_ISA={} keeps oneDNN from instructions that the CPU may have", *most),
                "unset it");
  if (isa == "sse2")
    report.warn("the CPU has no AVX2, or the virtual machine hides it",
                "choose a CPU model with AVX2 for the virtual machine (qemu: -cpu host)");
  if (isa != "sse2" && !view.env("ONEDNN_MAX_CPU_ISA")) report.ok("instructions: " + isa);
}

void check_governor(const View& view, RowFindings& report) {
  std::size_t powersave = 0, all = 0, capped = 0;
  for (const auto& cpu : cpus_of(view)) {
    const auto governor = read(view, cpu + "/cpufreq/scaling_governor");
    if (!governor) continue;
    ++all;
    const auto driver = read(view, cpu + "/cpufreq/scaling_driver").value_or("");
    // Where the processor chooses by itself, powersave is no cap.
    if (*governor == "powersave" && driver != "intel_pstate" && driver != "amd-pstate-epp") ++powersave;
    const auto most = read_number(view, cpu + "/cpufreq/scaling_max_freq");
    const auto can = read_number(view, cpu + "/cpufreq/cpuinfo_max_freq");
    if (most && can && *most < *can) ++capped;
  }
  bool fine = true;
  if (powersave > 0)
    report.warn(fmt::format("the frequency governor of {} of {} processors is powersave", powersave, all),
                "cpupower frequency-set -g performance"),
        fine = false;
  if (capped > 0)
    report.warn(fmt::format("the frequency of {} of {} processors is capped", capped, all),
                "cpupower frequency-set -u MAX, with cpuinfo_max_freq"),
        fine = false;
  if (read_number(view, "/sys/devices/system/cpu/cpufreq/boost") == 0 ||
      read_number(view, "/sys/devices/system/cpu/intel_pstate/no_turbo") == 1)
    report.warn("the processors' boost is off",
                "echo 1 > /sys/devices/system/cpu/cpufreq/boost (Intel: echo 0 > "
                "/sys/devices/system/cpu/intel_pstate/no_turbo)"),
        fine = false;
  if (!fine) return;
  if (all == 0) return report.note("frequencies: the kernel does not say (a virtual machine's host sets them)");
  report.ok("frequency governor, of " + fmt::to_string(all) + " processors");
}

void check_affinity(const View& view, RowFindings& report) {
  const auto online = read(view, "/sys/devices/system/cpu/online");
  if (!online) return report.note("processors: the kernel does not say");
  const auto all = devices::parse_ranges(*online);
  const auto allowed = view.allowed & all;
  if (allowed == all) return report.ok(fmt::format("all {} processors may be used", all.count()));
  report.warn(
      fmt::format("{} of {} processors may be used ({})", allowed.count(), all.count(), devices::ranges_text(allowed)),
      "start it without taskset, numactl or a cpuset, unless the others are meant for other jobs");
}

void check_cpu_quota(const View& view, RowFindings& report) {
  const auto quota = cpu_quota(view.root);
  if (!quota) return report.ok("no CPU quota");
  const std::string text = fmt::format("{} allows {:.3g} CPUs", quota->name, quota->cpus);
  if (quota->cpus >= static_cast<double>(view.allowed.count())) return report.ok(text);
  report.warn(fmt::format("{}, and {} processors may be used: all ranks are stopped for a part of every period", text,
                          view.allowed.count()),
              "raise the quota (docker run --cpus), or give processors instead (docker run --cpuset-cpus)");
}

void check_openmp(const View& view, RowFindings& report) {
  bool fine = true;
  for (const char* name : {"OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY",
                           "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "MKL_NUM_THREADS", "DNNL_CPU_RUNTIME"})
    if (const auto value = view.env(name))
      report.warn(fmt::format("{}={} is set: threads of ranks are lockstep's to place, and libraries may follow this",
                              name, printable(*value)),
                  fmt::format("unset {}; lockstep train --threads says how many", name)),
          fine = false;
  if (fine) report.ok("no settings of OpenMP in the environment");
}

void check_load(const View& view, RowFindings& report) {
  const auto text = read(view, "/proc/loadavg");  // "0.20 0.18 0.12 1/80 11206"
  const auto words = words_of(text.value_or(""));
  if (words.size() < 4) return report.note("load: the kernel does not say");
  const auto runnable = parse_int(words[3].substr(0, words[3].find('/')));
  const auto busy = runnable ? *runnable - 1 : 0;  // this process
  const auto cores = static_cast<std::int64_t>(view.allowed.count());
  if (busy > 0 && 4 * busy >= cores)
    return report.warn(
        fmt::format("{} other thread{} running on {} processors", busy, busy == 1 ? " is" : "s are", cores),
        "see who they are: top; the slowest rank sets the pace of all");
  report.ok(fmt::format("load: {} {} {}", words[0], words[1], words[2]));
}

void check_steal(const View& view, RowFindings& report) {
  const auto text = read(view, "/proc/stat");  // "cpu  user nice system idle iowait irq softirq steal guest guest_nice"
  const auto words = words_of(split(text.value_or(""), '\n').front());
  if (words.size() < 9 || words[0] != "cpu") return report.note("stolen time: the kernel does not say");
  double all = 0;
  for (std::size_t i = 1; i < 9; ++i) all += static_cast<double>(parse_int(words[i]).value_or(0));
  const double share = all > 0 ? static_cast<double>(parse_int(words[8]).value_or(0)) / all : 0;
  const std::string what =
      fmt::format("{:.1f} % of the time since the boot went to other virtual machines", 100 * share);
  if (share > 0.02) return report.warn(what, "ask for processors of its own: the slowest rank sets the pace of all");
  report.ok(what);
}

// ---- Network ----

void check_host_name(const View& view, RowFindings& report) {
  const auto found = view.resolve(view.host_name);
  const std::string name = printable(view.host_name);
  const std::string remedy = fmt::format("give '{}' its address in /etc/hosts or in DNS on every host", name);
  if (found.addresses.empty()) {
    const std::string what = fmt::format("the host name '{}' does not resolve: {}", name, found.why_not);
    return view.several_hosts ? report.warn(what, remedy) : report.note(what);
  }
  if (std::ranges::all_of(found.addresses, &SocketAddress::is_loopback)) {
    const std::string what =
        fmt::format("the host name '{}' is {}, which no other host reaches", name, found.addresses.front().host_text());
    return view.several_hosts ? report.fail(what, remedy) : report.note(what);
  }
  report.ok(fmt::format("'{}' is {}", name, found.addresses.front().host_text()));
}

void check_interfaces(const View& view, RowFindings& report) {
  bool fine = true;
  for (const char* variable : {"LOCKSTEP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    const auto filter = view.env(variable);
    if (!filter) continue;
    if (std::ranges::none_of(view.interfaces, [&](const auto& one) { return has_interface(*filter, one.name); }))
      report.fail(fmt::format("{}={} names no interface of this host", variable, printable(*filter)),
                  "name one that ip addr shows, or unset it"),
          fine = false;
  }
  std::vector<std::string> seen;
  for (const auto& one : view.interfaces) {
    if (one.is_loopback || !one.is_up || std::ranges::find(seen, one.name) != seen.end()) continue;
    seen.push_back(one.name);
    const std::string at = "/sys/class/net/" + one.name;
    const auto speed = read_number(view, at + "/speed"), mtu = read_number(view, at + "/mtu");  // Mbit/s, bytes
    if (speed && *speed > 0 && *speed < 1000)
      report.warn(fmt::format("{} runs at {} Mbit/s", one.name, *speed),
                  "look at its cable and its switch port: ethtool " + one.name),
          fine = false;
    if (read(view, at + "/duplex") == "half")
      report.warn(fmt::format("{} is half duplex", one.name), "look at its switch port: ethtool " + one.name),
          fine = false;
    if (speed && mtu && *speed >= 10'000 && *mtu <= 1500)
      report.warn(fmt::format("{} has {} Gbit/s and an MTU of {}", one.name, *speed / 1000, *mtu),
                  fmt::format("an MTU of 9000 on all hosts and switches costs the CPU less: ip link set {} mtu 9000",
                              one.name)),
          fine = false;
    for (const char* counter : {"rx_errors", "tx_errors"})
      if (const auto errors = read_number(view, at + "/statistics/" + counter); errors && *errors > 0)
        report.warn(fmt::format("{}: {} {}", one.name, *errors, counter), "look at its cable: ethtool -S " + one.name),
            fine = false;
  }
  if (seen.empty() && view.several_hosts)
    report.fail("no interface but the loopback is up", "ip link shows them"), fine = false;
  if (fine) report.ok(seen.empty() ? "no interface but the loopback" : "interfaces: " + join(seen, ", "));
}

void check_tcp_buffers(const View& view, RowFindings& report) {
  bool fine = true;
  for (const char* name : {"rmem_max", "wmem_max"})
    if (const auto bytes = read_number(view, fmt::format("/proc/sys/net/core/{}", name)); bytes && *bytes < 4 * kMi)
      if (view.several_hosts)
        report.warn(fmt::format("net.core.{} is {}: connections between hosts want 4 MiB", name, *bytes),
                    fmt::format("sysctl net.core.{}=4194304", name)),
            fine = false;
  if (fine) report.ok("TCP's buffers");
}

void check_clock(const View& view, RowFindings& report) {
  if (!view.clock_synchronised) return report.note("the clock: the kernel does not say");
  if (*view.clock_synchronised) return report.ok("the clock is synchronised");
  const std::string what = "the clock is not synchronised: times in logs of several hosts cannot be compared";
  view.several_hosts ? report.warn(what, "start chrony or systemd-timesyncd") : report.note(what);
}

// ---- Disk ----

void check_disk(const View& view, RowFindings& report) {
  const std::string name = printable(view.directory);
  const auto space = view.space(view.directory);
  if (!space) return report.fail(fmt::format("{}: no such directory", name), "name one that is there: --dir DIR");
  if (!space->writable)
    return report.fail(fmt::format("{} cannot be written", name), "name a directory for checkpoints: --dir DIR");
  const std::string left = fmt::format("{}: {} free", name, human_bytes(static_cast<double>(space->free_bytes)));
  bool fine = true;
  if (static_cast<double>(space->free_bytes) < 64 * kMi)
    report.fail(left, "remove something: no checkpoint fits there"), fine = false;
  else if (static_cast<double>(space->free_bytes) < 2 * kGi)
    report.warn(left, "remove something, or keep fewer checkpoints: --keep"), fine = false;
  if (space->free_files < 1000)
    report.warn(fmt::format("{}: {} files more can be made", name, space->free_files), "remove small files"),
        fine = false;
  if (const auto speed = view.measure_disk(view.directory)) {
    const std::string text = fmt::format("{}: {}/s written, {:.1f} ms for fsync", name,
                                         human_bytes(speed->write_bytes_per_s), speed->fsync_ms);
    if (speed->write_bytes_per_s < 50e6 || speed->fsync_ms > 100)
      report.warn(text, "checkpoints are written beside training, but a slow disk bounds how often: name a faster one"),
          fine = false;
    else if (fine)
      report.ok(text + ", " + human_bytes(static_cast<double>(space->free_bytes)) + " free");
  } else if (fine) {
    report.ok(left);
  }
  if (!space->type.empty())
    report.note(fmt::format("{} is on {}: reading many small files from there is slow", name, space->type));
}

void check_libraries(const View& view, RowFindings& report) {
  struct Setting {
    const char *name, *bad, *what;
  };
  constexpr Setting kSettings[] = {{"NCCL_P2P_DISABLE", "1", "GPUs of a host do not copy to each other"},
                                   {"NCCL_SHM_DISABLE", "1", "GPUs of a host use the network"},
                                   {"NCCL_IB_DISABLE", "1", "InfiniBand is not used"},
                                   {"NCCL_DEBUG", nullptr, "NCCL writes lines of its own"},
                                   {"CUDA_LAUNCH_BLOCKING", "1", "each kernel is waited for"},
                                   {"OMPI_MCA_btl", nullptr, "Open MPI's transports are restricted"},
                                   {"OMPI_MCA_pml", nullptr, "Open MPI's transports are restricted"},
                                   {"ONEDNN_VERBOSE", nullptr, "oneDNN writes a line for each kernel"},
                                   {"DNNL_VERBOSE", nullptr, "oneDNN writes a line for each kernel"},
                                   {"MALLOC_CHECK_", nullptr, "memory is checked at every allocation"},
                                   {"LD_PRELOAD", nullptr, "another library stands before all that ranks load"}};
  bool fine = true;
  for (const Setting& setting : kSettings) {
    const auto value = view.env(setting.name);
    if (!value || value->empty() || value == "0" || (setting.bad != nullptr && *value != setting.bad)) continue;
    report.warn(fmt::format("{}={}: {}", setting.name, printable(*value), setting.what),
                fmt::format("unset {}, unless it is meant", setting.name));
    fine = false;
  }
  if (fine) report.ok("no settings of NCCL, CUDA, Open MPI and oneDNN that cost time");
}

struct Row {
  const char* name;
  const char* about;
  void (*check)(const View& view, RowFindings& report);
};

constexpr Row kRows[] = {
    {"open-files", "the limit of open files", check_open_files},
    {"processes", "the limits of processes and threads, of the user and of control groups", check_processes},
    {"locked-memory", "the limit of locked memory, for GPUs and RDMA", check_locked_memory},
    {"address-space", "limits of address space", check_address_space},
    {"shared-memory", "size and free space of /dev/shm", check_shared_memory},
    {"memory", "free memory, of the machine and of control groups; swap; overcommit", check_memory},
    {"memory-kills", "processes that the kernel has ended for lack of memory", check_memory_kills},
    {"huge-pages", "transparent huge pages", check_huge_pages},
    {"numa", "nodes without memory; pages that the kernel moves", check_numa},
    {"instructions", "AVX2 or AVX-512, and what hides it", check_instructions},
    {"frequency", "governor, caps and boost", check_governor},
    {"affinity", "processors that this process may use", check_affinity},
    {"cpu-quota", "quotas of control groups", check_cpu_quota},
    {"openmp", "settings of OpenMP and of libraries' threads in the environment", check_openmp},
    {"load", "other programs that compute", check_load},
    {"steal", "time that other virtual machines have taken", check_steal},
    {"host-name", "what the host name resolves to", check_host_name},
    {"network", "interfaces: chosen ones, speed, duplex, MTU, errors", check_interfaces},
    {"tcp-buffers", "the kernel's limits of sockets' buffers", check_tcp_buffers},
    {"clock", "whether the clock is synchronised", check_clock},
    {"disk", "free space, files, speed and fsync of --dir", check_disk},
    {"gpus", "driver, errors, compute mode, heat, other users, CUDA_VISIBLE_DEVICES", check_gpus},
    {"gpu-links", "between GPUs: peer access, NVLink; to the host: width of PCIe", check_gpu_links},
    {"nccl", "by what NCCL will move data, on this host and between hosts", check_nccl},
    {"libraries", "settings of NCCL, CUDA, Open MPI and oneDNN in the environment", check_libraries},
};

}  // namespace

const char* name_of(Severity severity) {
  switch (severity) {
    case Severity::kOk: return "ok";
    case Severity::kNote: return "note";
    case Severity::kWarning: return "warning";
    case Severity::kFailure: return "failure";
  }
  return "?";
}

Severity severity_of(const std::string& name) {
  for (const Severity severity : {Severity::kNote, Severity::kWarning, Severity::kFailure})
    if (name == name_of(severity)) return severity;
  return Severity::kOk;
}

std::vector<Finding> check_host(const View& view) {
  std::vector<Finding> findings;
  for (const Row& row : kRows) {
    RowFindings report(findings, row.name);
    row.check(view, report);
  }
  return findings;
}

std::vector<std::pair<std::string, std::string>> host_checks() {
  std::vector<std::pair<std::string, std::string>> checks;
  for (const Row& row : kRows) checks.emplace_back(row.name, row.about);
  return checks;
}

}  // namespace lockstep::doctor
