// Processes that only RANK and WORLD_SIZE make a job.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "tests/program/command.h"
#include "tests/support/free_port.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

using Arguments = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

/// Processes of the program, each with variables of its own; those that are left are killed at the end.
class Processes {
 public:
  explicit Processes(const std::filesystem::path& directory) : directory_(directory) {}
  ~Processes() {
    for (std::size_t i = 0; i < pids_.size(); ++i)
      if (!codes_[i]) {
        ::kill(pids_[i], SIGKILL);
        ::waitpid(pids_[i], nullptr, 0);
      }
  }

  /// `alter` runs in the child before the program.
  void start(const Variables& variables, const Arguments& arguments, const std::function<void()>& alter = {}) {
    const std::string out = output_file(pids_.size());
    const pid_t group = pids_.empty() ? 0 : pids_.front();
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::setpgid(0, group);
      for (const char* launcher : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                   "MASTER_ADDR", "PMIX_RANK", "PMI_RANK", "TORCHELASTIC_RUN_ID"})
        unset_env(launcher);
      set_env("CUDA_VISIBLE_DEVICES", "");
      for (const auto& [name, value] : variables) set_env(name, value);
      const int fd = ::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      ::dup2(fd, 1);
      ::dup2(fd, 2);
      if (::chdir(directory_.c_str()) != 0) ::_exit(99);
      if (alter) alter();
      std::vector<char*> argv = {const_cast<char*>("lockstep")};
      for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
      argv.push_back(nullptr);
      ::execv(LOCKSTEP_PROGRAM, argv.data());
      ::_exit(98);
    }
    // Here too: whichever of the two comes first. This one fails once the child runs the program.
    ::setpgid(pid, group);
    pids_.push_back(pid);
    codes_.emplace_back();
  }

  void kill(std::size_t i, int number) { ::kill(pids_[i], number); }
  /// At once, as a terminal does.
  void kill_all(int number) { ::kill(-pids_.front(), number); }
  pid_t pid(std::size_t i) const { return pids_[i]; }

  /// The exit code, 128 + n for signal n; -1 where it has not ended within `limit`.
  int wait(std::size_t i, Clock::duration limit = 30s) {
    const auto end = Deadline::after(limit);
    while (!codes_[i]) {
      int status = 0;
      if (::waitpid(pids_[i], &status, WNOHANG) == pids_[i])
        codes_[i] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      else if (end.expired())
        return -1;
      else
        std::this_thread::sleep_for(5ms);
    }
    return *codes_[i];
  }

  std::string output(std::size_t i) const {
    std::ifstream in(output_file(i));
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  std::string output_file(std::size_t i) const { return directory_ / ("out." + std::to_string(i)); }

  std::filesystem::path directory_;
  std::vector<pid_t> pids_;
  std::vector<std::optional<int>> codes_;
};

/// How many stretches of memory process `pid` has mapped from files with `name` in their path.
int mappings_of(pid_t pid, const std::string& name) {
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find(name) != std::string::npos ? 1 : 0;
  return found;
}

/// The lines of `text` but warnings (of a machine with few cores).
std::vector<std::string> errors_in(const std::string& text) {
  auto lines = lines_of(text);
  std::erase_if(lines, [](const std::string& line) { return line.find(" warning: ") != std::string::npos; });
  return lines;
}

class WithoutMpi : public ::testing::Test {
 protected:
  Variables variables(int rank, int size) const {
    return {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(size)}, {"MASTER_PORT", port_}};
  }
  void start(int rank, int size, const Arguments& arguments, Variables more = {}) {
    more.merge(variables(rank, size));
    processes_.start(more, arguments);
  }
  /// Until ranks that run for_ever_ have made a step together.
  void wait_for_training() {
    const auto end = Deadline::after(20s);
    while (!end.expired() && !has_step("m.jsonl")) std::this_thread::sleep_for(10ms);
    ASSERT_FALSE(end.expired());
  }
  bool has_step(const char* file) const {
    return read_file(directory_.path() / file).find(R"("event":"step")") != std::string::npos;
  }
  std::string hash_in(const std::string& file) const {
    std::ifstream in(directory_.path() / (file + ".jsonl"));
    std::string last;
    for (std::string line; std::getline(in, line);) last = line;
    return last.empty() ? "no metrics" : json_in(last).value("params_sha256", "none");
  }

  const Arguments for_ever_ = {"train",   "cnn",     "--data",    "digits", "--epochs",
                               "1000000", "--quiet", "--metrics", "m.jsonl"};
  const std::string port_ = std::to_string(free_port());
  TemporaryDirectory directory_;
  Processes processes_{directory_.path()};
};

