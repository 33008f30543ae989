// Runs one job under the simulation (world.h), by one seed, and says how it ended.
//
//   simulated_job --seed S --system simulated_system.so --dir DIR [--processor P] [--switches P] [--pace-ns NS]
//                 [--latency-ns NS] [--longest-ms MS] [FAULT VALUE] … -- PROGRAM ARGUMENTS…
//
//   --kill ROLE:RANK:TURN      ROLE is launcher, wrapper, rank, reaper or helper; RANK -1 any, -2 a spare, of a helper
//   its host
//   --stop ROLE:RANK:TURN:MS   as SIGSTOP does, until SIGCONT
//   --terminate TURN           SIGTERM to the launcher
//   --cut HOST:TURN:MS         nothing from and to it arrives before
//   --lose HOST:TURN           its processes end, and it says no word more
//   --clock TURN:SECONDS       the time of day is set forwards, or back
//   --full TURN:MS             disks have no space left
//   --power TURN               all processes of all hosts end, and files are what a disk has of them
//
// DIR gets what the job prints, and is its /tmp. Prints one line of JSON; exits with 0 whatever the job does, with 1
// where it could not be run. Takes root, or namespaces for users. As `simulated_job ssh HOST COMMAND` it is ssh between
// simulated hosts.
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "disk.h"
#include "network.h"
#include "world.h"

namespace lockstep::simulation {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kMostTurns = 20'000'000, kAfterwards = 2 * kSecond;
constexpr const char* kWorldPath = "/dev/shm/.world";
constexpr auto kHangs = std::chrono::seconds(60);  // of real time, in a call that the simulation does not know

enum class FaultKind { kKill, kStop, kTerminate, kCut, kLose, kPower, kClock, kFull };

struct Fault {
  FaultKind kind;
  Role role = Role::kOther;
  int rank = -1;  // or host
  std::uint64_t at_turn = 0;
  std::int64_t lasts_ns = 0;  // until SIGCONT, until the host is back; kClock: by which it is set
};

struct Options {
  std::uint64_t seed = 0;
  int processor = -1;  // of this machine, for all processes of the job
  double switches = 0.1;
  std::uint64_t pace = 2000, latency = 200'000, longest = 7200 * kSecond;
  std::string system, directory;
  std::vector<Fault> faults;
  std::vector<char*> command;
};

void check(bool ok, const std::string& doing) {
  if (!ok) throw std::runtime_error(fmt::format("{}: {}", doing, std::strerror(errno)));
}

void write_file(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

const char* name_of(Role role) {
  constexpr const char* kNames[] = {"other", "launcher", "wrapper", "rank", "reaper", "helper"};
  return kNames[static_cast<int>(role)];
}

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ':');) parts.push_back(part);
  return parts;
}

Fault parse_fault(FaultKind kind, const std::string& text) {
  const auto parts = parts_of(text);
  Fault fault{.kind = kind};
  std::size_t next = 0;
  if (kind == FaultKind::kTerminate || kind == FaultKind::kPower || kind == FaultKind::kClock ||
      kind == FaultKind::kFull) {
    fault.role = Role::kLauncher;
  } else {
    if (kind == FaultKind::kKill || kind == FaultKind::kStop)
      for (const auto& name = parts.at(next++);
           const Role role : {Role::kLauncher, Role::kWrapper, Role::kRank, Role::kReaper, Role::kHelper})
        if (name == name_of(role)) fault.role = role;
    fault.rank = std::stoi(parts.at(next++));
  }
  fault.at_turn = std::stoull(parts.at(next++));
  if (kind == FaultKind::kStop || kind == FaultKind::kCut || kind == FaultKind::kFull)
    fault.lasts_ns = std::stoll(parts.at(next)) * 1'000'000;
  if (kind == FaultKind::kClock) fault.lasts_ns = std::stoll(parts.at(next)) * 1'000'000'000;
  return fault;
}

