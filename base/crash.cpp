#include "base/crash.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "base/error.h"
#include "base/signals.h"
#include "base/version.h"

namespace lockstep {
namespace {

constexpr std::array kCrashes = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr int kFrames = 24;
constexpr int kOwnFrames = 2;  // the handler, and what the kernel returns through
constexpr unsigned kNamesTakeSeconds = 5;

CrashRecord g_record;
std::atomic<bool> g_installed{false};
std::atomic<bool> g_crashed{false};

void write_to(int fd, std::span<const char> bytes) {
  [[maybe_unused]] const auto written = ::write(fd, bytes.data(), bytes.size());
}

/// A line without an allocation, which nothing in a handler may make.
class Line {
 public:
  Line& add(std::string_view text) {
    for (const char c : text)
      if (length_ < bytes_.size()) bytes_[length_++] = c;
    return *this;
  }
  Line& add_number(std::uint64_t value, unsigned base) {
    std::array<char, 24> digits{};
    std::size_t at = digits.size() - 1;
    do {
      digits[--at] = "0123456789abcdef"[value % base];
      value /= base;
    } while (value > 0);
    return add(&digits[at]);
  }
  std::string_view text() const { return {bytes_.data(), length_}; }

 private:
  std::array<char, 160> bytes_{};
  std::size_t length_ = 0;
};

/// What the linker has named the program's file after its content, as hexadecimal digits.
std::array<char, 41> g_build_id{};

int note_build_id(dl_phdr_info* info, std::size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
    const char* const end = at + header.p_memsz;
    const auto padded = [](std::size_t bytes) { return (bytes + 3) & ~std::size_t{3}; };
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      const char* const name = at + sizeof note;
      const char* const id = name + padded(note.n_namesz);
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
        const std::size_t bytes = std::min<std::size_t>(note.n_descsz, g_build_id.size() / 2);
        for (std::size_t k = 0; k < bytes; ++k) {
          const auto byte = static_cast<unsigned char>(id[k]);
          g_build_id[2 * k] = "0123456789abcdef"[byte >> 4];
          g_build_id[2 * k + 1] = "0123456789abcdef"[byte & 15];
        }
        return 1;
      }
      at = id + padded(note.n_descsz);
    }
  }
  return 1;  // the first one is the program
}

const char* name_of(int number) {
  switch (number) {
    case SIGSEGV: return "SIGSEGV";
    case SIGBUS: return "SIGBUS";
    case SIGFPE: return "SIGFPE";
    case SIGILL: return "SIGILL";
    default: return "SIGABRT";
  }
}

/// Libraries do not check whether an allocation failed. Asks for enough memory to notice a lack for a kernel's code, a
/// thread's stack or a scratchpad, and only if a limit of this process makes a lack likely.
bool is_out_of_memory() {
  constexpr std::size_t kProbe = std::size_t{32} << 20;
  bool limited = false;
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    struct rlimit limit = {};
    limited = limited || (::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY);
  }
  if (!limited) return false;
  void* const probe = ::mmap(nullptr, kProbe, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe == MAP_FAILED) return errno == ENOMEM;
  ::munmap(probe, kProbe);
  return false;
}

/// Of the child that looks for names.
[[noreturn]] void send_names(std::span<void* const> frames, int fd) {
  for (const int number : kCrashes) ::signal(number, SIG_DFL);
  ::signal(SIGALRM, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
  ::alarm(kNamesTakeSeconds);
  try {
    write_to(fd, named_frames(frames));
  } catch (...) {  // no memory left
  }
  ::_exit(0);
}

/// False: nothing was written. Names take memory and files, for which no handler may ask: another thread may hold the
/// locks, and the heap may be what is broken. So a child looks for them, which may crash or hang.
bool write_named(std::span<void* const> frames, std::span<const int> to) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  const pid_t child = ::_Fork();
  if (child == 0) send_names(frames, ends[1]);
  ::close(ends[1]);
  bool any = false;
  for (std::array<char, 4096> bytes; child > 0;) {
    pollfd readable = {.fd = ends[0], .events = POLLIN, .revents = 0};
    if (::poll(&readable, 1, kNamesTakeSeconds * 1000) <= 0) break;
    const ssize_t length = ::read(ends[0], bytes.data(), bytes.size());
    if (length <= 0) break;
    any = true;
    for (const int fd : to) write_to(fd, std::span(bytes).first(static_cast<std::size_t>(length)));
  }
  ::close(ends[0]);
  if (child > 0) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, WNOHANG);
  }
  return any;
}

void write_unnamed(std::span<void* const> frames, int fd) {
  for (void* const& frame : frames) {
    write_to(fd, kFrameIndent);
    ::backtrace_symbols_fd(&frame, 1, fd);
  }
}

