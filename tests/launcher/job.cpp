#include "tests/launcher/job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "base/text.h"
#include "lockstep/base/env.h"
#include "tests/launcher/hosts/fake_hosts.h"

namespace lockstep::launcher {
namespace {

namespace fs = std::filesystem;

constexpr auto kPause = Millis(2);

/// Empty where there is none; what could be read of a process that ends meanwhile.
std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();  // where reading fails it ends: it does not throw, as an iterator does
  return text.str();
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) names.push_back(entry.path().filename());
  return names;
}

/// The value of a variable in the environment with which a process was started.
std::string variable_of(const std::string& environ_text, const std::string& name) {
  for (const auto& entry : split(environ_text, '\0'))
    if (entry.starts_with(name + "=")) return entry.substr(name.size() + 1);
  return {};
}

pid_t parent_of(pid_t pid) {
  const std::string stat = read_file(fmt::format("/proc/{}/stat", pid));  // "pid (name) state ppid …"
  const auto name_end = stat.rfind(')');
  if (name_end == std::string::npos) return -1;
  return static_cast<pid_t>(parse_int(split(stat.substr(name_end + 2), ' ').at(1)).value_or(-1));
}

/// A shared-memory file in use belongs to a job that runs, ours or not.
bool somebody_maps(const std::string& file) {
  for (const auto& name : names_in("/proc"))
    if (parse_int(name) && read_file("/proc/" + name + "/maps").find(file) != std::string::npos) return true;
  return false;
}

}  // namespace

std::string make_test_directory() {
  std::string pattern = (fs::temp_directory_path() / "launch-test-XXXXXX").string();
  EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
  return pattern;
}

