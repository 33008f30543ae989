// Time, what is random, threads, processes and signals.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <cstdarg>

#include "process.h"

using namespace lockstep::simulation;

namespace {

// Threads.

struct Start {
  void* (*routine)(void*);
  void* argument;
  std::uint32_t task;
};

void end_thread() {
  if (!simulated()) return;
  const std::uint32_t ended = self;
  world->tasks[ended].state = TaskState::kEnded;
  wake(&world->tasks[ended], true);
  self = 0;  // what its destructors call is as it was
  world->change();
  const std::uint32_t next = world->choose();
  ++world->turns;
  world->give(next);
}

void* run_thread(void* given) {
  const Start start = *static_cast<Start*>(given);
  std::free(given);
  self = start.task;
  world->wait(self);
  void* const result = start.routine(start.argument);
  end_thread();
  return result;
}

std::uint32_t task_of(pthread_t thread) {
  for (std::uint32_t i = 1; i < world->task_count; ++i)
    if (world->tasks[i].process == own_process && world->tasks[i].handle == thread &&
        world->tasks[i].state != TaskState::kFree)
      return i;
  return 0;
}

// Processes.

Role role_of(const char* command, std::size_t length) {
  const auto has = [&](const char* word) {
    for (std::size_t i = 0; i < length; i += std::strlen(command + i) + 1)
      if (std::strcmp(command + i, word) == 0) return true;
    return false;
  };
  if (has("_rank")) return Role::kWrapper;
  if (has("_host")) return Role::kHelper;
  if (has("launch")) return Role::kLauncher;
  return has("train") ? Role::kRank : Role::kOther;
}

/// A program begins, in a process that its parent has entered.
__attribute__((constructor)) void begin_program() {
  const char* const path = std::getenv(kWorldVariable);
  if (path == nullptr) return;
  const int fd = static_cast<int>(raw_syscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>(path), O_RDWR | O_CLOEXEC));
  if (fd < 0) World::fail("simulation: its file is not there\n");
  void* const memory = ::mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  raw_syscall(SYS_close, fd);
  if (memory == MAP_FAILED) World::fail("simulation: no memory\n");
  world = static_cast<World*>(memory);
  const int pid = static_cast<int>(raw_syscall(SYS_getpid));
  for (std::uint32_t i = 1; i < world->task_count; ++i)
    if (world->processes[world->tasks[i].process].pid == pid && !world->processes[world->tasks[i].process].ended &&
        world->tasks[i].state == TaskState::kRuns)
      self = i;
  if (self == 0) World::fail("simulation: a process that nobody knows\n");
  own_process = task().process;
  task().handle = ::pthread_self();
  Process& process = world->processes[own_process];
  char command[4096];
  const int file =
      static_cast<int>(raw_syscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>("/proc/self/cmdline"), O_RDONLY));
  const long length = raw_syscall(SYS_read, file, reinterpret_cast<long>(command), sizeof command - 1);
  raw_syscall(SYS_close, file);
  process.role = role_of(command, length > 0 ? static_cast<std::size_t>(length) : 0);
  if (const char* const host = std::getenv(kHostVariable)) process.host = std::atoi(host);
  if (world->lost[process.host]) raw_syscall(SYS_exit_group, 255);
  adopt_streams();
  const char* const rank = std::getenv("RANK");
  process.rank = process.role == Role::kLauncher            ? -1
                 : std::getenv("LOCKSTEP_SPARE") != nullptr ? kSpare
                 : rank != nullptr                          ? std::atoi(rank)
                                                            : -1;
}

}  // namespace

