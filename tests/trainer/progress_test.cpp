#include "trainer/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>

#include "base/log.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::trainer {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kDrawnEnd = "\033[J\r";

winsize size_of(unsigned short columns) { return {.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0}; }

/// A process on a terminal of its own.
class OnTerminal {
 public:
  OnTerminal(unsigned short columns, const std::function<void()>& run) {
    winsize size = size_of(columns);
    child_ = ::forkpty(&terminal_, nullptr, nullptr, &size);
    if (child_ != 0) return;
    for (const char* variable : {"LOCKSTEP_TTY", "LOCKSTEP_LAUNCHER", "OMPI_COMM_WORLD_SIZE", "CI", "TERM"})
      unset_env(variable);
    run();
    std::_Exit(0);
  }
  ~OnTerminal() {
    ::kill(child_, SIGKILL);
    ::close(terminal_);
    ::waitpid(child_, nullptr, 0);
  }
  OnTerminal(const OnTerminal&) = delete;
  OnTerminal& operator=(const OnTerminal&) = delete;

  void resize(unsigned short columns) {
    const winsize size = size_of(columns);
    ::ioctl(terminal_, TIOCSWINSZ, &size);
  }
  /// What it writes up to `end`, or until it ends.
  std::string read_to(const std::string& end) {
    std::string text;
    char byte;
    while (!text.ends_with(end) && ::read(terminal_, &byte, 1) == 1) text += byte;
    return text;
  }
  std::string read_all() {
    std::string text;
    char chunk[4096];
    for (ssize_t got; (got = ::read(terminal_, chunk, sizeof chunk)) > 0;)
      text.append(chunk, static_cast<std::size_t>(got));
    return text;
  }
  /// The next bar.
  std::string bar() {
    const std::string text = read_to(kDrawnEnd);
    if (!text.ends_with(kDrawnEnd)) return "no bar: " + text;
    const auto end = text.size() - std::string(kDrawnEnd).size();
    const auto begin = text.rfind('\r', end - 1) + 1;
    return text.substr(begin, end - begin);
  }
  /// The first one that has at most so many columns. Some may have been drawn before the terminal was resized.
  std::string bar_within(int columns) {
    std::string text = bar();
    for (int i = 0; i < 100 && columns_of(text) > columns; ++i) text = bar();
    EXPECT_LE(columns_of(text), columns) << text;
    return text;
  }

 private:
  int terminal_ = -1;
  pid_t child_ = -1;
};

const RunPlan kPlan = {.total_steps = 1000000, .steps_per_epoch = 100000};
const StepReport kStep = {.step = 1000000, .epoch = 10, .loss = 0.25, .samples = 123456};

Progress::Style style_here() { return Progress::style_for(0, false); }

void sleep_for_ever() {
  for (;;) ::pause();
}

Standing standing() {
  return {.epoch = 3,
          .epochs = 10,
          .step = 120,
          .steps = 400,
          .loss = 0.2513,
          .seconds_left = 83,
          .epoch_seconds = 12.34,
          .samples_per_s = 12345.4,
          .evaluated = "R² 0.4912",
          .best = "best R² 0.5011"};
}

TEST(BarLine, WhatIsLeftOutOfANarrowOne) {
  const std::string whole =
      "epoch 3/10 step 120/400 loss 0.2513 ETA 1:23  best R² 0.5011  R² 0.4912  12.3 s/epoch  12345 samples/s";
  EXPECT_EQ(bar_line(standing(), 200), whole + "  [#########.....................]");
  const int columns = columns_of(whole);
  EXPECT_EQ(bar_line(standing(), columns + 9), whole + "  [#....]");
  EXPECT_EQ(bar_line(standing(), columns + 8), whole);
  EXPECT_EQ(bar_line(standing(), columns), whole) << "R² has as many columns as characters, and more bytes";
  for (const auto& [at_most, line] : std::initializer_list<std::pair<int, std::string>>{
           {101, "epoch 3/10 step 120/400 loss 0.2513 ETA 1:23  best R² 0.5011  R² 0.4912  12.3 s/epoch"},
           {84, "epoch 3/10 step 120/400 loss 0.2513 ETA 1:23  best R² 0.5011  R² 0.4912"},
           {70, "epoch 3/10 step 120/400 loss 0.2513 ETA 1:23  best R² 0.5011"},
           {59, "epoch 3/10 step 120/400 loss 0.2513 ETA 1:23"},
           {43, "step 120/400 loss 0.2513 ETA 1:23"},
           {32, "loss 0.2513 ETA 1:23"},
           {19, "loss 0.2513 ETA 1:…"},
           {1, "…"}})
    EXPECT_EQ(bar_line(standing(), at_most), line) << at_most;
  for (int at_most = 1; at_most < 220; ++at_most) EXPECT_LE(columns_of(bar_line(standing(), at_most)), at_most);
}

