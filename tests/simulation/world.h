// The state that all processes of a simulated job share, and who of their threads runs.
#pragma once

#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace lockstep::simulation {

/// Note [Simulation]
/// A job runs as it is: its launcher, wrappers and ranks are the program's own processes. A library that is loaded
/// before the C library (simulated_system.so) replaces the functions that wait, read a clock, draw, or reach others.
/// Of all threads of all processes one runs at a time. Where it calls such a function, the next one is drawn: of those
/// that can run, each with the same probability. They see the simulation's clock alone, which jumps to the next
/// deadline where nobody can run: an hour takes no time. So a seed is a schedule, the same each time. A supervisor
/// (simulated_job.cpp), process 1 of a namespace, starts the job, ends processes at the turns of the schedule, and
/// looks at what remains. A thread that computes is never interrupted: all between two calls is as one.
///
/// Hosts are an address each, 10.0.0.1 to 10.0.0.9 of host1 to host9, the launcher's the first. What one sends to
/// another goes through the supervisor, which delivers it some time later, or not; processes of one host talk at once.

/// Note [Disks]
/// After a loss of power a disk has the contents of files as they were flushed last, and all changes of names up to the
/// last flush of anything, as journals keep them. Of what came later it has what is drawn: so many of the names'
/// changes, and of each file that was not flushed the old content, the new one, or some of both.
constexpr std::size_t kMostDiskSteps = 4096;
constexpr const char* kKeptPath = "/dev/shm/.kept-%u";         // copies of what names were taken from
constexpr const char* kDurablePath = "/dev/shm/.durable-%lu";  // and of what was flushed, by the file's number
enum class DiskChange : std::uint32_t { kCreate, kMakeDirectory, kRename, kExchange, kRemove, kRemoveDirectory };
struct DiskStep {
  DiskChange kind;
  std::uint32_t kept;  // the copy; 0: none
  char from[160], to[160];
};

constexpr std::size_t kMostTasks = 2048, kMostProcesses = 512, kMostListeners = 256, kMostCalls = 256, kMostHosts = 9;
constexpr const char* kHostVariable = "SIMULATED_HOST";  // the number of a process's host, from 1
constexpr std::uint64_t kNever = ~0ULL;
constexpr const char* kWorldVariable = "SIMULATED_WORLD";  // the path of its file
constexpr std::uint64_t kEpochSeconds = 1'780'000'000;     // when the simulated clock begins

