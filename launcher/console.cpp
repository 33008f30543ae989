#include "launcher/console.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace lockstep::launcher {
namespace {

// The cursor rests at the live line's first column, so this erases all rows into which a terminal that became narrower
// may have broken it. It is written without wrapping: the terminal may be narrower already than the rank knows.
constexpr std::string_view kErase = "\r\x1b[J", kNoWrap = "\x1b[?7l", kWrapAndReturn = "\x1b[?7h\r";

bool same_file(int a, int b) {
  struct stat of_a, of_b;
  return ::fstat(a, &of_a) == 0 && ::fstat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

}  // namespace

OutputQueue::OutputQueue(int fd) : fd_(fd), is_terminal_(::isatty(fd) == 1) {
  struct stat found = {};
  if (::fstat(fd, &found) != 0) return;
  is_socket_ = S_ISSOCK(found.st_mode);
  // It may not be possible: another user's terminal, a pipe whose reader has gone.
  if (S_ISFIFO(found.st_mode) || is_terminal_)
    own_.reset(::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

std::size_t OutputQueue::drop() {
  const std::size_t dropped = size();
  bytes_.clear();
  start_ = 0;
  return dropped;
}

void OutputQueue::append(std::string_view bytes) {
  if (error_ == 0) bytes_.append(bytes);
}

void OutputQueue::write_some() {
  // A pipe that polls as writable takes PIPE_BUF bytes without blocking, and no more than that is certain.
  const std::size_t count = std::min<std::size_t>(size(), PIPE_BUF);
  const char* const bytes = bytes_.data() + start_;
  const ssize_t written =
      is_socket_ ? ::send(fd_, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL) : ::write(fd(), bytes, count);
  if (written < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (written < 0) {
    error_ = errno;
    drop();
    return;
  }
  start_ += static_cast<std::size_t>(written);
  if (start_ == bytes_.size() || start_ > (1u << 20)) {
    bytes_.erase(0, start_);
    start_ = 0;
  }
}

Console::Console(int ranks, bool prefix, int stdout_fd, int stderr_fd, std::size_t host_width)
    : digits_(prefix ? static_cast<int>(std::to_string(ranks - 1).size()) : 0),
      host_width_(host_width),
      hosts_(static_cast<std::size_t>(ranks)),
      plain_(static_cast<std::size_t>(ranks)),
      cutters_(2 * static_cast<std::size_t>(ranks)) {
  queues_.emplace_back(stdout_fd);
  if (!same_file(stdout_fd, stderr_fd)) queues_.emplace_back(stderr_fd);
}

std::size_t Console::backlog_bytes() const {
  std::size_t bytes = 0;
  for (const auto& queue : queues_) bytes += queue.size();
  return bytes;
}

void Console::add(int rank, int stream, std::string_view bytes) {
  auto& queue = queue_of(stream);
  auto& cutter = cutters_[2 * static_cast<std::size_t>(rank) + (stream == 2)];
  const std::string prefix = prefix_of(rank, stream);
  const bool live = rank == 0 && queue.is_terminal();
  cutter.feed(bytes, [&](std::string_view line) {
    if (live) live_.clear();
    print(queue, prefix, queue.is_terminal() ? last_state(line) : line);
  });
  if (queue.is_terminal()) cutter.keep_last_state();
  if (live && cutter.partial().find('\r') != std::string_view::npos) {
    erase_live();
    live_ = last_state(cutter.partial());
    live_stream_ = stream;
  }
  draw_live();
}

void Console::finish(int rank) {
  for (const int stream : {1, 2}) {
    auto& queue = queue_of(stream);
    cutters_[2 * static_cast<std::size_t>(rank) + (stream == 2)].finish([&](std::string_view line) {
      if (rank == 0) live_.clear();
      const auto shown = queue.is_terminal() ? last_state(line) : line;
      if (shown.empty()) return erase_live();  // a bar that was taken off at the end
      print(queue, prefix_of(rank, stream), shown);
    });
  }
  draw_live();
}

void Console::say(std::string_view text) {
  print(queue_of(2), "lockstep: ", text);
  draw_live();
}

int Console::live_columns() const {
  winsize size = {};
  const auto& out = queues_.front();
  if (!out.is_terminal() || ::ioctl(out.fd(), TIOCGWINSZ, &size) != 0) return 0;
  const int columns = size.ws_col > 0 ? size.ws_col : 80;
  return std::max(1, columns - prefix_columns());
}

std::string Console::terminal() const {
  char name[PATH_MAX];
  return ::ttyname_r(queues_.front().fd(), name, sizeof name) == 0 ? name : "";
}

void Console::set_host(int rank, const std::string& host) { hosts_[static_cast<std::size_t>(rank)] = host; }

std::string Console::prefix_of(int rank) const {
  if (digits_ == 0) return {};
  if (host_width_ == 0) return fmt::format("[{:{}}] ", rank, digits_);
  return fmt::format("[{:{}}@{:{}}] ", rank, digits_, hosts_[static_cast<std::size_t>(rank)], host_width_);
}

std::string Console::prefix_of(int rank, int stream) const {
  return stream == 1 && plain_[static_cast<std::size_t>(rank)] ? std::string() : prefix_of(rank);
}

void Console::print(OutputQueue& queue, std::string_view prefix, std::string_view line) {
  erase_live();
  queue.append(prefix);
  queue.append(line);
  queue.append("\n");
}

void Console::erase_live() {
  if (live_shown_) queue_of(live_stream_).append(kErase);
  live_shown_ = false;
}

void Console::draw_live() {
  if (live_.empty() || live_shown_) return;
  auto& queue = queue_of(live_stream_);
  queue.append(kNoWrap);
  queue.append(prefix_of(0));
  queue.append(live_);
  queue.append(kWrapAndReturn);
  live_shown_ = true;
}

}  // namespace lockstep::launcher
