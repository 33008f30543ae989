#include "launcher/hosts/remote_agent.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::launcher {
namespace {

/// What ssh says, what it means, and the remedy; {} stands for "user@host" as ssh is asked for it.
struct Cause {
  const char* said;
  const char* what;
  const char* remedy;
};

constexpr std::array kCauses = {
    Cause{"Could not resolve hostname", "its name does not resolve", "check the name, /etc/hosts and the name service"},
    Cause{"Name or service not known", "its name does not resolve", "check the name, /etc/hosts and the name service"},
    Cause{"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is not the one that is known",
          "if the host was set up anew, ssh-keygen -R {0}, then ssh {0} once by hand"},
    Cause{"Host key verification failed", "its host key is unknown",
          "ssh {0} once by hand and accept it, or add it with ssh-keyscan"},
    Cause{"Permission denied (", "it refuses the key", "ssh-copy-id {0}, or load the right key with ssh-add"},
    Cause{"Too many authentication failures", "it refuses the keys that are offered",
          "name the right one for it in ~/.ssh/config (IdentityFile, IdentitiesOnly yes)"},
    Cause{"Connection refused", "the connection is refused", "is sshd running there, and at that port?"},
    Cause{"No route to host", "there is no route to it", "is it up, and on this network?"},
    Cause{"Network is unreachable", "its network cannot be reached", "check the routes of this host"},
    Cause{"Connection timed out", "the connection timed out", "is it up, and does a firewall let ssh through?"},
    Cause{"Operation timed out", "the connection timed out", "is it up, and does a firewall let ssh through?"},
    Cause{"error while loading shared libraries", "lockstep cannot run there", "install the libraries that it needs"},
    Cause{"Exec format error", "lockstep there is for another kind of processor",
          "all hosts of a job run the same binary"},
};

bool contains(std::string_view text, std::string_view piece) { return text.find(piece) != std::string_view::npos; }

/// The line with `piece` in it.
std::string line_with(std::string_view text, std::string_view piece) {
  const auto at = text.find(piece);
  const auto begin = text.rfind('\n', at);
  const auto from = begin == std::string_view::npos ? 0 : begin + 1;
  return last_line(text.substr(from, text.find('\n', at) - from));
}

std::string how_it_ended(const RemoteFailure& failure) {
  if (failure.exit_status.how == ExitStatus::How::kSignalled)
    return fmt::format("{} was ended by {}", failure.agent, signal_name(failure.exit_status.value));
  return fmt::format("{} ended with code {}", failure.agent, failure.exit_status.exit_code());
}

}  // namespace

RemoteAgent find_remote_agent(const EnvLookup& lookup) {
  const std::string wanted = lookup("OMPI_MCA_plm_rsh_agent").value_or("ssh");
  for (const auto& choice : split(wanted, ':')) {
    RemoteAgent agent{words_of(choice), false};
    if (agent.argv.empty()) continue;
    const std::string& program = agent.argv.front();
    const auto path = contains(program, "/") ? std::optional(program) : find_program(program);
    if (!path || ::access(path->c_str(), X_OK) != 0) continue;
    agent.is_ssh = std::filesystem::path(program).filename() == "ssh";
    for (const auto& word : words_of(lookup("OMPI_MCA_plm_rsh_args").value_or(""))) agent.argv.push_back(word);
    return agent;
  }
  throw MpiError(fmt::format("launch: there is no {} to reach other hosts with", wanted),
                 "install OpenSSH's client, or name a program in OMPI_MCA_plm_rsh_agent");
}

std::vector<std::string> remote_command(const RemoteAgent& agent, const HostSpec& host, const std::string& command) {
  std::vector<std::string> argv = agent.argv;
  // The user's arguments come first and win: ssh takes the first value that it sees.
  if (agent.is_ssh)
    for (const char* word : {"-x", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=9"}) argv.emplace_back(word);
  argv.push_back(host.target());
  argv.push_back(command);
  return argv;
}

std::string shell_word(const std::string& text) {
  std::string word = "'";
  for (const char c : text) c == '\'' ? word += "'\\''" : word += c;
  return word + "'";
}

std::string explain(const RemoteFailure& failure) {
  if (failure.exit_status.how == ExitStatus::How::kNotStarted)
    return fmt::format("cannot run {}: {} → check OMPI_MCA_plm_rsh_agent", failure.agent,
                       errno_text(failure.exit_status.value));
  for (const auto& cause : kCauses) {
    if (!contains(failure.said, cause.said)) continue;
    return fmt::format("{} ({}) → {}", cause.what, line_with(failure.said, cause.said),
                       fmt::format(fmt::runtime(cause.remedy), failure.host.target()));
  }
  const int code = failure.exit_status.exit_code();
  const std::string said = last_line(failure.said);
  const std::string quoted = said.empty() ? "" : fmt::format(" ({})", said);
  if (code == kNotFound)
    return fmt::format("there is no {} there{} → install the same build at the same path on every host",
                       failure.program, quoted);
  if (code == kNotExecutable)
    return fmt::format("{} cannot be executed there{} → check its permissions", failure.program, quoted);
  if (contains(said, "unknown subcommand"))
    return fmt::format(
        "{} there is another version, which knows nothing of several hosts → install the same build on "
        "every host",
        failure.program);
  return fmt::format("{}{} → try it by hand: {} {} {} version", how_it_ended(failure), quoted, failure.agent,
                     failure.host.target(), failure.program);
}

std::string last_line(std::string_view text) {
  constexpr std::size_t kReadableBytes = 200;
  std::string last;
  for (const auto& line : split(text, '\n'))
    if (!trim(line).empty()) last = trim(line);
  std::ranges::replace_if(
      last, [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  if (last.size() > kReadableBytes) last = std::string(utf8_prefix(last, kReadableBytes)) + "…";
  return std::string(trim(last));
}

}  // namespace lockstep::launcher
