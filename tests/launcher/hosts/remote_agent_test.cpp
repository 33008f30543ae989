#include "launcher/hosts/remote_agent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using How = ExitStatus::How;

RemoteAgent agent_for(const std::map<std::string, std::string>& environment) {
  return find_remote_agent([&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  });
}

std::string failure(const std::string& said, int code = 255) {
  return explain({{"b", "eve", 2}, "ssh", "/opt/lockstep", {How::kExited, code}, said});
}

TEST(RemoteAgent, TheFirstThatCanBeRun) {
  EXPECT_THAT(agent_for({{"OMPI_MCA_plm_rsh_agent", "no-such-agent -p : /bin/sh -e : true"}}).argv,
              ElementsAre("/bin/sh", "-e"));
  EXPECT_THAT(agent_for({{"OMPI_MCA_plm_rsh_agent", "true"}, {"OMPI_MCA_plm_rsh_args", "-p 2222"}}).argv,
              ElementsAre("true", "-p", "2222"));
  EXPECT_FALSE(agent_for({{"OMPI_MCA_plm_rsh_agent", "true"}}).is_ssh);
  try {
    agent_for({{"OMPI_MCA_plm_rsh_agent", "no-such-agent : /no/such/ssh"}});
    FAIL();
  } catch (const MpiError& error) {
    EXPECT_THAT(error.line(), AllOf(HasSubstr("no-such-agent"), HasSubstr("→")));
  }
}

TEST(RemoteAgent, SshAsksNothing) {
  EXPECT_THAT(remote_command({{"ssh", "-p", "2222"}, true}, {"b", "eve", 1}, "'/opt/x' _host"),
              ElementsAre("ssh", "-p", "2222", "-x", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=9", "eve@b",
                          "'/opt/x' _host"));
  EXPECT_THAT(remote_command({{"agent"}, false}, {"b", "", 1}, "x"), ElementsAre("agent", "b", "x"));
}

TEST(RemoteAgent, AWordOfAShell) {
  EXPECT_EQ(shell_word("/opt/my lockstep"), "'/opt/my lockstep'");
  EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
}

TEST(RemoteFailures, WhatSshSays) {
  EXPECT_EQ(
      failure("ssh: Could not resolve hostname b: Name or service not known\r\n"),
      "its name does not resolve (ssh: Could not resolve hostname b: Name or service not known) → check the name, "
      "/etc/hosts and the name service");
  EXPECT_THAT(failure("ssh: connect to host b port 22: Connection refused\r\n"),
              AllOf(HasSubstr("the connection is refused"), HasSubstr("port 22"), HasSubstr("sshd")));
  EXPECT_THAT(failure("ssh: connect to host b port 22: Connection timed out\r\n"), HasSubstr("timed out"));
  EXPECT_THAT(failure("ssh: connect to host b port 22: No route to host\r\n"), HasSubstr("no route"));
  EXPECT_THAT(failure("Welcome to b\r\neve@b: Permission denied (publickey,password).\r\n"),
              AllOf(HasSubstr("it refuses the key (eve@b: Permission"), HasSubstr("ssh-copy-id eve@b")));
  EXPECT_THAT(failure("No ED25519 host key is known for b and you have requested strict checking.\r\n"
                      "Host key verification failed.\r\n"),
              AllOf(HasSubstr("its host key is unknown"), HasSubstr("ssh eve@b once")));
  EXPECT_THAT(failure("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\nHost key verification failed.\r\n"),
              AllOf(HasSubstr("not the one that is known"), HasSubstr("ssh-keygen -R eve@b")));
}

TEST(RemoteFailures, WhatTheOtherHostSays) {
  EXPECT_THAT(failure("sh: 1: /opt/lockstep: not found\n", 127),
              AllOf(HasSubstr("there is no /opt/lockstep there"), HasSubstr("same path")));
  EXPECT_THAT(failure("sh: 1: /opt/lockstep: Permission denied\n", 126), HasSubstr("cannot be executed"));
  EXPECT_THAT(failure("/opt/lockstep: error while loading shared libraries: libdnnl.so.2: cannot open\n", 127),
              HasSubstr("libdnnl.so.2"));
  EXPECT_THAT(failure("error: unknown subcommand '_host' → it is one of launch, train\n", 2),
              HasSubstr("another version"));
  EXPECT_THAT(failure("the moon is in the way\n", 3),
              AllOf(HasSubstr("ssh ended with code 3 (the moon is in the way)"), HasSubstr("by hand")));
  EXPECT_THAT(failure("", 0), HasSubstr("ssh ended with code 0 →"));
  EXPECT_THAT(explain({{"b", "", 1}, "ssh", "/x", {How::kSignalled, SIGKILL}, ""}), HasSubstr("SIGKILL"));
  EXPECT_THAT(explain({{"b", "", 1}, "agent", "/x", {How::kNotStarted, ENOENT}, ""}), HasSubstr("cannot run agent"));
}

TEST(RemoteFailures, AreOneReadableLine) {
  const std::string line = failure("\x1b[31mred\x1b[0m\n\n" + std::string(5000, 'x') + "\r\n\n", 1);
  EXPECT_EQ(line.find_first_of("\n\r\x1b"), std::string::npos);
  EXPECT_LT(line.size(), 500u);
}

}  // namespace
}  // namespace lockstep::launcher