const std::map<std::string, FaultKind> kFaults = {
    {"--kill", FaultKind::kKill},   {"--stop", FaultKind::kStop}, {"--terminate", FaultKind::kTerminate},
    {"--cut", FaultKind::kCut},     {"--lose", FaultKind::kLose}, {"--power", FaultKind::kPower},
    {"--clock", FaultKind::kClock}, {"--full", FaultKind::kFull},
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--") {
      options.command.assign(argv + i + 1, argv + argc);
      options.command.push_back(nullptr);
      break;
    }
    if (i + 1 == argc) throw std::runtime_error(name + " takes a value");
    const std::string value = argv[++i];
    if (name == "--seed")
      options.seed = std::stoull(value);
    else if (name == "--processor")
      options.processor = std::stoi(value);
    else if (name == "--switches")
      options.switches = std::stod(value);
    else if (name == "--latency-ns")
      options.latency = std::stoull(value);
    else if (name == "--longest-ms")
      options.longest = std::stoull(value) * 1'000'000;
    else if (name == "--pace-ns")
      options.pace = std::stoull(value);
    else if (name == "--system")
      options.system = value;
    else if (name == "--dir")
      options.directory = value;
    else if (const auto kind = kFaults.find(name); kind != kFaults.end())
      options.faults.push_back(parse_fault(kind->second, value));
    else
      throw std::runtime_error("there is no " + name);
  }
  if (options.command.size() < 2 || options.system.empty() || options.directory.empty())
    throw std::runtime_error("--system, --dir and a command are needed");
  return options;
}

/// Process 1 of the job's namespaces.
class Supervisor {
 public:
  Supervisor(const Options& options, World& world, const int (&outputs)[2])
      : options_(options), world_(world), outputs_{outputs[0], outputs[1]}, network_(world, options.latency) {}

  std::string run() {
    start();
    for (;;) {
      next_fault();
      const std::uint32_t next = world_.choose();
      ++world_.turns;
      if (next != 0) {
        world_.give(next);
        wait_for_turn();
      }
      if (!act()) break;
    }
    return result();
  }

 private:
  void start() {
    world_.tasks[0].state = TaskState::kWaits;
    world_.tasks[0].deadline = kNever;
    world_.task_count = 1;
    world_.add_process(::getpid(), 0);
    world_.next_fault = world_.next_event = kNever;
    const std::uint32_t process = world_.add_process(0, ::getpid()), task = world_.add_task(process);
    const int pid = ::fork();
    check(pid >= 0, "starting the job");
    if (pid == 0) {
      while (world_.processes[process].pid == 0) ::usleep(10);
      for (int target : {1, 2}) {
        if (::dup2(outputs_[target - 1], target) < 0) ::_exit(98);
      }
      const int null = ::open("/dev/null", O_RDONLY);
      ::dup2(null, 0);
      ::close(null);
      ::setenv("LD_PRELOAD", options_.system.c_str(), 1);
      ::setenv("TMPDIR", "/tmp", 1);
      ::personality(ADDR_NO_RANDOMIZE);
      world_.wait(task);
      ::execvp(options_.command[0], options_.command.data());
      ::_exit(97);
    }
    launcher_ = process;
    world_.processes[process].role = Role::kLauncher;
    __atomic_store_n(&world_.processes[process].pid, pid, __ATOMIC_SEQ_CST);
  }

  void next_fault() {
    world_.next_fault = kNever;
    for (const Fault& fault : options_.faults)
      if (!done_.contains(&fault) && fault.at_turn < world_.next_fault) world_.next_fault = fault.at_turn;
  }

