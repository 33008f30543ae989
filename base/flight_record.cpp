#include "base/flight_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <new>

#include "base/crash.h"
#include "base/error.h"
#include "base/flight_layout.h"
#include "base/log.h"
#include "base/scope.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::flight {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

/// Of this process. `state` is memory of its own until there is a file, and stays so where there is none.
struct Writer {
  State own{};
  State* state = &own;
  File* file = nullptr;
  bool asked = false;
  std::string directory;
};

Writer& writer() {
  static Writer made;
  return made;
}

std::int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

std::uint64_t packed(Phase phase) {
  return static_cast<std::uint64_t>(phase) << kPhaseShift | (static_cast<std::uint64_t>(now_ns() / 1000) & kSinceMask);
}

std::int64_t unix_ns() {
  timespec now = {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void write_header(Header& header, int rank, int world_size) {
  header.magic = kMagic;
  header.version = kVersion;
  header.operations = kOperations;
  header.rank = rank;
  header.world_size = world_size;
  header.pid = ::getpid();
  header.attempt = static_cast<std::int32_t>(parse_int(env("LOCKSTEP_ATTEMPT").value_or("0")).value_or(0));
  header.started_unix_ns = unix_ns();
  header.started_ns = now_ns();
  const std::string host = host_name();
  host.copy(header.host.data(), header.host.size() - 1);
}

[[noreturn]] void fail(const std::string& path) {
  throw IoError(fmt::format("no flight record in {}: {}", path, errno_text(errno)),
                fmt::format("let {} name a directory with {} of space, or none", kDirectoryVariable,
                            human_bytes(static_cast<double>(kFileBytes))));
}

/// The file takes its space at once: a store into a page for which the disk has none would end the process.
void make_file(const std::string& directory, int rank, int world_size) {
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) fail(directory);
  const std::string path = path_of(directory, rank);
  // In place of another process's, which keeps what it has mapped.
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail(path);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_APPEND, 0600));
  if (!fd) fail(path);
  if (const int error = ::posix_fallocate(fd.get(), 0, kFileBytes); error != 0) {
    ::unlink(path.c_str());
    errno = error;
    fail(path);
  }
  void* const memory = ::mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) fail(path);
  Writer& mine = writer();
  File* const file = new (memory) File{};
  write_header(file->header, rank, world_size);
  file->state.phase.store(mine.own.phase.load());
  file->state.step.store(mine.own.step.load());
  mine.file = file;
  mine.state = &file->state;
  mine.directory = directory;
  // The descriptor stays for a crash's text, as the mapping does.
  record_crashes_in({.signal = &file->state.signal,
                     .fault_address = &file->state.fault_address,
                     .fd = fd.release(),
                     .pid = ::getpid()});
}

}  // namespace

std::string path_of(const std::string& directory, int rank) { return fmt::format("{}/rank-{}", directory, rank); }

void open(int rank, int world_size) noexcept {
  Writer& mine = writer();
  if (mine.asked) return;
  mine.asked = true;
  try {
    const auto directory = env(kDirectoryVariable);
    if (!directory || directory->empty()) return;
    make_file(*directory, rank, world_size);
    install_crash_handlers();
  } catch (const Error& error) {
    log_warn("{}", error.line());
  } catch (...) {
    return;  // no memory left
  }
}

const std::string& directory() noexcept { return writer().directory; }

void set_phase(Phase phase) noexcept { writer().state->phase.store(packed(phase), kRelaxed); }

Phase phase() noexcept { return static_cast<Phase>(writer().state->phase.load(kRelaxed) >> kPhaseShift); }

std::int64_t phase_since_ns() noexcept {
  return static_cast<std::int64_t>(writer().state->phase.load(kRelaxed) & kSinceMask) * 1000;
}

void set_step(std::int64_t step) noexcept { writer().state->step.store(step, kRelaxed); }

void begin_reading(int worker, std::uint64_t sample) noexcept {
  if (worker < 0 || static_cast<std::size_t>(worker) >= kMostReaders) return;
  static thread_local const auto thread = static_cast<std::int32_t>(::syscall(SYS_gettid));
  Reading& reading = writer().state->readings[static_cast<std::size_t>(worker)];
  reading.thread.store(thread, kRelaxed);
  reading.sample.store(sample, kRelaxed);
  reading.since_ns.store(now_ns(), std::memory_order_release);
}

void end_reading(int worker) noexcept {
  if (worker < 0 || static_cast<std::size_t>(worker) >= kMostReaders) return;
  writer().state->readings[static_cast<std::size_t>(worker)].since_ns.store(0, kRelaxed);
}

std::uint64_t issue(const Operation& operation) noexcept {
  Writer& mine = writer();
  if (mine.file == nullptr) return 0;
  const std::uint64_t number = mine.state->issued.fetch_add(1, kRelaxed) + 1;
  Record& record = mine.file->records[number % kOperations];
  record.check.store(0, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.sequence.store(operation.sequence, kRelaxed);
  record.bytes.store(operation.bytes, kRelaxed);
  record.step.store(operation.step, kRelaxed);
  record.issued_ns.store(now_ns(), kRelaxed);
  record.completed_ns.store(0, kRelaxed);
  record.what.store(static_cast<std::uint64_t>(static_cast<std::uint32_t>(operation.bucket)) << 32 |
                        static_cast<std::uint64_t>(operation.group) << 16 | static_cast<std::uint64_t>(phase()) << 8 |
                        static_cast<std::uint64_t>(operation.kind),
                    kRelaxed);
  record.number.store(number, std::memory_order_release);
  record.check.store(number, std::memory_order_release);
  return number;
}

void complete(std::uint64_t number, bool at_once) noexcept {
  if (number == 0) return;
  Record& record = writer().file->records[number % kOperations];
  // Many operations ago its place has gone to another one.
  if (record.number.load(kRelaxed) == number)
    record.completed_ns.store(at_once ? record.issued_ns.load(kRelaxed) : now_ns(), kRelaxed);
}

void begin_wait() noexcept { writer().state->waits_since.store(now_ns(), kRelaxed); }

void end_wait() noexcept {
  State& state = *writer().state;
  const std::int64_t since = state.waits_since.exchange(0, kRelaxed);
  if (since != 0) state.waited_ns.fetch_add(now_ns() - since, kRelaxed);
  if (state.missing_count.load(kRelaxed) != 0) state.missing_count.store(0, kRelaxed);
}

void set_missing(std::span<const int> ranks) noexcept {
  State& state = *writer().state;
  state.missing_count.store(0, kRelaxed);
  const std::size_t count = ranks.size() < kMostMissing ? ranks.size() : kMostMissing;
  for (std::size_t i = 0; i < count; ++i) state.missing[i].store(ranks[i], kRelaxed);
  state.missing_count.store(static_cast<std::uint32_t>(count), std::memory_order_release);
}

void give_up_on(std::span<const int> ranks) noexcept {
  set_missing(ranks);
  std::int64_t none = 0;
  writer().state->waits_since.compare_exchange_strong(none, now_ns(), kRelaxed);
}

std::int64_t waited_ns() noexcept { return writer().state->waited_ns.load(kRelaxed); }

}  // namespace lockstep::flight