TEST_F(WithoutMpi, TheSameParametersAsUnderMpirun) {
  std::size_t started = 0;
  for (const int n : {2, 3}) {
    const std::string count = std::to_string(n);
    const Arguments train = {"train",
                             "cnn",
                             "--data",
                             "digits",
                             "--steps",
                             "40",
                             "--check-replicas",
                             "1",
                             "--metrics",
                             "a" + count + ".jsonl"};
    // Rank 0 comes last.
    for (int rank = n - 1; rank >= 0; --rank) {
      start(rank, n, train);
      std::this_thread::sleep_for(50ms);
    }
    for (int rank = n - 1; rank >= 0; --rank, ++started) {
      EXPECT_EQ(processes_.wait(started), 0) << processes_.output(started);
      EXPECT_THAT(processes_.output(started), HasSubstr(rank == 0 ? "on " + count + " ranks" : std::string()));
    }
    run_well("mpirun --oversubscribe -np " + count +
                 " lockstep train cnn --data digits --steps 40 --quiet --backend mpi --metrics b" + count + ".jsonl",
             directory_.path());
    EXPECT_EQ(hash_in("a" + count).size(), 64u) << hash_in("a" + count);
    EXPECT_EQ(hash_in("a" + count), hash_in("b" + count));
  }
}

TEST_F(WithoutMpi, SharedMemoryIsAnonymous) {
  for (int rank = 0; rank < 2; ++rank) start(rank, 2, for_ever_);
  wait_for_training();
  for (std::size_t i = 0; i < 2; ++i) {
    const pid_t pid = processes_.pid(i);
    EXPECT_EQ(mappings_of(pid, "/dev/shm"), 0);
    for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd"))
      EXPECT_NE(std::filesystem::read_symlink(entry.path()).parent_path(), "/dev/shm") << entry.path();
  }
  // Both have the signal before either can continue: none sees the other's end first.
  for (const int signal : {SIGSTOP, SIGINT, SIGCONT}) processes_.kill_all(signal);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(processes_.wait(i), 130) << processes_.output(i);
}

/// The others end by themselves within two seconds, with a line each that names the dead one.
class ARankIsKilled : public WithoutMpi, public ::testing::WithParamInterface<std::size_t> {
 protected:
  void kill_and_look(std::size_t count) {
    const std::size_t doomed = GetParam();
    const std::string pid = std::to_string(processes_.pid(doomed));
    processes_.kill(doomed, SIGKILL);
    for (std::size_t i = 0; i < count; ++i) {
      if (i == doomed) continue;
      EXPECT_EQ(processes_.wait(i, 2s), 4) << processes_.output(i);
      EXPECT_THAT(processes_.output(i),
                  AllOf(HasSubstr("error: rank " + std::to_string(doomed) + " (host "), HasSubstr("has ended")));
    }
    EXPECT_EQ(processes_.wait(doomed), 137);
  }
};

TEST_P(ARankIsKilled, InTraining) {
  for (int rank = 0; rank < 3; ++rank) start(rank, 3, for_ever_);
  wait_for_training();
  kill_and_look(3);
}

// Rank 3 has yet to come.
TEST_P(ARankIsKilled, DuringTheRendezvous) {
  for (int rank = 0; rank < 3; ++rank) start(rank, 4, for_ever_);
  std::this_thread::sleep_for(500ms);
  kill_and_look(3);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ARankIsKilled, ::testing::Values(0, 1, 2));

TEST_F(WithoutMpi, ASecondProcessOfARankIsRejected) {
  start(0, 2, for_ever_);
  start(1, 2, for_ever_);
  wait_for_training();
  start(1, 2, for_ever_);
  start(0, 2, for_ever_);
  start(2, 3, for_ever_);
  for (std::size_t i = 2; i < 5; ++i) {
    EXPECT_EQ(processes_.wait(i), 2);
    EXPECT_EQ(errors_in(processes_.output(i)).size(), 1u) << processes_.output(i);
  }
  EXPECT_THAT(processes_.output(2), AllOf(HasSubstr("rank 1 has joined already"), HasSubstr("RANK")));
  EXPECT_THAT(processes_.output(3), AllOf(HasSubstr("port " + port_ + " is in use"), HasSubstr("MASTER_PORT")));
  EXPECT_THAT(processes_.output(4), AllOf(HasSubstr("rank 2 of 3"), HasSubstr("WORLD_SIZE")));
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(processes_.wait(i, 300ms), -1) << "the job continues";
}

