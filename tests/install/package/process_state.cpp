// A program with signal handlers, a mask and settings of its own. It prints what is different in its process after each
// use of lockstep, in lines "USE: WHAT: BEFORE → NOW", or "USE: the same".
//   process_state         uses the library, and ends it
//   process_state exit    calls exit(7) within a function that has a group, as if there were none
#include <dlfcn.h>
#include <fcntl.h>
#include <locale.h>
#include <lockstep/comm.h>
#include <lockstep/nn.h>
#include <lockstep/trainer.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <new>
#include <string>
#include <thread>
#include <vector>

extern char** environ;

namespace {

using State = std::map<std::string, std::string>;

std::atomic<int> handlers_at_exit = 0;
std::atomic<int> signals_taken = 0;

template <class... Numbers>
std::string text(Numbers... numbers) {
  std::string made;
  for (const auto number : {static_cast<long long>(numbers)...})
    made += (made.empty() ? "" : " ") + std::to_string(number);
  return made;
}

long entries(const char* directory) {
  return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator());
}

State state() {
  State now;
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action = {};
    if (sigaction(number, nullptr, &action) != 0) continue;
    now["handler of " + std::to_string(number)] = text(reinterpret_cast<long long>(action.sa_sigaction),
                                                       action.sa_flags & ~0x04000000);  // SA_RESTORER: libc's own
    now["mask"] += std::to_string(sigismember(&mask, number));
  }
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string line = *each;
    now["variable " + line.substr(0, line.find('='))] = line.substr(line.find('=') + 1);
  }
  cpu_set_t cpus;
  sched_getaffinity(0, sizeof cpus, &cpus);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &cpus)) now["affinity"] += text(cpu) + " ";
  for (int limit = 0; limit < RLIMIT_NLIMITS; ++limit) {
    rlimit value = {};
    getrlimit(static_cast<__rlimit_resource>(limit), &value);
    now["limit " + std::to_string(limit)] = text(value.rlim_cur, value.rlim_max);
  }
  const mode_t mode = umask(0);
  umask(mode);
  now["umask"] = text(mode);
  now["directory"] = std::filesystem::current_path();
  now["locale"] = setlocale(LC_ALL, nullptr);
  now["floating point"] = text(_mm_getcsr() & ~0x3fU);  // without the flags of what has happened
  now["scheduling"] = text(sched_getscheduler(0), getpriority(PRIO_PROCESS, 0));
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  now["name"] = name;
  now["dumpable"] = text(prctl(PR_GET_DUMPABLE));
  int at_parents_death = 0;
  prctl(PR_GET_PDEATHSIG, &at_parents_death);
  now["signal at the parent's death"] = text(at_parents_death);
  now["terminate handler"] = text(reinterpret_cast<long long>(std::get_terminate()));
  now["new handler"] = text(reinterpret_cast<long long>(std::get_new_handler()));
  now["handlers at exit"] = text(handlers_at_exit.load());
  for (const char* setting : {"omp_get_max_threads", "omp_get_dynamic", "omp_get_max_active_levels"})
    now[setting] = text(reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, setting))());
  now["descriptors"] = text(entries("/proc/self/fd"));
  now["threads"] = text(entries("/proc/self/task"));
  return now;
}

void compare(const char* use, const State& before) {
  const State now = state();
  bool same = true;
  const auto show = [&](const std::string& what, const std::string& was, const std::string& is) {
    std::printf("%s: %s: %s → %s\n", use, what.c_str(), was.c_str(), is.c_str());
    same = false;
  };
  for (const auto& [what, value] : before) {
    const auto found = now.find(what);
    if (found == now.end()) show(what, value, "none");
    if (found != now.end() && found->second != value) show(what, value, found->second);
  }
  for (const auto& [what, value] : now)
    if (!before.contains(what)) show(what, "none", value);
  if (same) std::printf("%s: the same\n", use);
  std::fflush(stdout);
}

void train(lockstep::comm::ProcessGroup& group) {
  using namespace lockstep;
  const auto backend = nn::make_cpu_backend(/*threads=*/1);
  nn::Generator generator(/*seed=*/1);
  nn::Context context{*backend, generator};
  nn::Linear model(context, 64, 32);
  parallel::DistributedDataParallel ddp(model, group);
  const auto optimizer = nn::make_adamw(ddp.parameters(), {});
  const std::vector<float> values(64 * 64, 0.5f);
  nn::Tape tape(*backend);
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    const auto x = tape.input(backend->from_host(values.data(), {64, 64}, DType::kF32));
    tape.backward(nn::sum(tape, nn::square(tape, ddp(tape, x)), 1.0f).value);
    optimizer->step(1e-3f);
    tape.reset();
    raise(SIGUSR1);
  }
}

void use() {
  struct sigaction own = {};
  own.sa_handler = [](int) { ++signals_taken; };
  sigaction(SIGUSR1, &own, nullptr);
  sigaction(SIGTERM, &own, nullptr);
  signal(SIGPIPE, SIG_IGN);
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  std::set_terminate([] { std::_Exit(99); });
  std::atomic<bool> ends = false;
  std::thread own_thread([&] {
    while (!ends) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });

  const State before = state();
  {
    const auto group = lockstep::comm::make_group({.timeout_seconds = 30});
    std::vector<float> values(100'000, 1.0f);
    group->all_reduce(std::span(values));
    compare("collectives", before);
    train(*group);
    compare("training", before);
    try {
      group->all_reduce(std::span<float>(values.data(), 0), static_cast<lockstep::comm::ReduceOp>(77));
    } catch (const lockstep::Error&) {
    }
    group->shutdown();
  }
  compare("the end", before);
  ends = true;
  own_thread.join();
  std::printf("signals: %d\n", signals_taken.load());
}

void exit_with_a_group() {
  const auto group = lockstep::comm::make_group({.timeout_seconds = 30});
  std::exit(7);
}

}  // namespace

// Sees what is registered with atexit(): C++ registers the destructors of static objects with the objects.
extern "C" int __cxa_atexit(void (*function)(void*), void* argument, void* library) {
  static const auto real = reinterpret_cast<int (*)(void (*)(void*), void*, void*)>(dlsym(RTLD_NEXT, "__cxa_atexit"));
  Dl_info info = {};
  if (argument == nullptr && dladdr(reinterpret_cast<void*>(function), &info) != 0 &&
      std::string(info.dli_fname).find("liblockstep") != std::string::npos)
    ++handlers_at_exit;
  return real(function, argument, library);
}

int main(int count, char** words) {
  if (count > 1 && std::string(words[1]) == "exit") exit_with_a_group();
  use();
}
