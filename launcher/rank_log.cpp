#include "launcher/rank_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/crash.h"
#include "base/error.h"
#include "base/text.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kLastLines = 20;
constexpr std::size_t kReadableBytes = 500;

std::string readable(std::string_view line) {
  line = last_state(line);
  std::string text(utf8_prefix(line, kReadableBytes));
  if (line.size() > kReadableBytes) text += fmt::format("… ({} bytes)", line.size());
  for (char& c : text)
    if (static_cast<unsigned char>(c) < ' ' && c != '\t') c = '?';
  return text;
}

/// In place of a crash's first line.
std::string shown_before(std::string_view line) {
  line.remove_suffix(kBacktraceFollows.size());
  return readable(line) + "; its backtrace is above";
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

[[noreturn]] void fail(const std::string& path, int error) {
  throw IoError(fmt::format("--log-dir: cannot write {}: {}", path, errno_text(error)),
                error == ENOSPC ? "free some space or choose another directory" : "choose another directory");
}

/// Opening a file does not reveal a full disk: write something.
void check_space(int fd, const std::string& path) {
  if (!write_all(fd, std::string(4096, '\n')) || ::fsync(fd) != 0 || ::ftruncate(fd, 0) != 0) fail(path, errno);
}

}  // namespace

std::string_view last_state(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  const auto redrawn = line.rfind('\r');
  if (redrawn == std::string_view::npos) return line;
  line.remove_prefix(redrawn + 1);
  for (const std::string_view erases : {"\x1b[K", "\x1b[J", "\x1b[0K", "\x1b[0J"}) {
    if (line.starts_with(erases)) line.remove_prefix(erases.size());
    if (line.ends_with(erases)) line.remove_suffix(erases.size());
  }
  return line;
}

void LineCutter::keep_last_state() {
  // The '\r' stays: it shows that the line is being redrawn.
  std::string_view state = partial_;
  while (state.ends_with('\r')) state.remove_suffix(1);
  const auto redrawn = state.rfind('\r');
  if (redrawn != std::string_view::npos) partial_.erase(0, redrawn);
}

RankLogs::RankLogs(const std::string& directory, int ranks)
    : directory_(directory), ranks_(static_cast<std::size_t>(ranks)) {
  if (directory.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) fail(directory, error.value());
  for (int rank = 0; rank < ranks; ++rank) {
    auto& file = ranks_[static_cast<std::size_t>(rank)].file;
    file.reset(::open(path(rank).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
    if (!file) fail(path(rank), errno);
    if (rank == 0) check_space(file.get(), path(rank));
  }
}

std::string RankLogs::add(int rank, int stream, std::string_view bytes) {
  auto& log = ranks_[static_cast<std::size_t>(rank)];
  bool& in_backtrace = log.in_backtrace[stream == 2];
  log.cutters[stream == 2].feed(bytes, [&](std::string_view line) {
    in_backtrace = in_backtrace && line.starts_with(kFrameIndent);
    if (in_backtrace) return;
    in_backtrace = line.starts_with(kCrashedBy) && line.ends_with(kBacktraceFollows);
    if (log.last.size() == kLastLines) log.last.pop_front();
    log.last.push_back(in_backtrace ? shown_before(line) : readable(line));
  });
  log.cutters[stream == 2].keep_last_state();
  if (!log.file || write_failed_ || write_all(log.file.get(), bytes)) return {};
  write_failed_ = true;
  return fmt::format("cannot write {}: {}; the job continues, its log files stay as they are", path(rank),
                     errno_text(errno));
}

void RankLogs::start_attempt() {
  for (auto& log : ranks_) {
    log.last.clear();
    for (bool& in_backtrace : log.in_backtrace) in_backtrace = false;
    for (auto& cutter : log.cutters) cutter.finish([](std::string_view) {});
  }
}

std::vector<std::string> RankLogs::last_lines(int rank) const {
  const auto& log = ranks_[static_cast<std::size_t>(rank)];
  std::vector<std::string> lines(log.last.begin(), log.last.end());
  for (const auto& cutter : log.cutters)
    if (!last_state(cutter.partial()).empty()) lines.push_back(readable(cutter.partial()));
  if (lines.size() > kLastLines) lines.erase(lines.begin(), lines.end() - kLastLines);
  return lines;
}

std::string RankLogs::path(int rank) const {
  return directory_.empty() ? std::string() : fmt::format("{}/rank-{}.log", directory_, rank);
}

}  // namespace lockstep::launcher
