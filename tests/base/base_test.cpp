#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "base/cpu.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/kernel.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/signals.h"
#include "base/splitmix.h"
#include "base/status_report.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/dtype.h"
#include "lockstep/base/env.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_directory.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;

TEST(Error, LineIsWhatAndRemedy) {
  EXPECT_EQ(UsageError("wrong", "do right").line(), "wrong → do right");
  EXPECT_EQ(UsageError("wrong").line(), "wrong");
}

TEST(Error, CodesAreTheDocumentedOnes) {
  EXPECT_EQ(UsageError("").code(), 2);
  EXPECT_EQ(IoError("").code(), 3);
  EXPECT_EQ(DeviceError("").code(), 4);
  EXPECT_EQ(MpiError("").code(), 4);
  EXPECT_EQ(TimeoutError("").code(), 5);
  EXPECT_EQ(OutOfStepError("").code(), 5);
  EXPECT_EQ(CheckpointError("").code(), 6);
  EXPECT_EQ(DivergedError("").code(), 7);
  EXPECT_EQ(InterruptedError(SIGINT, "").code(), 130);
  EXPECT_EQ(PeerError(3, "").code(), 3);
}

TEST(Error, AssertionsNamePlaceConditionAndDetail) {
  const int two = 2;
  EXPECT_NO_THROW(LOCKSTEP_ASSERT(two == 2));
  const auto error = testing::thrown<InternalError>([&] { LOCKSTEP_ASSERT(two == 3, "two is {}", two); });
  EXPECT_THAT(error.what(), ::testing::HasSubstr("base_test.cpp"));
  EXPECT_THAT(error.what(), ::testing::HasSubstr("two == 3: two is 2"));
}

TEST(Text, NumbersMustFillTheText) {
  EXPECT_EQ(parse_int("-12"), -12);
  for (const char* bad : {"", " 1", "1 ", "1x", "0x10", "9223372036854775808", "1.0"})
    EXPECT_FALSE(parse_int(bad)) << bad;
  EXPECT_EQ(parse_double("1e-3"), 1e-3);
  for (const char* bad : {"", "1,5", "1e", "fast"}) EXPECT_FALSE(parse_double(bad)) << bad;
}

TEST(Text, SplitKeepsEmptyPiecesAndJoinUndoesIt) {
  EXPECT_THAT(split("a,b,,c", ','), ElementsAre("a", "b", "", "c"));
  EXPECT_THAT(split("", ','), ElementsAre(""));
  EXPECT_THAT(split(",", ','), ElementsAre("", ""));
  EXPECT_EQ(join(split("a,b,,c", ','), ","), "a,b,,c");
  EXPECT_EQ(trim(" \ta b\r\n"), "a b");
  EXPECT_EQ(trim(" \t"), "");
}

TEST(Text, SplitsWordsAtBlanks) {
  EXPECT_EQ(words_of(" a  bc\td\r\n"), (std::vector<std::string>{"a", "bc", "d"}));
  EXPECT_TRUE(words_of(" \n").empty());
}

TEST(Text, Utf8IsCutBetweenCharacters) {
  EXPECT_EQ(utf8_prefix("aéb", 9), "aéb");
  EXPECT_EQ(utf8_prefix("aéb", 3), "aé");
  EXPECT_EQ(utf8_prefix("aéb", 2), "a");
  EXPECT_EQ(utf8_prefix("😀", 3), "");
  EXPECT_EQ(utf8_prefix("\x80\x80\x80\x80\x80\x80", 5).size(), 5u);  // no UTF-8
}

TEST(Text, NearestFindsWhatWasMeant) {
  const std::vector<std::string> names = {"digits", "mnist", "random", "batch", "global-batch"};
  EXPECT_EQ(nearest("digts", names), "digits");
  EXPECT_EQ(nearest("mnsit", names), "mnist");  // neighbours swapped
  EXPECT_EQ(nearest("glob", names), "global-batch");
  EXPECT_FALSE(nearest("zzzzzz", names));
  EXPECT_FALSE(nearest("digits", {}));
}

TEST(Text, HumanBytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(26.2e6), "26.2 MB");
}

