#include "launcher/console.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::launcher {
namespace {

std::string read_now(int fd) {
  ::fcntl(fd, F_SETFL, O_NONBLOCK);
  std::string text;
  char chunk[4096];
  for (ssize_t got; (got = ::read(fd, chunk, sizeof chunk)) > 0;) text.append(chunk, static_cast<std::size_t>(got));
  return text;
}

/// A console on two pipes.
class PipedConsole {
 public:
  PipedConsole(int ranks, bool prefix, std::size_t host_width = 0)
      : out_(pipe()), err_(pipe()), console(ranks, prefix, out_.second.get(), err_.second.get(), host_width) {}
  std::string out() { return drain(console.queues().front(), out_.first.get()); }
  std::string err() { return drain(console.queues().back(), err_.first.get()); }

 private:
  using Pipe = std::pair<UniqueFd, UniqueFd>;
  static Pipe pipe() {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
  }
  static std::string drain(OutputQueue& queue, int fd) {
    std::string text;
    while (queue.size() > 0) {
      queue.write_some();
      text += read_now(fd);
    }
    return text;
  }
  Pipe out_, err_;

 public:
  Console console;
};

TEST(ConsoleTest, HostsStandInThePrefix) {
  PipedConsole piped(11, true, 4);
  piped.console.set_host(0, "a");
  piped.console.set_host(10, "long");
  piped.console.add(10, 1, "ten\n");
  piped.console.add(0, 1, "zero\n");
  EXPECT_EQ(piped.out(), "[10@long] ten\n[ 0@a   ] zero\n");
}

TEST(ConsoleTest, WholeLinesWithPrefixes) {
  PipedConsole piped(11, true);
  piped.console.add(0, 1, "first half, ");
  piped.console.add(10, 1, "one\ntwo\nthr");
  piped.console.add(0, 1, "second half\n");
  piped.console.add(3, 2, "oops\n");
  piped.console.finish(10);
  EXPECT_EQ(piped.out(), "[10] one\n[10] two\n[ 0] first half, second half\n[10] thr\n");
  EXPECT_EQ(piped.err(), "[ 3] oops\n");
}

TEST(ConsoleTest, BytesPassUnchangedWhereNothingIsATerminal) {
  PipedConsole piped(2, false);
  const std::string bytes("a\rb\0\xff\xfe\x1b[K\r\n\n", 12);
  piped.console.add(1, 1, bytes);
  EXPECT_EQ(piped.out(), bytes);
}

TEST(ConsoleTest, LongLinesStayWhole) {
  PipedConsole piped(2, true);
  const std::string line(3'000'000, 'x');
  for (std::size_t at = 0; at < line.size(); at += 64'000) {
    piped.console.add(0, 1, std::string_view(line).substr(at, 64'000));
    piped.console.add(1, 1, "short\n");
  }
  piped.console.add(0, 1, "\n");
  EXPECT_THAT(piped.out(), ::testing::EndsWith("[1] short\n[0] " + line + "\n"));
}

TEST(ConsoleTest, ClosedReaderIsNoError) {
  ::signal(SIGPIPE, SIG_IGN);
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ::close(ends[0]);
  const UniqueFd write_end(ends[1]);
  Console console(1, false, write_end.get(), write_end.get());
  console.add(0, 1, "lost\n");
  console.queues()[0].write_some();
  EXPECT_EQ(console.queues()[0].error(), EPIPE);
  console.add(0, 1, "lost too\n");
  EXPECT_EQ(console.backlog_bytes(), 0u);
}

class TerminalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    master_.reset(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    ASSERT_TRUE(master_ && ::grantpt(master_.get()) == 0 && ::unlockpt(master_.get()) == 0);
    slave_.reset(::open(::ptsname(master_.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
    ASSERT_TRUE(slave_);
    termios settings;
    ::tcgetattr(slave_.get(), &settings);
    ::cfmakeraw(&settings);
    ::tcsetattr(slave_.get(), TCSANOW, &settings);
    const winsize size = {24, 80, 0, 0};
    ::ioctl(slave_.get(), TIOCSWINSZ, &size);
  }
  std::string shown(Console& console) {
    for (auto& queue : console.queues())
      while (queue.size() > 0) queue.write_some();
    return read_now(master_.get());
  }
  UniqueFd master_, slave_;
};

TEST_F(TerminalTest, TheProgressBarStaysBelowTheLines) {
  Console console(2, true, slave_.get(), slave_.get());
  EXPECT_EQ(console.live_columns(), 76);
  const auto bar = [](const std::string& text) { return "\x1b[?7l[0] " + text + "\x1b[?7h\r"; };
  const std::string erased = "\r\x1b[J";
  console.add(0, 2, "\rstep 1");
  EXPECT_EQ(shown(console), bar("step 1"));
  console.add(0, 2, "\rstep 2\r");
  EXPECT_EQ(shown(console), erased + bar("step 2"));
  console.add(1, 1, "hello\n");
  EXPECT_EQ(shown(console), erased + "[1] hello\n" + bar("step 2"));
  console.say("note");
  EXPECT_EQ(shown(console), erased + "lockstep: note\n" + bar("step 2"));
  console.add(0, 2, "\rstep 3\n");
  EXPECT_EQ(shown(console), erased + "[0] step 3\n");
  console.add(1, 1, "bye\n");
  EXPECT_EQ(shown(console), "[1] bye\n");
}

TEST_F(TerminalTest, OtherRanksBarsShowTheirLastState) {
  Console console(2, true, slave_.get(), slave_.get());
  console.add(1, 1, "\r10 %\r20 %");
  EXPECT_EQ(shown(console), "");
  console.add(1, 1, "\r100 %\r\n");
  EXPECT_EQ(shown(console), "[1] 100 %\n");
}

TEST_F(TerminalTest, ABarThatEndsWithoutANewlineLeavesTheTerminalClean) {
  Console console(2, true, slave_.get(), slave_.get());
  console.add(0, 1, "\rstep 9");
  console.finish(0);
  EXPECT_EQ(shown(console), "\x1b[?7l[0] step 9\x1b[?7h\r\r\x1b[J[0] step 9\n");
}

TEST_F(TerminalTest, ABarThatWasTakenOffLeavesNothing) {
  Console console(2, true, slave_.get(), slave_.get());
  for (const char* erases : {"\x1b[J", "\x1b[K"}) {
    console.add(0, 1, std::string("\rstep 9") + erases + "\r");
    EXPECT_EQ(shown(console), "\x1b[?7l[0] step 9\x1b[?7h\r");
    console.add(0, 1, std::string("\r") + erases);
    EXPECT_EQ(shown(console), "\r\x1b[J");
    console.add(1, 1, "hello\n");
    EXPECT_EQ(shown(console), "[1] hello\n");
  }
  console.finish(0);
  EXPECT_EQ(shown(console), "");
}

// A raw terminal whose other end nobody reads: poll() promises space for one byte, and a blocking write would wait for
// all.
TEST_F(TerminalTest, BlockedTerminalBlocksNobody) {
  Console console(1, false, slave_.get(), slave_.get());
  console.add(0, 1, std::string(1 << 20, 'x') + "\n");
  OutputQueue& queue = console.queues()[0];
  ::alarm(20);  // a blocked write ends the test
  for (std::size_t before = 0; before != queue.size();) {
    before = queue.size();
    queue.write_some();
  }
  ::alarm(0);
  EXPECT_GT(queue.size(), 0u);
  EXPECT_EQ(queue.error(), 0);
  EXPECT_EQ(::fcntl(slave_.get(), F_GETFL) & O_NONBLOCK, 0);
  const std::size_t left = queue.size();
  EXPECT_EQ(queue.drop(), left);
  EXPECT_EQ(console.backlog_bytes(), 0u);
}

TEST(ConsoleTest, DataHasNoPrefix) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd read_end(ends[0]), write_end(ends[1]);
  Console console(2, true, write_end.get(), write_end.get());
  console.add(1, 1, "a\nb");
  console.set_plain(1);
  console.add(1, 1, "c\n{}\n[");
  console.add(1, 2, "note\n");
  console.finish(1);
  console.queues()[0].write_some();
  EXPECT_EQ(read_now(read_end.get()), "[1] a\nbc\n{}\n[1] note\n[\n");
}

class RankLogTest : public ::testing::Test {
 protected:
  lockstep::testing::TemporaryDirectory temporary_;
  const std::string directory_ = temporary_.path();
};

TEST_F(RankLogTest, FilesHoldTheBytesAndMemoryTheLastLines) {
  RankLogs logs(directory_ + "/deep/logs", 2);
  const std::string bytes("one\ntwo\r\n\x01\0three\rdrei\nfour", 26);
  EXPECT_EQ(logs.add(1, 1, bytes), "");
  std::ifstream file(logs.path(1), std::ios::binary);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), bytes);
  EXPECT_THAT(logs.last_lines(1), ::testing::ElementsAre("one", "two", "drei", "four"));
  EXPECT_TRUE(logs.last_lines(0).empty());
}

TEST_F(RankLogTest, TwentyReadableLines) {
  RankLogs logs("", 1);
  for (int i = 0; i < 100; ++i) logs.add(0, 2, std::to_string(i) + "\n");
  EXPECT_EQ(logs.last_lines(0).size(), 20u);
  EXPECT_EQ(logs.last_lines(0).front(), "80");
  logs.add(0, 2, std::string(5000, 'y') + "\n\x1b[31mred\n");
  EXPECT_LT(logs.last_lines(0)[18].size(), 600u);
  EXPECT_EQ(logs.last_lines(0)[19], "?[31mred");
  logs.add(0, 2, std::string(499, 'y') + "é\n");
  EXPECT_EQ(logs.last_lines(0)[19], std::string(499, 'y') + "… (501 bytes)");
  logs.add(0, 1, "no end yet");
  EXPECT_EQ(logs.last_lines(0).size(), 20u);
  EXPECT_EQ(logs.last_lines(0)[19], "no end yet");
  logs.add(0, 1, "\rstep 7\x1b[J\r");
  EXPECT_EQ(logs.last_lines(0)[19], "step 7");
  logs.add(0, 1, "\r\x1b[J");
  EXPECT_EQ(logs.last_lines(0)[19], std::string(499, 'y') + "… (501 bytes)") << "the bar is off";
}

// It was shown when the rank wrote it, and would drive out what came before.
TEST_F(RankLogTest, TheLastLinesAreWithoutABacktrace) {
  RankLogs logs("", 1);
  logs.add(0, 1, "step 1\n");
  logs.add(0, 2, "crashed by SIGSEGV at address 0x8, in:\n    f()+0x1 in b(+0x2)\n    g()");
  logs.add(0, 1, "    what it computes\n");
  logs.add(0, 2, "+0x1 in b(+0x2)\nafter\n    it\n");
  EXPECT_THAT(logs.last_lines(0),
              ::testing::ElementsAre("step 1", "crashed by SIGSEGV at address 0x8; its backtrace is above",
                                     "    what it computes", "after", "    it"));
}

TEST_F(RankLogTest, ADirectoryThatCannotBeWritten) {
  EXPECT_THROW(RankLogs("/proc/nothing/here", 1), IoError);
  std::ofstream(directory_ + "/file") << "x";
  EXPECT_THROW(RankLogs(directory_ + "/file", 1), IoError);
  std::filesystem::create_symlink("/dev/full", directory_ + "/rank-0.log");
  EXPECT_THROW(RankLogs(directory_, 1), IoError);
}

}  // namespace
}  // namespace lockstep::launcher
