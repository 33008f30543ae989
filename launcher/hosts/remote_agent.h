// The program that runs a command on another host (ssh), and what its failures mean. Pure but for find_remote_agent().
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/host_list.h"
#include "launcher/process.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {

struct RemoteAgent {
  std::vector<std::string> argv;  // "ssh", or what the user chose, with its arguments
  bool is_ssh = false;
};

/// ssh, or the first of those in OMPI_MCA_plm_rsh_agent ("ssh -p 2222 : rsh") that can be run, with the arguments in
/// OMPI_MCA_plm_rsh_args. It must hand on standard input and output. Throws MpiError when there is none.
RemoteAgent find_remote_agent(const EnvLookup& lookup);

/// The command line that runs the shell command `command` on `host`. ssh asks nothing (BatchMode): a password cannot be
/// typed for several hosts at once.
std::vector<std::string> remote_command(const RemoteAgent& agent, const HostSpec& host, const std::string& command);

/// `text` as one word of a shell's command.
std::string shell_word(const std::string& text);

/// A remote agent that has ended before the host answered.
struct RemoteFailure {
  HostSpec host;
  std::string agent;    // its name: "ssh"
  std::string program;  // that was to be started there
  ExitStatus exit_status;
  std::string said;  // on stderr
};

/// What went wrong and what to do about it: "no connection: Connection refused → is sshd running there?".
std::string explain(const RemoteFailure& failure);

/// The last line of `text` that says something, without control characters, cut to a readable length.
std::string last_line(std::string_view text);

}  // namespace lockstep::launcher