extern "C" {

// Time.

int clock_gettime(clockid_t clock, timespec* time) {
  if (!simulated())
    return static_cast<int>(result_of(raw_syscall(SYS_clock_gettime, clock, reinterpret_cast<long>(time))));
  world->now += 50;
  *time = timespec_of(world->now + base_of(clock));
  return 0;
}
int gettimeofday(timeval* __restrict time, void* __restrict) {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME, &now);
  *time = {.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return 0;
}
time_t time(time_t* out) {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}
int nanosleep(const timespec* time, timespec* left) {
  if (!simulated()) return REAL(nanosleep)(time, left);
  sleep_ns(ns_of(*time));
  return 0;
}
int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  if (!simulated()) return REAL(clock_nanosleep)(clock, flags, time, left);
  if ((flags & TIMER_ABSTIME) != 0)
    wait_for(nullptr, moment_of(clock, *time), "clock_nanosleep");
  else
    sleep_ns(ns_of(*time));
  return 0;
}
int usleep(useconds_t us) {
  const timespec time = timespec_of(std::uint64_t{us} * 1000);
  return ::nanosleep(&time, nullptr);
}
unsigned sleep(unsigned seconds) {
  const timespec time = {.tv_sec = seconds, .tv_nsec = 0};
  ::nanosleep(&time, nullptr);
  return 0;
}
int sched_yield() {
  if (!simulated()) return static_cast<int>(raw_syscall(SYS_sched_yield));
  note("sched_yield");
  world->pass(self);
  return 0;
}
int timerfd_create(int clock, int flags) {
  if (!simulated()) return REAL(timerfd_create)(clock, flags);
  const int fd = ::eventfd(0, flags & (O_NONBLOCK | O_CLOEXEC));
  if (fd >= 0 && fd < kMostFiles) files[fd] = {.kind = File::kTimer};
  return fd;
}
int timerfd_settime(int fd, int flags, const itimerspec* value, itimerspec* old) {
  if (!simulated() || !is_timer(fd)) return REAL(timerfd_settime)(fd, flags, value, old);
  const std::uint64_t ns = ns_of(value->it_value);
  files[fd].expires = ns == 0                            ? 0
                      : (flags & TFD_TIMER_ABSTIME) != 0 ? moment_of(CLOCK_MONOTONIC, value->it_value)
                                                         : after(ns);
  files[fd].interval = ns_of(value->it_interval);
  std::uint64_t count;
  if (is_ready(fd, POLLIN)) raw_syscall(SYS_read, fd, reinterpret_cast<long>(&count), sizeof count);
  return 0;
}

// What is random.

ssize_t getrandom(void* bytes, std::size_t count, unsigned flags) {
  if (!simulated())
    return result_of(raw_syscall(SYS_getrandom, reinterpret_cast<long>(bytes), static_cast<long>(count), flags));
  for (std::size_t i = 0; i < count; ++i)
    static_cast<unsigned char*>(bytes)[i] = static_cast<unsigned char>(world->draw());
  return static_cast<ssize_t>(count);
}
int getentropy(void* bytes, std::size_t count) { return ::getrandom(bytes, count, 0) < 0 ? -1 : 0; }

// Locks.

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  if (!simulated()) return REAL(pthread_mutex_lock)(mutex);
  maybe_pass("mutex_lock");
  int code;
  while ((code = REAL(pthread_mutex_trylock)(mutex)) == EBUSY) wait_for(mutex, kNever, "mutex_lock");
  return code;
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  const int code = REAL(pthread_mutex_unlock)(mutex);
  if (simulated()) {
    wake(mutex, true);
    maybe_pass("mutex_unlock");
  }
  return code;
}
static int wait_at(pthread_cond_t* condition, pthread_mutex_t* mutex, std::uint64_t deadline) {
  REAL(pthread_mutex_unlock)(mutex);
  wake(mutex, true);
  const bool woken = wait_for(condition, deadline, "cond_wait");
  int code;
  while ((code = REAL(pthread_mutex_trylock)(mutex)) == EBUSY) wait_for(mutex, kNever, "cond_wait: mutex");
  return woken ? 0 : ETIMEDOUT;
}
int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (!simulated()) return REAL(pthread_cond_wait)(condition, mutex);
  return wait_at(condition, mutex, kNever);
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* time) {
  if (!simulated()) return REAL(pthread_cond_timedwait)(condition, mutex, time);
  return wait_at(condition, mutex, moment_of(CLOCK_REALTIME, *time));
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* time) {
  if (!simulated()) return REAL(pthread_cond_clockwait)(condition, mutex, clock, time);
  return wait_at(condition, mutex, moment_of(clock, *time));
}
int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (!simulated()) return REAL(pthread_cond_signal)(condition);
  wake(condition, false);
  maybe_pass("cond_signal");
  return 0;
}
int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  if (!simulated()) return REAL(pthread_cond_broadcast)(condition);
  wake(condition, true);
  maybe_pass("cond_broadcast");
  return 0;
}
int pthread_cond_destroy(pthread_cond_t* condition) noexcept {
  return simulated() ? 0 : REAL(pthread_cond_destroy)(condition);
}
int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept {
  if (!simulated()) return REAL(pthread_rwlock_rdlock)(lock);
  int code;
  while ((code = REAL(pthread_rwlock_tryrdlock)(lock)) == EBUSY) wait_for(lock, kNever, "rwlock");
  return code;
}
int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept {
  if (!simulated()) return REAL(pthread_rwlock_wrlock)(lock);
  int code;
  while ((code = REAL(pthread_rwlock_trywrlock)(lock)) == EBUSY) wait_for(lock, kNever, "rwlock");
  return code;
}
int pthread_rwlock_unlock(pthread_rwlock_t* lock) noexcept {
  const int code = REAL(pthread_rwlock_unlock)(lock);
  if (simulated()) wake(lock, true);
  return code;
}