  /// Until it is the supervisor's turn, or the thread whose turn it is has ended with its process.
  void wait_for_turn() {
    Task& own = world_.tasks[0];
    auto moved = std::chrono::steady_clock::now();
    std::uint64_t turns = world_.turns;
    while (own.turn.load() == 0) {
      const timespec moment = {.tv_sec = 0, .tv_nsec = 200'000};
      raw_syscall(SYS_futex, reinterpret_cast<long>(&own.turn), FUTEX_WAIT, 0, reinterpret_cast<long>(&moment));
      if (own.turn.load() != 0) break;
      const std::uint32_t process = world_.tasks[world_.current.load()].process;
      if (has_ended(process)) {
        world_.request = Request::kSettle;
        return;
      }
      const auto now = std::chrono::steady_clock::now();
      if (world_.turns != turns) turns = world_.turns, moved = now;
      if (now - moved < kHangs) continue;
      const Task& task = world_.tasks[world_.current.load()];
      problem_ = fmt::format("hangs after {} in process {} ({} {})", task.doing, world_.processes[process].pid,
                             name_of(world_.processes[process].role), world_.processes[process].rank);
      return;
    }
    own.turn.store(0);
  }

  /// False: the job is over.
  bool act() {
    if (!problem_.empty()) return false;
    const Request request = std::exchange(world_.request, Request::kNone);
    if (request != Request::kNone) settle();
    network_.work();
    if (request == Request::kStuck) {
      problem_ = "all wait for ever:" + waits();
      return false;
    }
    if (world_.turns > kMostTurns || world_.now > options_.longest) {
      problem_ = "does not end:" + waits();
      return false;
    }
    for (const Fault& fault : options_.faults)
      if (!done_.contains(&fault) && fault.at_turn <= world_.turns) apply(fault);
    while (!continues_.empty() && continues_.begin()->first <= world_.now) {
      const int pid = continues_.begin()->second;
      continues_.erase(continues_.begin());
      ::kill(pid, SIGCONT);
      settle();
    }
    if (alive().empty()) return false;
    // Who is cut off does not know before.
    if (world_.processes[launcher_].ended && ends_ == kNever)
      ends_ = std::max(world_.now, network_.cut_until()) + kAfterwards;
    if (world_.now >= ends_) {
      problem_ = "remain:";
      for (const std::uint32_t index : alive()) problem_ += " " + describe(index);
      return false;
    }
    world_.next_event = std::min(
        {ends_, options_.longest + 1, continues_.empty() ? kNever : continues_.begin()->first, network_.next()});
    return true;
  }

  void apply(const Fault& fault) {
    const auto moment = [&] {
      return fmt::format("at turn {}, {:.6f} s", world_.turns, static_cast<double>(world_.now) / 1e9);
    };
    if (fault.kind == FaultKind::kCut) {
      network_.cut(fault.rank, world_.now + static_cast<std::uint64_t>(fault.lasts_ns));
      applied_.push_back(fmt::format("cut of host {} {}", fault.rank, moment()));
    } else if (fault.kind == FaultKind::kLose) {
      network_.work();
      network_.lose(fault.rank);
      applied_.push_back(fmt::format("loss of host {} {}", fault.rank, moment()));
      for (const std::uint32_t index : alive())
        if (world_.processes[index].host == fault.rank) ::kill(world_.processes[index].pid, SIGKILL);
      settle();
    } else if (fault.kind == FaultKind::kClock) {
      world_.clock_ns += fault.lasts_ns;
      applied_.push_back(fmt::format("clock of all -1 {}", moment()));
    } else if (fault.kind == FaultKind::kFull) {
      world_.full_until = world_.now + static_cast<std::uint64_t>(fault.lasts_ns);
      applied_.push_back(fmt::format("full of all -1 {}", moment()));
    } else if (fault.kind == FaultKind::kPower) {
      applied_.push_back(fmt::format("power of all -1 {}", moment()));
      for (const std::uint32_t index : alive()) ::kill(world_.processes[index].pid, SIGKILL);
      settle();
      lose_power(world_);
    } else if (const auto index = find(fault); index != 0) {
      const Process& process = world_.processes[index];
      const int number = fault.kind == FaultKind::kKill ? SIGKILL : fault.kind == FaultKind::kStop ? SIGSTOP : SIGTERM;
      applied_.push_back(fmt::format("{} of {} {} {}", number, name_of(process.role), process.rank, moment()));
      ::kill(process.pid, number);
      while (fault.kind == FaultKind::kStop && state_of(process.pid) != 'T') ::usleep(20);
      if (fault.kind == FaultKind::kStop)
        continues_.emplace(world_.now + static_cast<std::uint64_t>(fault.lasts_ns), process.pid);
      settle();
    }
    done_.insert(&fault);
  }

  /// Whom it is meant for; a spare that has taken the rank's place, where there is one; 0: nobody.
  std::uint32_t find(const Fault& fault) const {
    std::uint32_t spare = 0;
    for (const std::uint32_t index : alive()) {
      const Process& process = world_.processes[index];
      if (process.role != fault.role || process.stopped) continue;
      if ((process.role == Role::kHelper ? process.host : process.rank) == fault.rank || fault.rank == -1) return index;
      if (process.rank == kSpare) spare = index;
    }
    return spare;
  }

  std::vector<std::uint32_t> alive() const {
    std::vector<std::uint32_t> found;
    for (std::uint32_t i = 1; i < world_.process_count; ++i)
      if (!world_.processes[i].ended) found.push_back(i);
    return found;
  }

  bool has_ended(std::uint32_t index) {
    if (world_.processes[index].ended) return true;
    auto& fd = descriptors_[index];
    if (fd == 0) fd = static_cast<int>(::syscall(SYS_pidfd_open, world_.processes[index].pid, 0));
    if (fd < 0) return true;
    pollfd entry = {.fd = fd, .events = POLLIN, .revents = 0};
    return ::poll(&entry, 1, 0) > 0;
  }

  static char state_of(int pid) {
    std::ifstream file(fmt::format("/proc/{}/stat", pid));
    std::string text;
    std::getline(file, text);
    const auto name_end = text.rfind(')');
    return name_end == std::string::npos || name_end + 2 >= text.size() ? '?' : text[name_end + 2];
  }

  /// Until no signal is on its way: who has ended, who is stopped.
  void settle() {
    for (bool again = true; again;) {
      again = false;
      for (const std::uint32_t index : alive()) {
        if (has_ended(index)) {
          end(index);
          again = true;
          continue;
        }
        Process& process = world_.processes[index];
        std::ifstream status(fmt::format("/proc/{}/status", process.pid));
        unsigned long long pending = 0, blocked = 0;
        for (std::string line; std::getline(status, line);) {
          if (line.starts_with("State:")) process.stopped = line.find("\tT") != std::string::npos;
          if (line.starts_with("SigPnd:") || line.starts_with("ShdPnd:"))
            pending |= std::stoull(line.substr(8), nullptr, 16);
          if (line.starts_with("SigBlk:")) blocked = std::stoull(line.substr(8), nullptr, 16);
        }
        if ((pending & (1ULL << (SIGKILL - 1))) != 0) again = true;
        if ((pending & ~blocked) != 0 && !process.stopped && world_.turns != waited_at_) again = true;
      }
      if (again) ::usleep(20);
    }
    waited_at_ = world_.turns;
  }

  void end(std::uint32_t index) {
    Process& process = world_.processes[index];
    process.ended = true;
    if (const int fd = descriptors_[index]; fd > 0) ::close(fd);
    for (std::uint32_t i = 1; i < world_.task_count; ++i)
      if (world_.tasks[i].process == index) world_.tasks[i].state = TaskState::kFree;
    world_.stop_listening(process.pid);
    int status = 0;
    if (::waitpid(process.pid, &status, WNOHANG) == process.pid && index == launcher_) exit_ = status;
    for (const std::uint32_t child : alive())
      if (world_.processes[child].parent == process.pid && world_.processes[child].dies_with_parent == SIGKILL)
        while (!has_ended(child)) ::usleep(20);
    world_.change();
  }

  std::string describe(std::uint32_t index) const {
    const Process& process = world_.processes[index];
    std::string command;
    std::ifstream file(fmt::format("/proc/{}/cmdline", process.pid));
    std::getline(file, command);
    std::ranges::replace(command, '\0', ' ');
    return fmt::format("{} {} of host {} (process {}: {:.60})", name_of(process.role), process.rank, process.host,
                       process.pid, command);
  }

  std::string waits() const {
    std::string text;
    for (std::uint32_t i = 1; i < world_.task_count; ++i) {
      const Task& task = world_.tasks[i];
      if (task.state == TaskState::kFree || task.state == TaskState::kEnded) continue;
      text += fmt::format(" {}: {}{};", describe(task.process), task.doing,
                          world_.processes[task.process].stopped ? ", stopped" : "");
    }
    return text;
  }

  /// What the job has left in memory and in its directory for temporary files.
  static std::string files() {
    std::string found;
    for (const char* directory : {"/dev/shm", "/tmp"})
      for (const auto& entry : std::filesystem::directory_iterator(directory))
        if (!entry.path().filename().string().starts_with('.'))
          found += fmt::format("{}\"{}\"", found.empty() ? "" : ", ", entry.path().string());
    return found;
  }

  std::string result() const {
    std::string applied;
    for (const auto& one : applied_) applied += fmt::format("{}\"{}\"", applied.empty() ? "" : ", ", one);
    const int code = WIFSIGNALED(exit_) ? 128 + WTERMSIG(exit_) : WEXITSTATUS(exit_);
    return fmt::format(
        R"({{"seed": {}, "code": {}, "problem": "{}", "seconds": {:.6f}, "turns": {}, "hash": "{:016x}", "applied": [{}], "files": [{}]}})",
        options_.seed, code, problem_, static_cast<double>(world_.now) / 1e9, world_.turns, world_.hash, applied,
        files());
  }

  const Options& options_;
  World& world_;
  int outputs_[2];
  Network network_;
  std::uint32_t launcher_ = 0;
  std::set<const Fault*> done_;
  std::map<std::uint32_t, int> descriptors_;
  std::multimap<std::uint64_t, int> continues_;
  std::vector<std::string> applied_;
  std::string problem_;
  std::uint64_t ends_ = kNever, waited_at_ = kNever;
  int exit_ = 0;
};

/// In the new namespaces.
int supervise(const Options& options, std::uint32_t id) {
  int outputs[2];  // other directories are in their place soon
  for (int i : {0, 1}) {
    const std::string path = options.directory + (i == 0 ? "/stdout" : "/stderr");
    outputs[i] = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    check(outputs[i] >= 0, "opening " + path);
  }
  check(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "leaving mounts to others");
  check(::mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777") == 0, "mounting /dev/shm");
  const std::string tmp = options.directory + "/tmp";
  ::mkdir(tmp.c_str(), 0777);
  check(::mount(tmp.c_str(), "/tmp", nullptr, MS_BIND, nullptr) == 0, "binding /tmp");
  check(::mount("proc", "/proc", "proc", 0, nullptr) == 0, "mounting /proc");
  const int fd = ::open(kWorldPath, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  check(fd >= 0 && ::ftruncate(fd, sizeof(World)) == 0, "making its file");
  void* const memory = ::mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  check(memory != MAP_FAILED, "mapping its file");
  auto& world = *static_cast<World*>(memory);
  world.random = options.seed;
  world.id = id;
  world.switches = options.switches;
  world.pace = options.pace;
  world.hash = 0xcbf29ce484222325ULL;
  ::setenv(kWorldVariable, kWorldPath, 1);
  // One thread runs at a time, and hands over faster where the next one is on the same processor.
  if (options.processor >= 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(options.processor, &one);
    check(::sched_setaffinity(0, sizeof one, &one) == 0, "taking one processor");
  }
  std::puts(Supervisor(options, world, outputs).run().c_str());
  std::fflush(stdout);
  return 0;
}

// ssh between simulated hosts. The command's standard input and output are a connection to the client.

[[noreturn]] void serve_ssh(int port_to, const char* command) {
  ::setsid();
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {.sin_family = AF_INET, .sin_port = 0, .sin_addr = {}, .sin_zero = {}};
  socklen_t length = sizeof address;
  if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(listener, 1) != 0 ||
      ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    ::_exit(255);
  if (::write(port_to, &address.sin_port, sizeof address.sin_port) != sizeof address.sin_port) ::_exit(255);
  pollfd entries[] = {{listener, POLLIN, 0}, {port_to, POLLIN, 0}};
  ::poll(entries, 2, -1);
  if (entries[0].revents == 0) ::_exit(255);  // the client has ended
  ::close(port_to);
  const int client = ::accept4(listener, nullptr, nullptr, 0);
  ::dup2(client, 0);
  ::dup2(client, 1);
  ::close(client);
  ::close(listener);
  const std::string tmp = fmt::format("/tmp/host{}", std::getenv(kHostVariable));
  ::mkdir(tmp.c_str(), 0777);
  ::setenv("TMPDIR", tmp.c_str(), 1);
  ::execl("/bin/sh", "sh", "-c", command, nullptr);
  ::_exit(255);
}

int connect_ssh(const char* host, const char* command) {
  int ends[2];
  check(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "making a socket");
  const int pid = ::fork();
  if (pid == 0) {
    ::close(ends[0]);
    ::setenv(kHostVariable, host + std::strlen("host"), 1);
    ::execl("/proc/self/exe", "simulated_job", "sshd", std::to_string(ends[1]).c_str(), command, nullptr);
    ::_exit(255);
  }
  ::close(ends[1]);
  sockaddr_in address = {.sin_family = AF_INET, .sin_port = 0, .sin_addr = {}, .sin_zero = {}};
  if (::read(ends[0], &address.sin_port, sizeof address.sin_port) != sizeof address.sin_port) {
    ::sleep(15);
    fmt::print(stderr, "ssh: connect to host {} port 22: Connection timed out\n", host);
    return 255;
  }
  address.sin_addr.s_addr = htonl(0x0a000000u + static_cast<std::uint32_t>(std::stoi(host + std::strlen("host"))));
  const int remote = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(remote, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return 255;
  bool input_open = true;
  for (;;) {
    pollfd entries[] = {{input_open ? 0 : -1, POLLIN, 0}, {remote, POLLIN, 0}};
    if (::poll(entries, 2, -1) < 0) continue;
    for (int i : {0, 1}) {
      if (entries[i].revents == 0) continue;
      char bytes[65536];
      const ssize_t got = ::read(i == 0 ? 0 : remote, bytes, sizeof bytes);
      if (got <= 0 && i == 1) return got == 0 ? 0 : 255;
      if (got <= 0) {
        input_open = false;
        ::shutdown(remote, SHUT_WR);
        continue;
      }
      for (ssize_t done = 0; done < got;) {
        const ssize_t written = ::write(i == 0 ? remote : 1, bytes + done, static_cast<std::size_t>(got - done));
        if (written < 0) return 255;
        done += written;
      }
    }
  }
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const int uid = static_cast<int>(::getuid()), gid = static_cast<int>(::getgid());
  check(::unshare((uid == 0 ? 0 : CLONE_NEWUSER) | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC) == 0,
        "making namespaces");
  if (uid != 0) {
    write_file("/proc/self/setgroups", "deny");
    write_file("/proc/self/uid_map", fmt::format("{} {} 1", uid, uid));
    write_file("/proc/self/gid_map", fmt::format("{} {} 1", gid, gid));
  }
  const auto id = static_cast<std::uint32_t>(::getpid());
  const int pid = ::fork();
  check(pid >= 0, "starting process 1");
  if (pid == 0) {
    try {
      ::_exit(supervise(options, id));
    } catch (const std::exception& error) {
      fmt::print(stderr, "simulated_job: {}\n", error.what());
      ::_exit(1);
    }
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace
}  // namespace lockstep::simulation

int main(int argc, char** argv) {
  try {
    using namespace lockstep::simulation;
    if (argc == 4 && std::string(argv[1]) == "sshd") serve_ssh(std::stoi(argv[2]), argv[3]);
    if (argc == 4 && std::string(argv[1]) == "ssh") return connect_ssh(argv[2], argv[3]);
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "simulated_job: {}\n", error.what());
    return 1;
  }
}