TEST(BarLine, WithoutWhatIsNotKnown) {
  EXPECT_EQ(bar_line({.epoch = 1, .epochs = 2, .step = 1, .steps = 4, .loss = 1e-3}, 60),
            "epoch 1/2 step 1/4 loss 1.000e-03  [#####..................]");
}

TEST(LineOfALog, BeginsAsEverAndSaysHowLong) {
  EXPECT_EQ(
      line_of(standing(), 0.001, 3723),
      "epoch 3/10  step 120/400  loss 0.2513  lr 0.001  12345 samples/s  12.3 s/epoch  elapsed 1:02:03  ETA 1:23");
}

// A bar that wrapped could not be redrawn in place.
TEST(Progress, TheBarFitsTheTerminal) {
  for (const unsigned short columns : {1, 20, 39, 60, 80, 200}) {
    OnTerminal on(columns, [] {
      Progress progress(style_here(), kPlan, 50);
      progress.step(kStep);
      sleep_for_ever();
    });
    const std::string bar = on.bar();
    EXPECT_LE(columns_of(bar), std::max(1, columns - 1)) << bar;
    if (columns >= 39) {
      EXPECT_THAT(bar, HasSubstr("loss 0.2500 ETA 0:00"));
    }
    if (columns >= 200) {
      EXPECT_THAT(bar, HasSubstr("[####"));
    }
  }
}

// Though no step ends, and nothing of the wide one stays: the cursor is at its first column, wherever that is then.
TEST(Progress, TheBarFollowsTheTerminalsWidth) {
  OnTerminal on(200, [] {
    Progress progress(style_here(), kPlan, 50);
    progress.step(kStep);
    sleep_for_ever();
  });
  EXPECT_THAT(on.bar(), HasSubstr("[####"));
  for (const unsigned short columns : {40, 120, 30}) {
    on.resize(columns);
    const std::string bar = on.bar_within(columns - 1);
    EXPECT_THAT(bar, HasSubstr("loss 0.2500 ETA 0:00"));
  }
}

// Under a launcher, whose terminal it is.
TEST(Progress, TheBarFollowsALaunchersTerminal) {
  OnTerminal on(200, [] {
    set_env("LOCKSTEP_TTY", std::string("196 4 ") + ::ttyname(STDOUT_FILENO));
    Progress progress(style_here(), kPlan, 50);
    progress.step(kStep);
    sleep_for_ever();
  });
  EXPECT_THAT(on.bar(), HasSubstr("[####"));
  on.resize(49);  // of which the prefix takes four
  EXPECT_THAT(on.bar_within(44), HasSubstr("loss 0.2500 ETA 0:00"));
}

TEST(Progress, LinesTakeTheBarAwayAndItComesBack) {
  OnTerminal on(200, [] {
    Progress progress(style_here(), kPlan, 50);
    progress.step(kStep);
    progress.announce("a line");
    log_warn("another one");
    sleep_for_ever();
  });
  on.bar();
  EXPECT_THAT(on.read_to("a line\r\n"), EndsWith("\r\033[Ja line\r\n"));
  // It may have been drawn again in between.
  EXPECT_THAT(on.read_to("another one\r\n"),
              AnyOf("warning: another one\r\n", EndsWith("\r\033[Jwarning: another one\r\n")));
  EXPECT_THAT(on.bar(), StartsWith("epoch 10/10")) << "though no step ends";
}