TEST(Float16, HasTheStandardsValues) {
  for (std::uint32_t bits = 0; bits < 0x8000; ++bits) {
    const std::uint32_t exponent = bits >> 10, mantissa = bits & 0x3ff;
    const Float16 value{static_cast<std::uint16_t>(bits)}, negative{static_cast<std::uint16_t>(bits | 0x8000u)};
    if (exponent == 31 && mantissa > 0) {
      ASSERT_TRUE(std::isnan(value.to_float()) && std::isnan(negative.to_float()));
      ASSERT_TRUE(std::isnan(Float16::from_float(value.to_float()).to_float()));
      continue;
    }
    const float expected = exponent == 31 ? std::numeric_limits<float>::infinity()
                           : exponent == 0
                               ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(mantissa + 1024), static_cast<int>(exponent) - 25);
    ASSERT_EQ(value.to_float(), expected) << bits;
    ASSERT_EQ(negative.to_float(), -expected) << bits;
    ASSERT_EQ(std::signbit(negative.to_float()), true) << bits;
    ASSERT_EQ(Float16::from_float(value.to_float()).bits, value.bits);
    ASSERT_EQ(Float16::from_float(negative.to_float()).bits, negative.bits);
  }
}

// Between each two neighbours: at a quarter, in the middle, to the even one, at three quarters.
TEST(Float16, RoundsToNearestEven) {
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const Float16 low{bits}, high{static_cast<std::uint16_t>(bits + 1)};
    const float step = high.to_float() - low.to_float();
    ASSERT_EQ(Float16::from_float(low.to_float() + step / 4).bits, low.bits);
    ASSERT_EQ(Float16::from_float(low.to_float() + step / 2).bits, bits % 2 == 0 ? low.bits : high.bits);
    ASSERT_EQ(Float16::from_float(-low.to_float() - step * 3 / 4).bits, high.bits | 0x8000u);
  }
  EXPECT_EQ(Float16::from_float(65519.0f).bits, 0x7bff);
  EXPECT_EQ(Float16::from_float(65520.0f).bits, 0x7c00);
  EXPECT_EQ(Float16::from_float(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(Float16::from_float(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
  EXPECT_EQ(Float16::from_float(std::numeric_limits<float>::denorm_min()).bits, 0);
  static_assert(Float16::from_float(-2.0f).bits == 0xc000 && Float16{0x3555}.to_float() == 0x1.554p-2f);
}

TEST(BFloat16, RoundsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(BFloat16::from_float(1.0f).bits, 0x3f80);
  EXPECT_EQ(BFloat16::from_float(1.0f + 0x1p-8f).bits, 0x3f80);             // a tie, to even
  EXPECT_EQ(BFloat16::from_float(1.0f + 3 * 0x1p-8f).bits, 0x3f82);         // a tie, to even
  EXPECT_EQ(BFloat16::from_float(1.0f + 0x1p-8f + 0x1p-20f).bits, 0x3f81);  // above the tie
  EXPECT_TRUE(std::isinf(BFloat16::from_float(std::numeric_limits<float>::max()).to_float()));
  EXPECT_TRUE(std::isnan(BFloat16::from_float(std::nanf("")).to_float()));
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const BFloat16 value{static_cast<std::uint16_t>(bits)};
    ASSERT_EQ(BFloat16::from_float(value.to_float()).bits, bits);
  }
}

TEST(Deadline, AnyNumberOfSecondsIsADuration) {
  EXPECT_EQ(duration_of(1.5), Millis(1500));
  for (const double none : {0.0, -1.0, -1e300, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(duration_of(none), Clock::duration::zero());
  for (const double long_time : {1e10, 1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(duration_of(long_time), std::chrono::seconds(1'000'000'000));
    EXPECT_FALSE(Deadline::after_seconds(long_time).expired());
  }
}

TEST(Host, NameHasNoDomain) {
  EXPECT_FALSE(host_name().empty());
  EXPECT_EQ(host_name().find('.'), std::string::npos);
}

TEST(Deadline, ExpiresAndCountsDown) {
  EXPECT_TRUE(Deadline::after(Millis(0)).expired());
  EXPECT_EQ(Deadline::after(Millis(-5)).remaining(), Clock::duration::zero());
  const auto hour = Deadline::after_seconds(3600);
  EXPECT_FALSE(hour.expired());
  EXPECT_GT(hour.remaining(), std::chrono::minutes(59));
  EXPECT_FALSE(Deadline::never().expired());
  EXPECT_LE(Deadline::never().remaining(), std::chrono::hours(24));
}

std::uint64_t hash64(std::span<const std::byte> bytes, std::size_t piece) {
  Hash64 hash;
  for (std::size_t at = 0; at < bytes.size(); at += piece)
    hash.update(bytes.subspan(at, std::min(piece, bytes.size() - at)));
  return hash.finish();
}

TEST(Hash64, ChunkingDoesNotMatter) {
  std::vector<std::byte> bytes(1000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 37 + i / 256);
  for (const std::size_t size : {0ul, 1ul, 63ul, 64ul, 65ul, 128ul, 1000ul}) {
    const auto part = std::span(bytes).first(size);
    const std::uint64_t whole = hash64(part, 2000);
    for (const std::size_t piece : {1ul, 7ul, 64ul, 100ul})
      EXPECT_EQ(hash64(part, piece), whole) << size << " " << piece;
  }
}

TEST(Hash64, EveryBitOfEveryByteAndTheLengthMatter) {
  std::vector<std::byte> bytes(200);
  std::set<std::uint64_t> seen = {hash64(bytes, 200)};
  for (auto& byte : bytes)
    for (int bit = 0; bit < 8; ++bit) {
      byte ^= static_cast<std::byte>(1 << bit);
      EXPECT_TRUE(seen.insert(hash64(bytes, 200)).second);
      byte ^= static_cast<std::byte>(1 << bit);
    }
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_TRUE(seen.insert(hash64(std::span(bytes).first(size), 200)).second) << size;
  // Two words that have changed places.
  bytes[0] = std::byte{1};
  const std::uint64_t first = hash64(bytes, 200);
  std::swap(bytes[0], bytes[64]);
  EXPECT_NE(hash64(bytes, 200), first);
}

TEST(NumbersHash, EachNumberItsPlaceAndTheirCountMatter) {
  std::array<std::int64_t, 20> numbers{};
  std::set<std::size_t> seen = {NumbersHash()(numbers)};
  for (std::int64_t& number : numbers)
    for (const std::int64_t other : {std::int64_t{1}, std::int64_t{2}, std::int64_t{-1}, std::int64_t{1} << 32}) {
      number = other;
      EXPECT_TRUE(seen.insert(NumbersHash()(numbers)).second) << other;
      number = 0;
    }
  for (std::size_t count = 0; count < numbers.size(); ++count)
    EXPECT_TRUE(seen.insert(NumbersHash()(std::span(numbers).first(count))).second) << count;
}

TEST(Sha256, KnownDigests) {
  // FIPS 180-2, appendix B; split over several updates.
  Sha256 hash;
  hash.update("a");
  hash.update("");
  hash.update("bc");
  EXPECT_EQ(hash.finish(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256().finish(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(SplitMix64, BitsNeverChange) {
  // The published sequence for seed 1234567.
  SplitMix64 stream(1234567);
  EXPECT_EQ(stream.next(), 6457827717110365317u);
  EXPECT_EQ(stream.next(), 3203168211198807973u);
  EXPECT_EQ(SplitMix64::word(1234567, 1), 3203168211198807973u);
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  UniqueFd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int fd = first.get();
  ASSERT_GE(fd, 0);
  UniqueFd second(std::move(first));
  EXPECT_EQ(second.get(), fd);
  second.reset();
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
}

TEST(Env, SetsKeepsAndLists) {
  set_env("LOCKSTEP_TEST_ENV", "1");
  set_env("LOCKSTEP_TEST_ENV", "2", /*overwrite=*/false);
  EXPECT_EQ(env("LOCKSTEP_TEST_ENV"), "1");
  EXPECT_THAT(env_names("LOCKSTEP_TEST_"), ::testing::Contains("LOCKSTEP_TEST_ENV"));
  EXPECT_FALSE(env("LOCKSTEP_TEST_NOT_SET"));
}

TEST(Memory, PeakIsPlausible) {
  EXPECT_GT(peak_resident_bytes(), std::int64_t{1} << 20);
  EXPECT_LT(peak_resident_bytes(), std::int64_t{1} << 40);
}

class AtomicFileTest : public ::testing::Test {
 protected:
  std::string content() const { return testing::read_file(directory_ / "f"); }

  testing::TemporaryDirectory temporary_;
  const std::filesystem::path directory_ = temporary_.path();
};

TEST_F(AtomicFileTest, TheOldFileStaysUntilTheCommit) {
  std::ofstream(directory_ / "f") << "old";
  {
    AtomicFile file(directory_ / "f");
    file.write(std::as_bytes(std::span("new", 3)));
    EXPECT_EQ(content(), "old");
  }
  EXPECT_EQ(content(), "old");  // no commit
  AtomicFile file(directory_ / "f");
  file.write(std::as_bytes(std::span("new", 3)));
  file.commit();
  EXPECT_EQ(content(), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 1);
}

// The rename would put a file in the device's place.
// A named pipe would be waited for, without end.
TEST_F(AtomicFileTest, SymlinksStayAndTheirTargetsAreWritten) {
  namespace fs = std::filesystem;
  fs::create_directories(directory_ / "disk");
  fs::create_symlink("disk/target", directory_ / "relative");
  fs::create_symlink(directory_ / "relative", directory_ / "f");
  for (const char* text : {"made", "replaced"}) {
    AtomicFile file(directory_ / "f");
    file.write(std::as_bytes(std::span(std::string_view(text))));
    file.commit();
    EXPECT_TRUE(fs::is_symlink(directory_ / "f"));
    EXPECT_TRUE(fs::is_symlink(directory_ / "relative"));
    std::ifstream in(directory_ / "disk/target");
    std::string found;
    in >> found;
    EXPECT_EQ(found, text);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_ / "disk"), {}), 1);
}

TEST_F(AtomicFileTest, OnlyRegularFilesAreMapped) {
  const std::string pipe = (directory_ / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, directory_.string(), std::string("/dev/zero")})
    EXPECT_THROW(MappedFile{path}, IoError) << path;
}

TEST_F(AtomicFileTest, GitLfsPointersAreRefused) {
  const std::string rest =
      "\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
  for (const char* version : {"https://git-lfs.github.com/spec/v1", "https://hawser.github.com/spec/v1"}) {
    const std::string path = temporary_.write("pointer", "version " + std::string(version) + rest);
    EXPECT_EQ(open_regular(path).problem, "is a Git LFS pointer, and not the file that it stands for");
    EXPECT_EQ(testing::thrown<IoError>([&] { MappedFile{path}; }).line(),
              path +
                  ": is a Git LFS pointer, and not the file that it stands for → fetch that with "
                  "git lfs pull");
  }
  // The text alone is none: it may be the beginning of anything.
  for (const std::string& other : {std::string("version https://git-lfs"), std::string("version 1"), std::string(),
                                   std::string("version https://git-lfs.github.com/spec/v1") + std::string(1000, 'x')})
    EXPECT_EQ(open_regular(temporary_.write("other", other)).problem, "") << other;
}

TEST_F(AtomicFileTest, SameFileUnderSeveralNames) {
  namespace fs = std::filesystem;
  const std::string here = directory_, there = temporary_.write("there", "1"), other = temporary_.write("other", "1");
  fs::create_symlink("there", here + "/link");
  fs::create_hard_link(there, here + "/hard");
  fs::create_directory_symlink(".", here + "/around");
  for (const char* name : {"there", "./there", "around/./around/there", "link", "hard"})
    EXPECT_TRUE(is_same_file(there, here + "/" + name)) << name;
  EXPECT_FALSE(is_same_file(there, other));
  EXPECT_FALSE(is_same_file(there, here + "/none"));
  EXPECT_TRUE(is_same_file(here + "/none", here + "/around/./none"));
  EXPECT_TRUE(is_same_file("none", fs::current_path().string() + "/none"));
  EXPECT_FALSE(is_same_file(here + "/none", here + "/nothing"));
}

TEST_F(AtomicFileTest, OnlyRegularFilesAreReplaced) {
  EXPECT_THROW(AtomicFile("/dev/null"), IoError);
  EXPECT_THROW(AtomicFile{directory_}, IoError);
  EXPECT_THROW(AtomicFile(directory_ / "none" / "f"), IoError);
  std::filesystem::create_symlink("/dev/full", directory_ / "f");
  EXPECT_THROW(AtomicFile(directory_ / "f"), IoError);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 1);
}

TEST(Stop, SighupRequestsAStopUnlessIgnored) {
  std::signal(SIGHUP, SIG_IGN);  // nohup
  watch_for_stops();
  struct sigaction current = {};
  ASSERT_EQ(::sigaction(SIGHUP, nullptr, &current), 0);
  EXPECT_EQ(current.sa_handler, SIG_IGN);
  std::signal(SIGHUP, SIG_DFL);
  watch_for_stops();
  ASSERT_EQ(::sigaction(SIGHUP, nullptr, &current), 0);
  EXPECT_NE(current.sa_handler, SIG_DFL);
}

TEST(StatusReport, RoundTripsAndIsBounded) {
  using Kind = StatusReport::Kind;
  const StatusReport full{.kind = Kind::kMissingRanks, .number = -3, .seconds = 1.5, .ranks = {4, -1}, .text = "é"};
  EXPECT_EQ(decode_status(encode_status(full)), full);
  StatusReport large{.kind = Kind::kUsageError, .text = std::string(StatusReport::kMaxTextBytes - 1, 'x') + "é"};
  large.ranks.assign(1000, 7);
  const auto cut = decode_status(encode_status(large));
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->ranks.size(), StatusReport::kMaxRanks);
  EXPECT_EQ(cut->text, std::string(StatusReport::kMaxTextBytes - 1, 'x'));
  const std::string bytes = encode_status(full);
  for (std::size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(decode_status(bytes.substr(0, size))) << size;
  EXPECT_FALSE(decode_status(bytes + "x"));
  EXPECT_FALSE(decode_status('\x7f' + bytes.substr(1)));
  EXPECT_FALSE(decode_status(encode_status({.kind = Kind::kDefersStops, .seconds = std::nan("")})));
}

TEST(StatusReport, StepsOfAnySizeArrive) {
  using Kind = StatusReport::Kind;
  for (const auto kind : {Kind::kProgress, Kind::kCheckpointed, Kind::kDone}) {
    const StatusReport report{.kind = kind, .step = std::int64_t{1} << 40};
    EXPECT_EQ(decode_status(encode_status(report)), report);
  }
}

TEST(StatusReport, LinesOfAnyProgram) {
  using Kind = StatusReport::Kind;
  EXPECT_EQ(parse_status_line("progress 12"), (StatusReport{.kind = Kind::kProgress, .step = 12}));
  EXPECT_EQ(parse_status_line("checkpointed 0"), (StatusReport{.kind = Kind::kCheckpointed, .step = 0}));
  EXPECT_EQ(parse_status_line("done"), (StatusReport{.kind = Kind::kDone}));
  for (const char* line : {"", "progress", "progress ", "progress -1", "progress 1 2", "progress x", "Progress 1",
                           "checkpointed 99999999999999999999", "done 3", " done", "stopped 1"})
    EXPECT_FALSE(parse_status_line(line)) << line;
}

TEST(StatusReport, IsDroppedWithoutALauncher) {
  EXPECT_FALSE(report_status({.kind = StatusReport::Kind::kSaved}));
  EXPECT_FALSE(report_usage_error("not said"));
}

TEST(Stop, TheFirstSignalIsRemembered) {
  watch_for_stops();
  EXPECT_NO_THROW(throw_if_stopped("testing"));
  ::kill(::getpid(), SIGTERM);
  while (stop_signal() == 0) std::this_thread::yield();  // it arrives, or the test's time is over
  ::kill(::getpid(), SIGINT);                            // at once after the first: the same request
  EXPECT_EQ(stop_signal(), SIGTERM);
  {
    const DeferredStops deferred;
    EXPECT_EQ(stop_signal(), 0);
    EXPECT_EQ(stop_request(), SIGTERM);
    EXPECT_NO_THROW(throw_if_stopped("testing"));
  }
  const auto error = testing::thrown<InterruptedError>([&] { throw_if_stopped("testing"); });
  EXPECT_EQ(error.code(), 128 + SIGTERM);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("testing"));
}

// Of a library nobody hears but warnings, and a program may take those.
TEST(Log, GoesWhereTheProgramSays) {
  std::vector<std::string> lines;
  set_log_receiver([&](LogLevel level, std::string_view line) {
    lines.push_back(fmt::format("{} {}", static_cast<int>(level), line));
  });
  log_info("nobody has asked for this");
  log_warn("a\nb");
  choose_log_level(LogLevel::kInfo);
  log_info("c");
  set_log_level(LogLevel::kError);
  choose_log_level(LogLevel::kDebug);  // somebody has chosen
  log_warn("d");
  set_log_receiver({});
  set_log_level(LogLevel::kWarn);
  EXPECT_THAT(lines, ::testing::ElementsAre("2 a b", "1 c"));
}

EnvLookup environment(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
}

TEST(OpenmpSpinCount, IsAFractionOfLibgompsOwn) {
  const auto spins = openmp_spin_count(environment({}), 2);
  ASSERT_TRUE(spins);
  EXPECT_GE(std::stol(*spins), 100);
  EXPECT_LE(std::stol(*spins), 300'000);
}

TEST(OpenmpSpinCount, RespectsTheUsersSetting) {
  EXPECT_FALSE(openmp_spin_count(environment({{"GOMP_SPINCOUNT", "0"}}), 8));
  EXPECT_FALSE(openmp_spin_count(environment({{"OMP_WAIT_POLICY", "active"}}), 8));
}

TEST(OpenmpSpinCount, NeedsAnotherThreadToWaitFor) { EXPECT_FALSE(openmp_spin_count(environment({}), 1)); }

TEST(OpenmpSpinCount, KeepsTheProcessUnderValgrind) {
  EXPECT_FALSE(openmp_spin_count(environment({{"LD_PRELOAD", "/usr/libexec/valgrind/vgpreload_core.so"}}), 8));
  EXPECT_TRUE(openmp_spin_count(environment({{"LD_PRELOAD", "/usr/lib/libother.so"}}), 8));
}

}  // namespace

}  // namespace lockstep