/// Past the C library, whose functions the simulation replaces.
inline long raw_syscall(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0, long f = 0) {
  long result;
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  asm volatile("syscall"
               : "=a"(result)
               : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return result;
}

enum class TaskState : std::uint32_t {
  kFree,
  kRuns,   // or can
  kWaits,  // until somebody wakes it, or until its deadline
  kLooks,  // again, when anything has happened that others notice, or at its deadline
  kEnded,
};

/// A thread. Task 0 is the supervisor.
struct Task {
  std::atomic<std::uint32_t> turn;
  TaskState state;
  std::uint32_t process;
  std::uint64_t deadline;  // ns of the simulated clock
  std::uint64_t seen;      // kLooks: World::changes when it looked last
  const void* key;         // kWaits: the object of its process that it waits for
  std::uint64_t handle;    // its pthread_t
  std::uint32_t woken;     // by somebody, and not by its deadline
  char doing[28];          // the last call, for reports
};

enum class Role : std::uint32_t { kOther, kLauncher, kWrapper, kRank, kReaper, kHelper };

constexpr int kSpare = -2;  // in place of a rank

struct Process {
  int pid = 0, parent = 0;
  bool ended = false, stopped = false;
  int dies_with_parent = 0;  // the signal, 0: it does not
  Role role = Role::kOther;
  int rank = -1;
  int host = 1;
};

/// Where a socket of TCP is.
struct Place {
  int host = 0, port = 0;
  bool operator==(const Place&) const = default;
};

struct Listener {
  Place place;
  int pid;
};

constexpr Place kSwitch = {99, 0};  // the supervisor's socket for calls to other hosts
constexpr int kByTheSwitch = 100;   // is added to the host in the name of a socket that it calls from

/// Somebody has connected to another host, by way of the supervisor.
struct Call {
  Place from, to;
};

enum class Request : std::uint32_t { kNone, kSettle, kStuck };

struct World {
  std::uint32_t id;      // of no other simulation that runs now
  std::uint64_t random;  // its state
  std::uint64_t now;     // ns
  std::uint64_t changes;
  std::uint64_t turns;       // drawn
  std::uint64_t hash;        // of all that was drawn
  std::uint64_t next_fault;  // the turn before which the supervisor has to be asked
  std::uint64_t next_event;  // the time at which it has to be
  double switches;           // the probability at a call that does not wait
  std::uint64_t pace;        // ns between two turns, at most
  bool quiet;                // nobody has done anything since all have looked
  std::atomic<std::uint32_t> current;
  Request request;
  std::uint32_t task_count, process_count, listener_count, call_count;
  std::uint32_t next_port;
  bool traffic;               // there are bytes of another host's
  bool lost[kMostHosts + 1];  // hosts
  std::int64_t clock_ns;      // by which the time of day has been set forwards
  std::uint64_t full_until;   // disks have no space left before
  std::uint32_t disk_count, disk_synced, kept_count;
  Process processes[kMostProcesses];
  Listener listeners[kMostListeners];
  Call calls[kMostCalls];
  Task tasks[kMostTasks];
  DiskStep disk[kMostDiskSteps];

  // Splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
  std::uint64_t draw() {
    std::uint64_t z = (random += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  std::uint64_t draw_below(std::uint64_t bound) { return draw() % bound; }
  double draw_fraction() { return static_cast<double>(draw() >> 11) * 0x1p-53; }

  sockaddr_un name_of(Place place, socklen_t& length) const {
    sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = {}};
    const int written =
        std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "simulated-%08x-%d-%d", id, place.host, place.port);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(written));
    return name;
  }

  /// Of such a name; false where it is none.
  static bool read_name(const sockaddr_un& name, Place& place) {
    return std::sscanf(name.sun_path + 1, "simulated-%*8x-%d-%d", &place.host, &place.port) == 2;
  }
  /// Of a process that has ended, or of one place.
  void stop_listening(int pid, const Place* place = nullptr) {
    for (std::uint32_t i = 0; i < listener_count;)
      if (place != nullptr ? listeners[i].place == *place : listeners[i].pid == pid)
        listeners[i] = listeners[--listener_count];
      else
        ++i;
  }

  std::uint32_t add_process(int pid, int parent) {
    const std::uint32_t index = process_count++;
    if (index >= kMostProcesses) fail("too many processes");
    processes[index] = {.pid = pid, .parent = parent};
    return index;
  }
  std::uint32_t add_task(std::uint32_t process) {
    std::uint32_t index = 1;
    while (index < task_count && tasks[index].state != TaskState::kFree) ++index;
    if (index >= kMostTasks) fail("too many threads");
    if (index == task_count) ++task_count;
    Task& task = tasks[index];
    task.turn = 0;
    task.state = TaskState::kRuns;
    task.process = process;
    task.deadline = kNever;
    task.key = nullptr;
    task.handle = 0;
    return index;
  }

  /// What others may notice has happened.
  void change() {
    ++changes;
    quiet = false;
  }

  bool can_run(std::uint32_t index) const {
    const Task& task = tasks[index];
    const Process& process = processes[task.process];
    if (process.ended || process.stopped) return false;
    switch (task.state) {
      case TaskState::kRuns: return true;
      case TaskState::kWaits: return task.deadline <= now;
      case TaskState::kLooks: return task.deadline <= now || task.seen != changes;
      default: return false;
    }
  }

  /// Who is next. Moves the clock where nobody can run now.
  std::uint32_t choose() {
    if (request != Request::kNone || traffic || turns >= next_fault || now >= next_event) return 0;
    for (;;) {
      std::uint32_t ready[kMostTasks], count = 0;
      std::uint64_t soonest = next_event;
      for (std::uint32_t i = 1; i < task_count; ++i) {
        if (can_run(i))
          ready[count++] = i;
        else if (tasks[i].state == TaskState::kWaits || tasks[i].state == TaskState::kLooks) {
          const Process& process = processes[tasks[i].process];
          if (!process.ended && !process.stopped && tasks[i].deadline < soonest) soonest = tasks[i].deadline;
        }
      }
      if (count > 0) return ready[count == 1 ? 0 : draw_below(count)];
      if (!quiet) {  // what somebody has done may have gone unnoticed: all look once more
        quiet = true;
        ++changes;
        continue;
      }
      if (soonest == kNever) {
        request = Request::kStuck;
        return 0;
      }
      now = soonest > now ? soonest : now;
      if (now >= next_event) return 0;
    }
  }

  /// The thread of task `self`, whose state says what it waits for, lets the next one run and returns when it is its
  /// turn.
  void pass(std::uint32_t self) {
    now += 1 + draw_below(pace);
    const std::uint32_t next = choose();
    ++turns;
    hash = (hash ^ (next + 0x100 * now)) * 0x100000001b3ULL;
    if (next != self) {
      give(next);
      wait(self);
    }
    if (tasks[self].state != TaskState::kLooks) quiet = false;
    tasks[self].state = TaskState::kRuns;
  }
  void give(std::uint32_t next) {
    current.store(next);
    tasks[next].turn.store(1);
    raw_syscall(SYS_futex, reinterpret_cast<long>(&tasks[next].turn), FUTEX_WAKE, 1);
  }
  void wait(std::uint32_t self) {
    Task& task = tasks[self];
    while (task.turn.load() == 0) raw_syscall(SYS_futex, reinterpret_cast<long>(&task.turn), FUTEX_WAIT, 0);
    task.turn.store(0);
  }

  [[noreturn]] static void fail(const char* why) {
    raw_syscall(SYS_write, 2, reinterpret_cast<long>(why), static_cast<long>(std::strlen(why)));
    raw_syscall(SYS_exit_group, 99);
    __builtin_unreachable();
  }
};

}  // namespace lockstep::simulation