Job::Job(std::vector<std::string> launch_arguments, const TestJobSetup& setup)
    : directory_(setup.directory.empty() ? make_test_directory() : setup.directory), shm_before_(names_in("/dev/shm")) {
  fs::create_directory(directory_ + "/tmp");

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, 1, (directory_ + "/out").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::posix_spawn_file_actions_addopen(&actions, 2, (directory_ + "/err").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  launch_arguments.insert(launch_arguments.begin(), {LAUNCHER_TOOL, "launch"});
  launch_arguments.insert(launch_arguments.begin(), setup.prefix.begin(), setup.prefix.end());
  std::vector<char*> argv;
  for (auto& argument : launch_arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  auto environment = setup.environment;
  environment.emplace_back("TMPDIR", directory_ + "/tmp");
  environment.emplace_back(kMarkVariable, directory_);
  std::vector<std::pair<std::string, std::optional<std::string>>> before;
  for (const auto& [name, value] : environment) {
    before.emplace_back(name, env(name));
    set_env(name, value);
  }
  EXPECT_EQ(::posix_spawnp(&launcher_, argv[0], &actions, nullptr, argv.data(), environ), 0);
  for (const auto& [name, value] : before) value ? set_env(name, *value) : unset_env(name);
  ::posix_spawn_file_actions_destroy(&actions);
}

Job::~Job() {
  // The launcher first, so that its reaper can do its work.
  if (!ended_) ::kill(launcher_, SIGKILL);
  wait();
  leftovers_at(Deadline::after_seconds(5));
  for (const auto& process : processes()) ::kill(process.pid, SIGKILL);
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

int Job::wait(Deadline deadline) {
  while (!ended_) {
    if (::waitpid(launcher_, &status_, WNOHANG) == launcher_) {
      ended_ = true;
    } else if (deadline.expired()) {
      return -1;
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
  return WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
}

std::string Job::out() const { return read_file(directory_ + "/out"); }
std::string Job::err() const { return read_file(directory_ + "/err"); }
void Job::send(int signal_number) const { ::kill(launcher_, signal_number); }

std::vector<JobProcess> Job::processes() const {
  std::vector<JobProcess> found;
  std::vector<pid_t> parents;
  for (const auto& name : names_in("/proc")) {
    const auto pid = parse_int(name);
    if (!pid) continue;
    const std::string text = read_file("/proc/" + name + "/environ");
    if (variable_of(text, kMarkVariable) != directory_) continue;
    auto rank = parse_int(variable_of(text, "OMPI_COMM_WORLD_RANK"));
    if (!rank) rank = parse_int(variable_of(text, "RANK"));
    found.push_back({static_cast<pid_t>(*pid), JobProcess::Role::kProgram, static_cast<int>(rank.value_or(-1))});
  }
  pid_t mpirun = -1;
  for (auto& process : found) {
    if (process.pid == launcher_) process.role = JobProcess::Role::kLauncher;
    const auto name = read_file(fmt::format("/proc/{}/comm", process.pid));
    if (parent_of(process.pid) == launcher_ && (name == "mpirun\n" || name == "orterun\n")) {
      process.role = JobProcess::Role::kMpirun;
      mpirun = process.pid;
    }
  }
  for (auto& process : found) {
    const pid_t parent = parent_of(process.pid);
    const bool starts_here = parent == launcher_ && process.pid != mpirun && process.rank >= 0;
    if ((mpirun > 0 && parent == mpirun) || starts_here) process.role = JobProcess::Role::kWrapper;
  }
  return found;
}

JobProcess Job::find(JobProcess::Role role, int rank) const {
  const Deadline deadline = Deadline::after_seconds(10);
  do {
    const auto all = processes();
    // A rank's own children have its environment, and lower numbers where those have begun anew.
    const auto is_child_of_a_program = [&](pid_t pid) {
      return std::any_of(all.begin(), all.end(), [parent = parent_of(pid)](const JobProcess& process) {
        return process.pid == parent && process.role == JobProcess::Role::kProgram && process.rank >= 0;
      });
    };
    for (const auto& process : all) {
      const bool ranked = role == JobProcess::Role::kWrapper || role == JobProcess::Role::kProgram;
      if (process.role == role && (!ranked || process.rank == rank) && !is_child_of_a_program(process.pid))
        return process;
    }
    std::this_thread::sleep_for(kPause);
  } while (!deadline.expired());
  return {-1, role, rank};
}

std::vector<pid_t> Job::running(const std::string& word, const std::string& variable, const std::string& value) const {
  std::vector<pid_t> found;
  for (const auto& process : processes()) {
    const auto words = split(read_file(fmt::format("/proc/{}/cmdline", process.pid)), '\0');
    const auto text = read_file(fmt::format("/proc/{}/environ", process.pid));
    const bool chosen = variable.empty() || variable_of(text, variable) == value;
    if (chosen && std::find(words.begin(), words.end(), word) != words.end()) found.push_back(process.pid);
  }
  return found;
}

bool Job::says(const std::string& text) const {
  const Deadline deadline = Deadline::after_seconds(30);
  while ((out() + err()).find(text) == std::string::npos) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

std::string Job::leftovers() const {
  std::string left;
  for (const auto& process : processes())
    left += fmt::format("process {} {}\n", process.pid, read_file(fmt::format("/proc/{}/cmdline", process.pid)));
  for (const auto& name : names_in(directory_ + "/tmp")) left += "TMPDIR/" + name + "\n";
  for (const auto& name : names_in("/dev/shm")) {
    if (std::find(shm_before_.begin(), shm_before_.end(), name) != shm_before_.end()) continue;
    const bool another_job =
        name.starts_with("lockstep-") && name.find(fmt::format("-{}-", launcher_)) == std::string::npos;
    if (!another_job && !somebody_maps(name)) left += "/dev/shm/" + name + "\n";
  }
  return left;
}

std::string Job::leftovers_at(Deadline deadline) const {
  for (;;) {
    std::string left = leftovers();
    if (left.empty() || deadline.expired()) return left;
    std::this_thread::sleep_for(kPause);
  }
}

std::vector<std::string> sh(const std::string& flags, const std::string& script) {
  std::vector<std::string> arguments = split(flags, ' ');
  for (const auto& word : {std::string("--"), std::string("/bin/sh"), std::string("-c"), script})
    arguments.push_back(word);
  return arguments;
}

std::vector<std::string> own_sh(const std::string& flags, const std::string& script) {
  std::vector<std::string> arguments = split(flags, ' ');
  for (const auto& word : {"--", "lockstep", "run", "/bin/sh", "-c", script.c_str()}) arguments.emplace_back(word);
  return arguments;
}

void expect_job(const std::string& given_flags, const std::string& script, const JobOutcome& must) {
  for (const bool own : {false, true}) {
    if (must.start == (own ? kMpirun : kOwn)) continue;
    SCOPED_TRACE(own ? "ranks of the launcher's own binary" : "under mpirun");
    TestJobSetup setup = given_flags.find("--hosts") != std::string::npos
                             ? fake_hosts()
                             : TestJobSetup{.directory = make_test_directory()};
    setup.environment.insert(setup.environment.end(), must.environment.begin(), must.environment.end());
    std::string flags = given_flags;
    if (const auto at = flags.find("{}"); at != std::string::npos) flags.replace(at, 2, setup.directory);
    auto arguments = (own ? own_sh : sh)(flags, "rank=${RANK-$OMPI_COMM_WORLD_RANK}; " + script);
    if (!must.program.empty()) {
      arguments = split(flags + " --", ' ');
      arguments.insert(arguments.end(), must.program.begin(), must.program.end());
    }
    Job job(arguments, setup);
    ASSERT_TRUE(must.ready == 0 || all_ready(job, must.ready)) << job.out() << job.err();
    if (must.act) must.act(job);
    if (::testing::Test::HasFatalFailure()) return;
    const Deadline deadline = Deadline::after_seconds(must.seconds);
    const int code = job.wait(deadline);
    EXPECT_TRUE(code == must.code || must.code == kAnyCode) << code << " in place of " << must.code << job.err();
    EXPECT_EQ(job.leftovers_at(must.clean_seconds == kByThen ? deadline : Deadline::after_seconds(must.clean_seconds)),
              "");
    for (const auto& text : must.out) EXPECT_THAT(job.out(), ::testing::HasSubstr(text));
    for (const auto& text : must.err) EXPECT_THAT(job.err(), ::testing::HasSubstr(text));
    for (const auto& text : must.not_err) EXPECT_THAT(job.err(), ::testing::Not(::testing::HasSubstr(text)));
    for (const auto& [lines, text] : {std::pair(must.lines, job.out()), std::pair(must.err_lines, job.err())}) {
      EXPECT_TRUE(lines.empty() || sorted_lines(text) == lines) << text;
    }
    if (must.then) must.then(job);
  }
}

std::function<void(Job&)> sends(int signal_number) {
  return [signal_number](Job& job) { job.send(signal_number); };
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  auto lines = split(text, '\n');
  lines.pop_back();
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace lockstep::launcher