TEST(Progress, NoBarIsLeftAtTheEnd) {
  OnTerminal on(120, [] {
    {
      Progress progress(style_here(), kPlan, 50);
      progress.step(kStep);
    }
    std::puts("$");
    std::fflush(stdout);
  });
  EXPECT_THAT(on.read_all(), EndsWith(std::string(kDrawnEnd) + "\r\033[J$\r\n"));
}

TEST(Progress, LinesWhereABarMakesNoSense) {
  for (const auto& [name, value, lines] : std::initializer_list<std::tuple<const char*, const char*, bool>>{
           {"TERM", "xterm", false}, {"TERM", "dumb", true}, {"CI", "true", true}, {"CI", "false", false}}) {
    OnTerminal on(80, [name = name, value = value] {
      set_env(name, value);
      std::puts(style_here() == Progress::Style::kLines ? "lines" : "bar");
      std::fflush(stdout);
    });
    EXPECT_EQ(on.read_all(), lines ? "lines\r\n" : "bar\r\n") << name << value;
  }
}

// Ctrl-S, a stalled connection: the terminal takes nothing, and nobody waits for it.
TEST(Progress, AStoppedTerminalStopsNoStep) {
  int done[2];
  ASSERT_EQ(::pipe2(done, O_CLOEXEC), 0);
  OnTerminal on(80, [&] {
    Progress progress(style_here(), kPlan, 50);
    ::tcflow(STDOUT_FILENO, TCOOFF);
    for (int i = 0; i < 100; ++i) progress.step(kStep);  // of the last one a bar is always drawn
    [[maybe_unused]] const ssize_t written = ::write(done[1], "x", 1);
    sleep_for_ever();
  });
  pollfd ready = {.fd = done[0], .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&ready, 1, 60'000), 1);
  ::close(done[0]);
  ::close(done[1]);
}

/// What a process says on stdout and stderr that ends well.
std::pair<std::string, std::string> said(const std::string& stdout_path, const std::function<void()>& run) {
  const lockstep::testing::TemporaryDirectory directory;
  const std::string out = directory.path("out"), err = directory.path("err");
  const pid_t child = ::fork();
  if (child == 0) {
    for (const char* variable : {"LOCKSTEP_TTY", "LOCKSTEP_LAUNCHER"}) unset_env(variable);
    if (stdout_path == "|") {
      int ends[2];
      if (::pipe(ends) != 0) std::_Exit(9);
      ::close(ends[0]);
      ::dup2(ends[1], STDOUT_FILENO);
    } else {
      ::dup2(::open(stdout_path.empty() ? out.c_str() : stdout_path.c_str(), O_WRONLY | O_CREAT, 0600), STDOUT_FILENO);
    }
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT, 0600), STDERR_FILENO);
    run();
    std::_Exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  return {stdout_path.empty() ? lockstep::testing::read_file(out) : "", lockstep::testing::read_file(err)};
}

EvalReport evaluation_of(std::int64_t step, double loss, double accuracy) {
  return {.step = step, .loss = loss, .accuracy = accuracy, .samples = 360};
}