void end_by(int number) {
  // Blocked while its handler runs: it ends the process when that returns.
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  ::sigaction(number, &action, nullptr);
  ::raise(number);
}

extern "C" void on_crash(int number, siginfo_t* info, void*) {
  // A second thread that crashes meanwhile, or the handler itself, adds nothing.
  if (g_crashed.exchange(true)) return end_by(number);
  if (is_out_of_memory()) {
    constexpr std::string_view kLine =
        "error: out of memory: a library got none, and ended the process → raise ulimit -v and ulimit -d, or use a "
        "smaller batch or model\n";
    write_to(STDERR_FILENO, kLine);
    ::_exit(static_cast<int>(ExitCode::kDevice));
  }
  const bool has_address = info != nullptr && info->si_code > 0 && number != SIGABRT;
  const auto address = has_address ? reinterpret_cast<std::uint64_t>(info->si_addr) : 0;
  const bool recorded = g_record.signal != nullptr && g_record.pid == ::getpid();
  if (recorded) {
    g_record.fault_address->store(address, std::memory_order_relaxed);
    g_record.signal->store(number, std::memory_order_release);
  }
  std::array<void*, kFrames + kOwnFrames> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  Line line;
  line.add(kCrashedBy).add(name_of(number));
  if (has_address) line.add(" at address 0x").add_number(address, 16);
  line.add(kBacktraceFollows).add("\n");
  const int skipped = count > kOwnFrames ? kOwnFrames : 0;
  write_to(STDERR_FILENO, line.text());
  const auto all = std::span<void* const>(frames).subspan(static_cast<std::size_t>(skipped),
                                                          static_cast<std::size_t>(count - skipped));
  const std::array into = {STDERR_FILENO, g_record.fd};
  const auto fds = std::span(into).first(recorded ? 2 : 1);
  Line build;
  build.add(kFrameIndent).add("lockstep ").add(version()).add(" ").add(git_revision());
  if (g_build_id[0] != '\0') build.add(", build ").add(g_build_id.data());
  build.add("\n");
  for (const int fd : fds) write_to(fd, build.text());
  if (!write_named(all, fds))
    for (const int fd : fds) write_unnamed(all, fd);
  end_by(number);
}

constexpr std::size_t kLongestName = 300;  // of templates, which have no end

std::string shown(const std::string& name) {
  std::string text = demangled(name.c_str());
  if (text.size() > kLongestName) text.replace(kLongestName, std::string::npos, "…");
  return text;
}

}  // namespace

void install_crash_handlers() noexcept {
  if (g_installed.exchange(true)) return;
  // The first call loads a library, which a handler must not.
  void* frame = nullptr;
  ::backtrace(&frame, 1);
  ::dl_iterate_phdr(note_build_id, nullptr);
  use_alternate_signal_stack();
  for (const int number : kCrashes) {
    struct sigaction current = {};
    if (::sigaction(number, nullptr, &current) != 0 || (current.sa_flags & SA_SIGINFO) != 0 ||
        current.sa_handler != SIG_DFL)
      continue;
    struct sigaction action = {};
    action.sa_sigaction = on_crash;
    ::sigemptyset(&action.sa_mask);
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(number, &action, nullptr);
  }
}

void record_crashes_in(const CrashRecord& record) noexcept { g_record = record; }

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> known(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? known.get() : name;
}

std::string named_frames(std::span<void* const> addresses) {
  std::string text;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const auto address = reinterpret_cast<std::uintptr_t>(addresses[i]);
    const std::uintptr_t code = i == 0 ? address : address - 1;  // within the call
    Symbol symbol = symbol_at(code);
    Dl_info info = {};
    const bool known = ::dladdr(reinterpret_cast<void*>(code), &info) != 0;
    if (symbol.name.empty() && known && info.dli_sname != nullptr)
      symbol = {.name = info.dli_sname, .begin = reinterpret_cast<std::uintptr_t>(info.dli_saddr), .line = {}};
    text += kFrameIndent;
    if (!symbol.name.empty()) text += shown(symbol.name);
    if (symbol.begin != 0) text += fmt::format("+{:#x}", address - symbol.begin);
    if (!symbol.line.empty()) text += " at " + symbol.line;
    if (known && info.dli_fname != nullptr)
      text += fmt::format("{}{}(+{:#x})", symbol.name.empty() ? "" : " in ", info.dli_fname,
                          address - reinterpret_cast<std::uintptr_t>(info.dli_fbase));
    else
      text += fmt::format("{}{:#x}", symbol.name.empty() ? "" : " at ", address);
    text += '\n';
  }
  return text;
}

}  // namespace lockstep