TEST_F(WithoutMpi, ABackendThatTheseRanksCannotUseIsSaidOnce) {
  struct Case {
    Arguments more;
    Variables variables;
    std::string says;
    std::string remedy;
  };
  const std::vector<Case> cases = {
      {{"--backend", "mpi"}, {}, "--backend mpi is asked for", "start them with mpirun"},
      {{"--backend", "hosts"}, {}, "all ranks are on one host", "leave --backend out"},
  };
  std::size_t started = 0;
  for (const auto& one : cases) {
    Arguments train = {"train", "cnn", "--data", "digits"};
    train.insert(train.end(), one.more.begin(), one.more.end());
    std::string all;
    for (int rank = 0; rank < 3; ++rank) start(rank, 3, train, one.variables);
    for (int rank = 0; rank < 3; ++rank, ++started) {
      EXPECT_EQ(processes_.wait(started), 2) << processes_.output(started);
      all += processes_.output(started);
    }
    EXPECT_EQ(errors_in(all).size(), 1u) << all;
    EXPECT_THAT(all, AllOf(HasSubstr("[rank 0 host "), HasSubstr(one.says), HasSubstr("→ " + one.remedy)));
  }
}

// A flag that is wrong on all of them is one line, as under mpirun.
TEST_F(WithoutMpi, OneLineForAll) {
  for (int rank = 0; rank < 3; ++rank) start(rank, 3, {"train", "cnn", "--data", "digits", "--bach", "3"});
  std::string all;
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(processes_.wait(i), 2);
    all += processes_.output(i);
  }
  EXPECT_EQ(errors_in(all).size(), 1u) << all;
  EXPECT_THAT(all, HasSubstr("did you mean --batch"));
}

// A limit on the size of files is one on memory that ranks share, and the kernel's signal for it must not be the end.
TEST_F(WithoutMpi, MemoryThatCannotBeShared) {
  const auto limit = [] {
    const rlimit bytes{16'384, 16'384};
    ::setrlimit(RLIMIT_FSIZE, &bytes);
  };
  for (int rank = 0; rank < 2; ++rank) processes_.start(variables(rank, 2), for_ever_, limit);
  std::string all;
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(processes_.wait(i), 4) << processes_.output(i);
    all += processes_.output(i);
  }
  EXPECT_EQ(errors_in(all).size(), 1u) << all;
  EXPECT_THAT(all, HasSubstr("of shared memory: File too large"));
}

TEST_F(WithoutMpi, UnderMpirunTheFallbackIsMessages) {
  // Neither does MPI get files of its own then: it is configured to use none.
  const std::string line =
      "mpirun --oversubscribe --mca btl self,tcp -np 2 bash -c \"ulimit -f 16; exec lockstep train cnn --data digits "
      "--steps 5";
  auto outcome = run_well(line + "\"", directory_.path());
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("warning: no "), HasSubstr("of shared memory: File too large"),
                                 HasSubstr("data goes through MPI")));
  EXPECT_THAT(outcome.out, HasSubstr("on 2 ranks"));
  EXPECT_THAT(run(line + " --backend shm\"", directory_.path()), fails_with(4, "error: no "));
}

TEST_F(WithoutMpi, AMissingRankIsNamedOnce) {
  const Arguments train = {"train", "cnn", "--data", "digits", "--timeout-seconds", "1.5"};
  for (const int rank : {0, 2, 3}) start(rank, 4, train);
  std::string all;
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(processes_.wait(i), 5) << processes_.output(i);
    all += processes_.output(i);
  }
  EXPECT_EQ(errors_in(all).size(), 1u) << all;
  EXPECT_THAT(all, AllOf(HasSubstr("timed out after "), HasSubstr("waiting for rank 1, which has not joined")));
}

}  // namespace
}  // namespace lockstep::testing
