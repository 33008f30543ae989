#include "tests/launcher/hosts/fake_hosts.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

namespace lockstep::launcher {
namespace {

constexpr const char* kAgent = R"sh(#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
[ -e "$TMPDIR/../down-$host" ] && { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
case ${host%-*} in
  unknown) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255;;
  refused) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;;
  locked) echo "eve@$host: Permission denied (publickey)." >&2; exit 255;;
  bare) set -- /no/such/lockstep _host;;
  old) set -- "echo 'lockstep-host 1 version=0.0.9 revision=1234567 sha256=abcdef'; cat";;
  ancient) set -- "echo \"error: unknown subcommand '_host'\" >&2; exit 2";;
  mute) set -- sleep 1000;;
  noisy) printf 'Welcome to \033[1m%s\033[0m\nLast login: today ' "$host"; echo 'No mail.' >&2;;
  mad) set -- "$* | (head -n 1; echo nonsense; sleep 1000)";;
esac
exec env -i PATH="$PATH" HOME="$HOME" TMPDIR="$TMPDIR" LOCKSTEP_TEST_JOB="$LOCKSTEP_TEST_JOB" FAKE_HOST="$host" \
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 /bin/sh -c "$*"
)sh";

}  // namespace

TestJobSetup fake_hosts() {
  TestJobSetup setup;
  setup.directory = make_test_directory();
  const std::string path = setup.directory + "/agent";
  std::ofstream(path) << kAgent;
  ::chmod(path.c_str(), 0755);
  setup.environment = {{"OMPI_MCA_plm_rsh_agent", path}};
  return setup;
}

bool all_ready(const Job& job, int ranks) {
  const Deadline deadline = Deadline::after_seconds(30);
  while (!deadline.expired()) {
    const std::string text = job.out();
    int found = 0;
    for (auto at = text.find("ready"); at != std::string::npos; at = text.find("ready", at + 1)) ++found;
    if (found == ranks) return true;
    std::this_thread::sleep_for(Millis(20));
  }
  return false;
}

pid_t named(const Job& job, const std::string& name, const std::string& host) {
  for (const auto& process : job.processes()) {
    const std::string proc = fmt::format("/proc/{}/", process.pid);
    std::ifstream file(proc + "environ", std::ios::binary);
    const std::string environment(std::istreambuf_iterator<char>(file), {});
    if (first_line(proc + "comm") == name && environment.find("FAKE_HOST=" + host + '\0') != std::string::npos)
      return process.pid;
  }
  return -1;
}

void kill_host(const Job& job, const std::string& host, bool stays_down) {
  if (stays_down) std::ofstream(job.directory() + "/down-" + host) << "yes";
  const pid_t helper = helper_on(job, host);
  EXPECT_GT(helper, 0) << host;
  if (helper > 0) ::kill(helper, SIGKILL);
}

void let_return(const Job& job, const std::string& host) { std::filesystem::remove(job.directory() + "/down-" + host); }

pid_t helper_on(const Job& job, const std::string& host) {
  for (const pid_t pid : job.running("_host", "FAKE_HOST", host))
    if (first_line(fmt::format("/proc/{}/comm", pid)) == "launcher_tool") return pid;
  return -1;
}

}  // namespace lockstep::launcher