TEST(Progress, LinesOfALog) {
  const auto [out, err] = said("", [] {
    Progress progress(style_here(),
                      {.total_steps = 6, .steps_per_epoch = 2, .evaluate_every = 2, .evaluation_steps = 1}, 3);
    for (std::int64_t step = 1; step <= 6; ++step) {
      progress.step({.step = step, .epoch = (step + 1) / 2, .loss = 0.5, .lr = 0.1, .samples = 8 * step});
      if (step % 2 != 0) continue;
      const Progress::Pause pause(progress, Pace::Pause::kEvaluation, step);
      progress.evaluation(evaluation_of(step, 0.01 * static_cast<double>(step), step == 4 ? 0.75 : 0.5), step / 2, {});
    }
    progress.saved(session::SavedFile{.path = "w.safetensors", .bytes = 1234567, .seconds = 0.031});
    progress.saved({});
  });
  const auto lines = split(out, '\n');
  ASSERT_EQ(lines.size(), 8U) << out;
  EXPECT_THAT(lines[0], AllOf(StartsWith("epoch 1/3  step 1/6  loss 0.5000  lr 0.1  "),
                              ContainsRegex("  elapsed [0-9:]+  ETA [0-9:]+$"), Not(HasSubstr("s/epoch"))));
  EXPECT_THAT(lines[1], AllOf(StartsWith("epoch 1/3  step 2  validation loss 0.0200  accuracy 50.00 % of 360, the best "
                                         "so far  "),
                              ContainsRegex(" s/epoch  elapsed [0-9:]+  ETA [0-9:]+$")));
  EXPECT_THAT(lines[2], StartsWith("epoch 2/3  step 3/6  loss"));
  EXPECT_THAT(lines[3], HasSubstr("accuracy 75.00 % of 360, the best so far"));
  EXPECT_THAT(lines[4], StartsWith("epoch 3/3  step 6/6  loss"));
  EXPECT_THAT(lines[5], HasSubstr("accuracy 50.00 % of 360, best accuracy 75.00 % at step 4"));
  EXPECT_EQ(lines[6], "saved w.safetensors: 1.2 MB in 0.03 s");
  EXPECT_EQ(err, "");
}

// Of a run that looks for the best evaluation, what it takes for the best counts; of a moving average, its own.
TEST(Progress, TheBestSoFarIsTheRuns) {
  const auto [out, err] = said("", [] {
    Progress progress(style_here(), {.total_steps = 6, .steps_per_epoch = 2}, 100);
    progress.evaluation(evaluation_of(2, 0.3, 0.9), 1, BestEvaluation{.metric = "loss", .value = 0.2, .step = 1});
  });
  EXPECT_THAT(out, HasSubstr("accuracy 90.00 % of 360, best loss 0.2000 at step 1  elapsed"));
  const auto [averaged, none] = said("", [] {
    Progress progress(style_here(), {.total_steps = 6, .steps_per_epoch = 2}, 100);
    for (const std::int64_t step : {2, 4}) {
      progress.evaluation(evaluation_of(step, 0.3, 0.99), 1, {});
      EvalReport average = evaluation_of(step, 0.3, 0.1 * static_cast<double>(step));
      average.of_average = true;
      progress.evaluation(average, 1, {});
    }
  });
  const auto lines = split(averaged, '\n');
  EXPECT_THAT(lines[1], HasSubstr("20.00 % of 360, the best so far"));
  EXPECT_THAT(lines[2], HasSubstr("99.00 % of 360  elapsed"));
  EXPECT_THAT(lines[3], HasSubstr("40.00 % of 360, the best so far"));
}

TEST(Progress, AClosedPipeOrAFullDiskStopsNobody) {
  for (const auto& [path, reason] : std::initializer_list<std::pair<std::string, std::string>>{
           {"|", "Broken pipe"}, {"/dev/full", "No space left on device"}}) {
    const auto [out, err] = said(path, [] {
      Progress progress(style_here(), kPlan, 1);
      for (int i = 0; i < 3; ++i) {
        progress.step(kStep);
        progress.announce("a line");
      }
      progress.summary({});
      log_warn("the end");
    });
    EXPECT_EQ(err, "warning: standard output: " + reason +
                       ": what the run says there is lost, and training continues\nwarning: the end\n");
  }
}

TEST(Progress, OtherRanksAndQuietOnesSayNothing) {
  EXPECT_EQ(Progress::style_for(1, false), Progress::Style::kNone);
  EXPECT_EQ(Progress::style_for(0, true), Progress::Style::kNone);
  const auto [out, err] = said("", [] {
    Progress progress(Progress::Style::kNone, kPlan, 1);
    progress.announce("a line");
    progress.step(kStep);
    progress.evaluation(evaluation_of(1, 0.1, 0.5), 1, {});
    progress.checkpoint({.step = 1});
    progress.saved(session::SavedFile{.path = "w", .bytes = 1, .seconds = 0});
    progress.summary({});
  });
  EXPECT_EQ(out + err, "");
}

}  // namespace
}  // namespace lockstep::trainer