int pthread_once(pthread_once_t* control, void (*routine)()) {
  if (!simulated()) return REAL(pthread_once)(control, routine);
  constexpr int kUnderWay = 1, kDone = 2;  // of glibc
  for (;;) {
    const int state = __atomic_load_n(control, __ATOMIC_ACQUIRE);
    if ((state & kDone) == 0 && (state & kUnderWay) != 0) {
      wait_for(control, kNever, "once");
      continue;
    }
    const int code = REAL(pthread_once)(control, routine);
    if ((state & kDone) == 0) wake(control, true);
    return code;
  }
}

// Threads.

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*routine)(void*),
                   void* argument) noexcept {
  if (!simulated()) return REAL(pthread_create)(thread, attributes, routine, argument);
  auto* const start = static_cast<Start*>(std::malloc(sizeof(Start)));
  *start = {routine, argument, world->add_task(own_process)};
  const int code = REAL(pthread_create)(thread, attributes, run_thread, start);
  if (code != 0) {
    world->tasks[start->task].state = TaskState::kFree;
    std::free(start);
    return code;
  }
  world->tasks[start->task].handle = *thread;
  world->quiet = false;
  maybe_pass("pthread_create");
  return 0;
}
int pthread_join(pthread_t thread, void** result) {
  if (!simulated()) return REAL(pthread_join)(thread, result);
  if (const std::uint32_t joined = task_of(thread); joined != 0) {
    while (world->tasks[joined].state != TaskState::kEnded) wait_for(&world->tasks[joined], kNever, "pthread_join");
    world->tasks[joined].state = TaskState::kFree;
  }
  return REAL(pthread_join)(thread, result);
}

// Processes and signals.

pid_t fork() noexcept {
  if (!simulated()) return REAL(fork)();
  const int parent = static_cast<int>(raw_syscall(SYS_getpid));
  const std::uint32_t process = world->add_process(0, parent), child = world->add_task(process);
  const pid_t pid = REAL(fork)();
  if (pid < 0) {
    world->processes[process].ended = true;
    world->tasks[child].state = TaskState::kFree;
    return pid;
  }
  if (pid == 0) {
    self = child;
    own_process = process;
    world->wait(self);
    task().handle = ::pthread_self();
    return 0;
  }
  world->processes[process].pid = pid;
  world->processes[process].host = own_host();
  world->processes[process].role = world->processes[own_process].role == Role::kLauncher ? Role::kReaper : Role::kOther;
  world->change();
  maybe_pass("fork");
  return pid;
}
pid_t _Fork() noexcept { return ::fork(); }
pid_t vfork() noexcept { return ::fork(); }

pid_t wait4(pid_t pid, int* status, int options, rusage* usage) {
  if (!simulated()) return REAL(wait4)(pid, status, options, usage);
  long found = 0;
  const auto look = [&] {
    found =
        raw_syscall(SYS_wait4, pid, reinterpret_cast<long>(status), options | WNOHANG, reinterpret_cast<long>(usage));
    return found != 0;
  };
  if ((options & WNOHANG) != 0)
    look();
  else
    look_until(kNever, "wait", look);
  return static_cast<pid_t>(result_of(found));
}
pid_t waitpid(pid_t pid, int* status, int options) { return ::wait4(pid, status, options, nullptr); }
pid_t wait3(int* status, int options, rusage* usage) { return ::wait4(-1, status, options, usage); }
pid_t wait(int* status) { return ::wait4(-1, status, 0, nullptr); }
int kill(pid_t pid, int number) noexcept {
  const long code = raw_syscall(SYS_kill, pid, number);
  if (simulated() && code == 0 && number != 0) settle();
  return static_cast<int>(result_of(code));
}
int prctl(int option, ...) noexcept {
  va_list arguments;
  va_start(arguments, option);
  const long a = va_arg(arguments, long), b = va_arg(arguments, long), c = va_arg(arguments, long),
             d = va_arg(arguments, long);
  va_end(arguments);
  if (simulated() && option == PR_SET_PDEATHSIG) world->processes[own_process].dies_with_parent = static_cast<int>(a);
  return static_cast<int>(result_of(raw_syscall(SYS_prctl, option, a, b, c, d)));
}
int sigwait(const sigset_t* set, int* number) {
  if (!simulated()) return REAL(sigwait)(set, number);
  const timespec none = {};
  look_until(kNever, "sigwait", [&] {
    *number = static_cast<int>(
        raw_syscall(SYS_rt_sigtimedwait, reinterpret_cast<long>(set), 0, reinterpret_cast<long>(&none), 8));
    return *number > 0;
  });
  return 0;
}

