#include "trainer/progress.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/base/env.h"

namespace lockstep::trainer {
namespace {

// What a process writes to a terminal that is so wide.
template <class Run>
std::string on_terminal(unsigned short columns, Run&& run) {
  winsize size = {};
  size.ws_row = 24;
  size.ws_col = columns;
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (child == 0) {
    for (const char* variable : {"LOCKSTEP_TTY", "LOCKSTEP_LAUNCHER", "OMPI_COMM_WORLD_SIZE"}) unset_env(variable);
    run();
    std::_Exit(0);
  }
  std::string text;
  char chunk[4096];
  for (ssize_t got; (got = ::read(terminal, chunk, sizeof chunk)) > 0;)
    text.append(chunk, static_cast<std::size_t>(got));
  ::close(terminal);
  ::waitpid(child, nullptr, 0);
  return text;
}

// A bar that wrapped could not be redrawn in place.
TEST(Progress, TheBarFitsTheTerminal) {
  for (const unsigned short columns : {1, 20, 39, 60, 80, 200}) {
    const std::string text = on_terminal(columns, [] {
      Progress progress(Progress::style_for(0, false), 1000000, 10, 50);
      progress.step({.step = 1000000, .epoch = 10, .loss = 0.25, .samples_per_s = 123456});
    });
    const auto begin = text.find('\r') + 1;
    const auto end = text.find("\033[K", begin);
    ASSERT_NE(end, std::string::npos) << columns << ": " << text;
    EXPECT_LE(end - begin, std::max(1, columns - 1)) << columns;
    if (columns >= 80) {
      EXPECT_NE(text.find("[####"), std::string::npos) << text;
    }
  }
}

// Under a launcher, whose terminal it is.
TEST(Progress, TheBarFollowsALaunchersTerminal) {
  const std::string text = on_terminal(80, [] {
    const std::string path = ::ttyname(STDOUT_FILENO);
    set_env("LOCKSTEP_TTY", "76 4 " + path);
    for (const unsigned short columns : {80, 60, 200}) {
      winsize size = {.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
      ::ioctl(STDOUT_FILENO, TIOCSWINSZ, &size);
      Progress progress(Progress::style_for(0, false), 1000000, 10, 50);
      progress.step({.step = 1000000, .epoch = 10, .loss = 0.25, .samples_per_s = 123456});
    }
  });
  std::vector<std::size_t> widths;
  for (std::size_t begin = 0; (begin = text.find('\r', begin)) != std::string::npos; ++begin)
    if (const auto end = text.find("\033[K", begin); end != std::string::npos && end > begin + 1)
      widths.push_back(end - begin - 1);
  ASSERT_EQ(widths.size(), 3U) << text;
  EXPECT_LE(widths[0], 75U);
  EXPECT_LE(widths[1], 55U);
  EXPECT_LT(widths[1], widths[0]);
  EXPECT_GT(widths[2], widths[0]);
}

TEST(Progress, OtherRanksAndQuietOnesSayNothing) {
  EXPECT_EQ(Progress::style_for(1, false), Progress::Style::kNone);
  EXPECT_EQ(Progress::style_for(0, true), Progress::Style::kNone);
}

}  // namespace
}  // namespace lockstep::trainer
