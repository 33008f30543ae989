// A stand-in for the lockstep binary with nothing but the launcher in it, so that its tests need no other module.
//   launcher_tool launch [-n N] [--log-dir DIR] [--grace-seconds S] [--no-prefix] [--hosts LIST] [--hostfile FILE]
//                        [--host-timeout-seconds S] [--host-return-seconds S] [-x NAME[=VALUE]] [--max-restarts K]
//                        [--min-ranks M] [--mpi] [--in-place]
//                        -- PROGRAM ARGS…
//   launcher_tool run PROGRAM ARGS…   (becomes that program: ranks of the launcher's own binary)
//   launcher_tool report defers SECONDS|saving TEXT|saved|data|missing RANK|usage TEXT|garbage|progress STEP|
//                        checkpointed STEP|done   (as a rank's program)
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/status_report.h"
#include "launcher/launch.h"
#include "lockstep/base/env.h"

using namespace lockstep;

namespace {

launcher::LaunchOptions parse(const std::vector<std::string>& arguments) {
  launcher::LaunchOptions options;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string& flag = arguments[i];
    if (flag == "--") {
      options.program.assign(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1, arguments.end());
      break;
    }
    if (flag == "--no-prefix" || flag == "--mpi" || flag == "--in-place") {
      (flag == "--mpi" ? options.mpi : flag == "--in-place" ? options.in_place : options.no_prefix) = true;
      continue;
    }
    const std::string& value = arguments.at(++i);
    if (flag == "-n") options.ranks = std::stoi(value);
    if (flag == "--log-dir") options.log_dir = value;
    if (flag == "--grace-seconds") options.grace_seconds = std::stod(value);
    if (flag == "--hosts") options.hosts = launcher::parse_hosts(value);
    if (flag == "--hostfile") options.hosts = launcher::read_hostfile(value);
    if (flag == "--host-timeout-seconds") options.host_seconds = std::stod(value);
    if (flag == "--host-return-seconds") options.host_return_seconds = std::stod(value);
    if (flag == "-x") options.exports.push_back(value);
    if (flag == "--max-restarts") options.max_restarts = std::stoi(value);
    if (flag == "--min-ranks") options.min_ranks = std::stoi(value);
  }
  return options;
}

int report(const std::vector<std::string>& words) {
  using Kind = StatusReport::Kind;
  const std::string& what = words.at(0);
  if (what == "garbage") {
    const int fd = std::stoi(env(kStatusVariable).value_or("-1"));
    for (const auto& bytes : {std::string("x"), std::string(100, '\0'), std::string(20000, 'x')})
      ::send(fd, bytes.data(), bytes.size(), 0);
    return 0;
  }
  bool sent = false;
  if (what == "defers") sent = report_status({.kind = Kind::kDefersStops, .seconds = std::stod(words.at(1))});
  if (what == "saving") sent = report_status({.kind = Kind::kSaving, .text = words.at(1)});
  if (what == "saved") sent = report_status({.kind = Kind::kSaved});
  if (what == "data") sent = report_status({.kind = Kind::kDataOnStdout});
  if (what == "missing") sent = report_status({.kind = Kind::kMissingRanks, .ranks = {std::stoi(words.at(1))}});
  if (what == "progress") sent = report_status({.kind = Kind::kProgress, .step = std::stoll(words.at(1))});
  if (what == "checkpointed") sent = report_status({.kind = Kind::kCheckpointed, .step = std::stoll(words.at(1))});
  if (what == "done") sent = report_status({.kind = Kind::kDone});
  if (what == "usage") sent = report_usage_error(words.at(1));
  return sent ? 0 : 1;
}

/// Returns where there is no such program.
int become(std::vector<std::string> words) {
  std::vector<char*> program;
  for (auto& word : words) program.push_back(word.data());
  program.push_back(nullptr);
  ::execvp(program[0], program.data());
  return 127;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (arguments.at(0) == "_rank") return launcher::rank_wrapper({arguments.begin() + 2, arguments.end()});
    if (arguments.at(0) == "_host") return launcher::host_helper(0);
    if (arguments.at(0) == "_rsh") return launcher::remote_start({arguments.begin() + 1, arguments.end()});
    if (arguments.at(0) == "run") return become({arguments.begin() + 1, arguments.end()});
    if (arguments.at(0) == "report") return report({arguments.begin() + 1, arguments.end()});
    return launcher::launch(parse(arguments));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.line().c_str());
    return error.code();
  }
}