// Processors: a machine with two, of which the simulation uses one. Whom a thread is bound to changes nothing.

static cpu_set_t bound_to = {{0b11}};

int sched_getaffinity(pid_t pid, std::size_t size, cpu_set_t* set) noexcept {
  if (!simulated()) return REAL(sched_getaffinity)(pid, size, set);
  std::memset(set, 0, size);
  std::memcpy(set, &bound_to, size < sizeof bound_to ? size : sizeof bound_to);
  return 0;
}
int sched_setaffinity(pid_t pid, std::size_t size, const cpu_set_t* set) noexcept {
  if (!simulated()) return REAL(sched_setaffinity)(pid, size, set);
  bound_to = {};
  std::memcpy(&bound_to, set, size < sizeof bound_to ? size : sizeof bound_to);
  return 0;
}
int sched_getcpu() noexcept {
  if (!simulated()) return REAL(sched_getcpu)();
  return (bound_to.__bits[0] & 1) != 0 ? 0 : 1;
}

// Of the C library's only function for system calls, as atomics' waits and shared memory's use it.
long syscall(long number, ...) noexcept {
  va_list arguments;
  va_start(arguments, number);
  const long a = va_arg(arguments, long), b = va_arg(arguments, long), c = va_arg(arguments, long),
             d = va_arg(arguments, long), e = va_arg(arguments, long), f = va_arg(arguments, long);
  va_end(arguments);
  if (!simulated()) return result_of(raw_syscall(number, a, b, c, d, e, f));
  if (number == SYS_getrandom)
    return ::getrandom(reinterpret_cast<void*>(a), static_cast<std::size_t>(b), static_cast<unsigned>(c));
  if (number == SYS_pidfd_send_signal) {
    const long code = raw_syscall(number, a, b, c, d);
    if (code == 0) settle();
    return result_of(code);
  }
  if (number == SYS_sched_getaffinity && static_cast<std::size_t>(b) >= sizeof(long)) {
    ::sched_getaffinity(0, static_cast<std::size_t>(b), reinterpret_cast<cpu_set_t*>(c));
    return static_cast<long>(b) < 128 ? b : 128;
  }
  if (number != SYS_futex) return result_of(raw_syscall(number, a, b, c, d, e, f));
  const auto* word = reinterpret_cast<const std::uint32_t*>(a);
  switch (b & FUTEX_CMD_MASK) {
    case FUTEX_WAIT:
    case FUTEX_WAIT_BITSET: {
      if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != static_cast<std::uint32_t>(c)) {
        errno = EAGAIN;
        return -1;
      }
      std::uint64_t deadline = kNever;
      if (d != 0) {
        const auto& time = *reinterpret_cast<const timespec*>(d);
        deadline = (b & FUTEX_CMD_MASK) == FUTEX_WAIT
                       ? after(ns_of(time))
                       : moment_of((b & FUTEX_CLOCK_REALTIME) != 0 ? CLOCK_REALTIME : CLOCK_MONOTONIC, time);
      }
      // Of memory that processes share no address says who waits: each looks by itself.
      const bool changed = look_until(
          deadline, "futex", [&] { return __atomic_load_n(word, __ATOMIC_SEQ_CST) != static_cast<std::uint32_t>(c); });
      if (changed) return 0;
      errno = ETIMEDOUT;
      return -1;
    }
    default:
      world->change();
      maybe_pass("futex_wake");
      return 1;
  }
}

}  // extern "C"
