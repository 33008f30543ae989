// Flight records: what a process leaves that is killed or crashes, and what readers make of other bytes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/crash.h"
#include "base/error.h"
#include "base/flight_layout.h"
#include "base/flight_snapshot.h"
#include "lockstep/base/env.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::flight {
namespace {

using lockstep::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Runs `act` in a process of its own, whose stderr goes to `err`; its status.
template <class Act>
int in_child(const std::filesystem::path& err, Act&& act) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int file = ::open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(file, STDERR_FILENO);
    act();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return status;
}

std::string text_in(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class FlightRecord : public ::testing::Test {
 protected:
  std::string directory() const { return (path_.path() / "flight").string(); }
  std::filesystem::path err() const { return path_.path() / "err"; }
  std::string said() const { return text_in(err()); }

  /// Of a process that opens its record as rank 3 of 5 and then does `act`.
  template <class Act>
  int recorded(Act&& act) {
    return in_child(err(), [&] {
      set_env(kDirectoryVariable, directory());
      open(3, 5);
      act();
    });
  }
  Snapshot snapshot() const {
    const std::string path = path_of(directory(), 3);
    return decode(read_bytes(path), path);
  }
  std::string bytes_of_one() {
    recorded([] {
      set_step(7);
      complete(issue({.sequence = 1, .bytes = 4096, .step = 7, .bucket = 0, .kind = Kind::kAllReduce, .group = 1}));
      issue({.sequence = 2, .kind = Kind::kBarrier, .group = 1});
    });
    return read_bytes(path_of(directory(), 3));
  }

  TemporaryDirectory path_;
};

TEST_F(FlightRecord, OutlivesSigkill) {
  const int status = recorded([] {
    set_step(12);
    set_phase(Phase::kBackward);
    complete(issue({.sequence = 6, .bytes = 8, .kind = Kind::kAllGather, .group = 1}));
    issue({.sequence = 7, .bytes = 4'000'000, .step = 12, .bucket = 3, .kind = Kind::kAllReduce, .group = 1});
    begin_wait();
    const int missing[] = {1, 4};
    set_missing(missing);
    ::raise(SIGKILL);
  });
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  const Snapshot made = snapshot();
  EXPECT_EQ(made.rank, 3);
  EXPECT_EQ(made.world_size, 5);
  EXPECT_GT(made.pid, 0);
  EXPECT_EQ(made.host, host_name());
  EXPECT_EQ(made.step, 12);
  EXPECT_EQ(made.phase, Phase::kBackward);
  EXPECT_GE(made.phase_since_ns, made.started_ns / 1000 * 1000);
  EXPECT_NE(made.waits_since, 0);
  EXPECT_THAT(made.missing, ::testing::ElementsAre(1, 4));
  EXPECT_EQ(made.issued, 2u);
  ASSERT_EQ(made.operations.size(), 2u);
  EXPECT_GE(made.operations[0].completed_ns, made.operations[0].issued_ns);
  ASSERT_EQ(made.pending(), made.last());
  EXPECT_EQ(made.last()->bytes, 4'000'000u);
  EXPECT_EQ(made.last()->bucket, 3);
  EXPECT_EQ(made.last()->phase, Phase::kBackward);
  EXPECT_EQ(describe_state(made, made.waits_since + 3'200'000'000),
            "waiting in allreduce #7 (4.0 MB, step 12, bucket 3) for 3.2 s for ranks 1 and 4");
  EXPECT_EQ(said(), "");
}

TEST_F(FlightRecord, KeepsTheLastOperations) {
  recorded([] {
    for (std::uint64_t i = 1; i <= 3000; ++i) {
      const auto number = issue({.sequence = i, .kind = Kind::kBroadcast, .group = 1});
      if (number != i) std::abort();
      if (i >= 2) complete(number - 1);
    }
    complete(1);  // its place is another one's
  });
  const Snapshot made = snapshot();
  EXPECT_EQ(made.issued, 3000u);
  ASSERT_EQ(made.operations.size(), kOperations);
  for (std::size_t i = 0; i < kOperations; ++i) {
    EXPECT_EQ(made.operations[i].number, 3000 - kOperations + 1 + i);
    EXPECT_EQ(made.operations[i].completed_ns == 0, i + 1 == kOperations) << i;
  }
}

TEST_F(FlightRecord, NamesTheSampleThatIsRead) {
  recorded([] {
    set_step(3);
    begin_reading(0, 11);
    end_reading(0);
    begin_reading(2, 4711);
    begin_reading(static_cast<int>(kMostReaders), 5);  // not shown
    begin_reading(-1, 5);
    set_phase(Phase::kData);
  });
  const Snapshot made = snapshot();
  ASSERT_EQ(made.readings.size(), 1u);
  EXPECT_EQ(made.readings[0].sample, 4711u);
  EXPECT_THAT(describe_state(made, made.readings[0].since_ns + 12'000'000'000),
              AllOf(HasSubstr("waiting for its next batch of step 3 for "),
                    HasSubstr(": data worker 2 has been reading sample 4711 for 12 s")));
}

TEST_F(FlightRecord, AWaitThatEndsIsCounted) {
  recorded([] {
    begin_wait();
    ::usleep(2000);
    const int missing[] = {0};
    set_missing(missing);
    end_wait();
    end_wait();  // without a wait: nothing
  });
  const Snapshot made = snapshot();
  EXPECT_EQ(made.waits_since, 0);
  EXPECT_TRUE(made.missing.empty());
  EXPECT_GE(made.waited_ns, 2'000'000);
}

// Whether it had begun to wait or not, it waits when it gives up.
TEST_F(FlightRecord, GivingUpCountsAsWaiting) {
  for (const bool begins : {false, true}) {
    recorded([&] {
      if (begins) begin_wait();
      ::usleep(2000);
      const int missing[] = {2};
      give_up_on(missing);
    });
    const Snapshot made = snapshot();
    EXPECT_NE(made.waits_since, 0);
    EXPECT_EQ(made.missing, std::vector<int>{2});
  }
}

TEST_F(FlightRecord, WithoutADirectoryThereIsNoFile) {
  const int status = in_child(err(), [] {
    unset_env(kDirectoryVariable);
    open(0, 1);
    set_phase(Phase::kForward);
    begin_wait();
    end_wait();
    if (issue({.sequence = 1}) != 0 || !flight::directory().empty() || phase() != Phase::kForward) ::_exit(1);
    complete(0);
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(said(), "");
}

TEST_F(FlightRecord, UnusableDirectoryIsAWarning) {
  for (const char* const place : {"/nowhere/flight", "/dev/null", "/proc"}) {
    const int status = in_child(err(), [&] {
      set_env(kDirectoryVariable, place);
      open(0, 2);
      set_phase(Phase::kForward);
      if (issue({.sequence = 1}) != 0) ::_exit(1);
    });
    EXPECT_EQ(status, 0) << place;
    EXPECT_THAT(said(), HasSubstr(std::string("no flight record in ") + place));
  }
}

// Whoever has the older one mapped keeps it, and a link in its place is not followed.
TEST_F(FlightRecord, ReplacesAnOlderRecord) {
  std::filesystem::create_directory(directory());
  const auto other = path_.path() / "other";
  std::ofstream(other) << "precious";
  std::filesystem::create_symlink(other, path_of(directory(), 3));
  recorded([] { set_step(1); });
  EXPECT_EQ(text_in(other), "precious");
  EXPECT_EQ(snapshot().step, 1);
  recorded([] { set_step(2); });
  EXPECT_EQ(snapshot().step, 2);
}

TEST_F(FlightRecord, HasTheBacktraceOfACrash) {
  for (const int number : {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGBUS}) {
    const int status = recorded([&] {
      set_phase(Phase::kOptimizer);
      ::raise(number);
    });
    ASSERT_TRUE(WIFSIGNALED(status)) << number;
    EXPECT_EQ(WTERMSIG(status), number);
    const Snapshot made = snapshot();
    EXPECT_EQ(made.signal, number);
    EXPECT_EQ(made.fault_address, 0u) << "nothing was touched";
    EXPECT_GE(made.backtrace.size(), 3u);
    EXPECT_EQ(made.phase, Phase::kOptimizer);
  }
  EXPECT_THAT(said(), AllOf(HasSubstr("crashed by SIGSEGV, in:"), HasSubstr("crashed by SIGBUS, in:")));
}

TEST_F(FlightRecord, ACrashNamesTheAddress) {
  const int status = recorded([] {
    volatile int* const nowhere = reinterpret_cast<int*>(0x40);
    *nowhere = 1;
  });
  EXPECT_EQ(WTERMSIG(status), SIGSEGV);
  EXPECT_EQ(snapshot().fault_address, 0x40u);
  EXPECT_THAT(said(), HasSubstr("crashed by SIGSEGV at address 0x40, in:"));
}

// What a rank has forked is another process.
TEST_F(FlightRecord, AChildsCrashIsNotItsParents) {
  recorded([&] { in_child(err(), [] { ::raise(SIGSEGV); }); });
  EXPECT_EQ(snapshot().signal, 0);
  EXPECT_THAT(said(), HasSubstr("crashed by SIGSEGV"));
}

// Of functions that are not exported too, where the build has libbacktrace.
[[gnu::noinline]] void touch_nothing(volatile int* nowhere) { *nowhere = 1; }

TEST_F(FlightRecord, ABacktraceNamesFunctions) {
  recorded([] { touch_nothing(nullptr); });
  const bool has_own_names = !symbol_at(reinterpret_cast<std::uintptr_t>(&touch_nothing)).name.empty();
  auto frames = snapshot().backtrace;
  ASSERT_GE(frames.size(), 4u);
  EXPECT_THAT(frames[0], AllOf(HasSubstr("lockstep "), HasSubstr(", build ")));
  frames.erase(frames.begin());
  const std::string own = " in " + std::filesystem::read_symlink("/proc/self/exe").string() + "(+0x";
  if (has_own_names) {
    EXPECT_THAT(frames[0], AllOf(HasSubstr("touch_nothing(int volatile*)+0x"), HasSubstr(own)));
  }
  EXPECT_THAT(frames, ::testing::Contains(HasSubstr("__libc_start_main"))) << "exported";
  EXPECT_THAT(said(), HasSubstr("    " + frames[0] + "\n"));
}

TEST_F(FlightRecord, ABacktraceIsThereWithoutNames) {
  recorded([] {
    const rlimit none = {};
    ::setrlimit(RLIMIT_NOFILE, &none);  // which leaves none for the pipe from the child that looks for names
    ::raise(SIGSEGV);
  });
  const auto frames = snapshot().backtrace;
  ASSERT_GE(frames.size(), 3u);
  EXPECT_THAT(frames,
              ::testing::Contains(HasSubstr(std::filesystem::read_symlink("/proc/self/exe").string() + "(+0x")));
  EXPECT_THAT(said(), HasSubstr("\n    " + frames[0] + "\n"));
}

extern "C" void own_handler(int) { ::_exit(42); }

TEST_F(FlightRecord, HandlersOfTheProgramStay) {
  const int status = recorded([] {});
  EXPECT_EQ(status, 0);
  const int own = in_child(err(), [] {
    std::signal(SIGSEGV, own_handler);
    std::signal(SIGFPE, SIG_IGN);
    install_crash_handlers();
    ::raise(SIGFPE);
    ::raise(SIGSEGV);
  });
  EXPECT_EQ(WEXITSTATUS(own), 42);
}

TEST_F(FlightRecord, CorruptRecordsAreRefused) {
  const std::string whole = bytes_of_one();
  ASSERT_EQ(whole.size(), kFileBytes);
  const auto refused = [&](const std::string& bytes) { return testing::what_of<IoError>([&] { decode(bytes, "F"); }); };
  EXPECT_EQ(refused(whole), "");
  EXPECT_THAT(refused(""), HasSubstr("F: is no flight record"));
  EXPECT_THAT(refused("lkflight"), HasSubstr("ends at byte 8 of 66560"));
  EXPECT_THAT(refused(whole.substr(0, kFileBytes - 1)), HasSubstr("ends at byte 66559"));
  std::string other = whole;
  other[offsetof(Header, version)] = 9;
  EXPECT_THAT(refused(other), HasSubstr("of version 9, and this program reads version 1"));
  other = whole;
  other[offsetof(Header, rank) + 3] = '\x80';
  EXPECT_THAT(refused(other), HasSubstr("which cannot be"));
  other = whole;
  other[offsetof(Header, world_size)] = 2;
  EXPECT_THAT(refused(other), HasSubstr("rank 3 of 2"));
}

// A record that was being written, or has numbers that none has, is left out; the others stay.
TEST_F(FlightRecord, ImpossibleOperationsAreSkipped) {
  const std::string whole = bytes_of_one();
  ASSERT_EQ(decode(whole, "F").operations.size(), 2u);
  const std::size_t second = offsetof(File, records) + 2 * sizeof(Record);
  for (const std::size_t at : {offsetof(Record, number), offsetof(Record, check), offsetof(Record, what)}) {
    std::string other = whole;
    other[second + at] = '\x77';
    const Snapshot made = decode(other, "F");
    ASSERT_EQ(made.operations.size(), 1u) << at;
    EXPECT_EQ(made.operations[0].sequence, 1u);
  }
  std::string many = whole;
  std::memset(many.data() + offsetof(File, state) + offsetof(State, issued), 0xff, 8);
  EXPECT_TRUE(decode(many, "F").operations.empty());
  std::string missing = whole;
  std::memset(missing.data() + offsetof(File, state) + offsetof(State, missing_count), 0x7f, 4);
  EXPECT_EQ(decode(missing, "F").missing.size(), kMostMissing) << "all of them rank 0";
}

TEST_F(FlightRecord, UntrustedNamesArePrintable) {
  std::string bytes = bytes_of_one();
  bytes.replace(offsetof(Header, host), 4, "a\x1b[2");
  bytes += "frame\x1b one\n\nframe two";
  const Snapshot made = decode(bytes, "F");
  EXPECT_EQ(made.host.substr(0, 4), "a?[2");
  EXPECT_THAT(made.backtrace, ::testing::ElementsAre("frame? one", "frame two"));
}

TEST_F(FlightRecord, OtherFilesAreRefused) {
  const auto refused = [](const std::string& path) { return testing::what_of<IoError>([&] { read_bytes(path); }); };
  EXPECT_THAT(refused("/nowhere"), HasSubstr("No such file"));
  EXPECT_THAT(refused("/dev/zero"), HasSubstr("not a regular file"));
  EXPECT_THAT(refused(path_.path().string()), HasSubstr("is a directory"));
  const std::string large = path_.path() / "large";
  std::ofstream(large) << std::string(kFileBytes + kMostCrashBytes + 1, 'x');
  EXPECT_THAT(refused(large), HasSubstr("larger than any"));
  EXPECT_FALSE(read("/nowhere", 0));
}

TEST_F(FlightRecord, AStoppedProcessIsRecognised) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, WUNTRACED), pid);
  Snapshot snapshot;
  snapshot.pid = pid;
  EXPECT_THAT(standstill_of(snapshot), HasSubstr("it is stopped, and kill -CONT"));
  ::kill(pid, SIGCONT);
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(standstill_of(snapshot), "");
}

}  // namespace
}  // namespace lockstep::flight
