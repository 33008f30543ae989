// Runs `launcher_tool launch …` as a user would and looks for what remains of it.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// For scripts: `next STEP` says that this rank is stranded, and takes its next place.
inline const std::string kNextPlace =
    "next() { echo stranded $1 >&$LOCKSTEP_STATUS_FD\n"
    "  eval \"$(dd bs=65536 count=1 2>/dev/null <&$LOCKSTEP_STATUS_FD | tr '\\000' '\\n' |\n"
    "    grep -E '^(RANK|WORLD_SIZE|MASTER_PORT|LOCKSTEP_ATTEMPT)=' | sed 's/^/export /')\"; }\n";

/// A process of the job, found by a mark in its environment.
struct JobProcess {
  enum class Role { kLauncher, kMpirun, kWrapper, kProgram };
  pid_t pid;
  Role role;
  int rank;  // of wrappers and programs
};

/// A new directory for tests.
std::string make_test_directory();

struct TestJobSetup {
  std::vector<std::pair<std::string, std::string>> environment = {};
  std::vector<std::string> prefix = {};  // a command that becomes the launcher: "ip netns exec …"
  std::string directory = {};            // the job's own, which it removes; made where there is none
};

/// Environment variable that marks all processes of a Job; its value is Job::directory().
inline constexpr const char* kMarkVariable = "LOCKSTEP_TEST_JOB";

/// One job with a private TMPDIR. The destructor kills what still runs and removes the files.
class Job {
 public:
  explicit Job(std::vector<std::string> launch_arguments, const TestJobSetup& setup = {});
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  pid_t launcher() const { return launcher_; }
  /// 128 + n if the launcher was ended by signal n; -1 if it still runs at the deadline.
  int wait(Deadline deadline = Deadline::after_seconds(30));
  std::string out() const;  // what has come to stdout so far
  std::string err() const;
  void send(int signal_number) const;

  /// Programs are recognised by what they are not: the launcher, its mpirun and mpirun's children.
  std::vector<JobProcess> processes() const;
  /// The first process in `role`, waited for: the job may only be starting. pid -1 if there is none in time.
  JobProcess find(JobProcess::Role role, int rank = 0) const;
  /// Marked processes with `word` among the words of their command line; with `variable` only those in whose
  /// environment it has this value.
  std::vector<pid_t> running(const std::string& word, const std::string& variable = {},
                             const std::string& value = {}) const;
  /// Waits for `text` in out() or err(); false if it does not come.
  bool says(const std::string& text) const;
  const std::string& directory() const { return directory_; }

  /// What remains of the job, one item per line; empty if nothing does.
  std::string leftovers() const;
  /// leftovers() as soon as it is empty, or at the deadline.
  std::string leftovers_at(Deadline deadline) const;

 private:
  std::string directory_;
  pid_t launcher_ = -1;
  int status_ = -1;
  bool ended_ = false;
  std::vector<std::string> shm_before_;
};

/// The launcher's arguments for `flags`, words with one space between them, and a shell's script.
std::vector<std::string> sh(const std::string& flags, const std::string& script);
/// The same, as ranks that are the launcher's own binary, which then becomes that shell: started without mpirun.
std::vector<std::string> own_sh(const std::string& flags, const std::string& script);
/// A script that says so and waits.
inline constexpr const char* kWait = "echo ready; while :; do sleep 0.05; done";

constexpr int kAnyCode = -2;
constexpr double kByThen = -1;

enum class Start { kMpirun, kOwn, kBoth };
inline constexpr auto kMpirun = Start::kMpirun, kOwn = Start::kOwn, kBoth = Start::kBoth;

/// What happens to a job, and what must come of it.
struct JobOutcome {
  Start start = kMpirun;               // ranks as of sh(), as of own_sh(), or one job after the other
  int ready = 0;                       // so many ranks write "ready" before `act`
  std::function<void(Job&)> act = {};  // what is done to it meanwhile
  int code = 0;                        // its exit code
  std::vector<std::string> out = {}, err = {}, not_err = {};  // parts of stdout, of stderr, and none of stderr
  std::vector<std::string> lines = {}, err_lines = {};        // if any: all lines of stdout, of stderr, sorted
  double seconds = 30;                                        // until it has ended, after `act`
  double clean_seconds = 0;                   // until nothing of it is left, after that; kByThen: until both
  std::function<void(const Job&)> then = {};  // what else is looked at
  std::vector<std::pair<std::string, std::string>> environment = {};
  std::vector<std::string> program = {};  // in place of a script
};
/// Runs jobs with these flags, in which {} stands for the job's directory, and a shell's script, in which $rank is the
/// rank. With --hosts, the hosts are fake_hosts().
void expect_job(const std::string& flags, const std::string& script, const JobOutcome& outcome);
/// An action: the launcher gets this signal.
std::function<void(Job&)> sends(int signal_number);

std::string first_line(const std::string& path);
std::vector<std::string> sorted_lines(const std::string& text);

}  // namespace lockstep::launcher
