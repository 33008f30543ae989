#include "base/status_report.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep {
namespace {

struct Header {
  StatusReport::Kind kind;
  std::uint8_t ranks;
  std::uint16_t text_bytes;
  std::int32_t number;
  std::int64_t step;
  double seconds;
};
static_assert(sizeof(Header) == 24, "no padding, which would be sent");

bool is_inode(int fd, const std::string& inode) {
  struct stat found = {};
  return ::fstat(fd, &found) == 0 && std::to_string(found.st_ino) == inode;
}

/// Where the messages go; fd -1 where nobody listens.
struct Listener {
  int fd = -1;
  bool has_stderr = false;

  Listener() {
    const auto words = split(env(kStatusVariable).value_or(""), ':');
    const auto number = words.size() == 3 ? parse_int(words[0]) : std::nullopt;
    if (!number || *number <= STDERR_FILENO || *number > 1 << 20) return;
    const int given = static_cast<int>(*number);
    if (!is_inode(given, words[1])) return;
    ::fcntl(given, F_SETFD, FD_CLOEXEC);  // a program that this one starts is no rank
    fd = given;
    has_stderr = is_inode(STDERR_FILENO, words[2]);
  }
};

const Listener& listener() {
  static const Listener made;
  return made;
}

}  // namespace

std::string encode_status(const StatusReport& report) {
  const auto ranks = std::span(report.ranks).first(std::min(report.ranks.size(), StatusReport::kMaxRanks));
  const std::string_view text = utf8_prefix(report.text, StatusReport::kMaxTextBytes);
  const Header header = {report.kind,
                         static_cast<std::uint8_t>(ranks.size()),
                         static_cast<std::uint16_t>(text.size()),
                         report.number,
                         report.step,
                         report.seconds};
  std::string bytes(sizeof header + ranks.size_bytes(), '\0');
  std::memcpy(bytes.data(), &header, sizeof header);
  if (!ranks.empty()) std::memcpy(bytes.data() + sizeof header, ranks.data(), ranks.size_bytes());
  bytes += text;
  return bytes;
}

std::optional<StatusReport> decode_status(std::string_view bytes) {
  Header header;
  if (bytes.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof header);
  const std::size_t rank_bytes = header.ranks * sizeof(std::int32_t);
  if (header.kind < StatusReport::Kind::kDefersStops || header.kind > StatusReport::Kind::kComputesWrongly ||
      header.ranks > StatusReport::kMaxRanks || header.text_bytes > StatusReport::kMaxTextBytes ||
      bytes.size() != sizeof header + rank_bytes + header.text_bytes || !std::isfinite(header.seconds))
    return std::nullopt;
  StatusReport report{.kind = header.kind, .number = header.number, .step = header.step, .seconds = header.seconds};
  report.ranks.resize(header.ranks);
  if (rank_bytes > 0) std::memcpy(report.ranks.data(), bytes.data() + sizeof header, rank_bytes);
  report.text = bytes.substr(sizeof header + rank_bytes);
  return report;
}

std::optional<StatusReport> parse_status_line(std::string_view line) {
  using Kind = StatusReport::Kind;
  if (line == "done") return StatusReport{.kind = Kind::kDone};
  if (line == "rejoins") return StatusReport{.kind = Kind::kRejoins};
  if (line == "computes wrongly") return StatusReport{.kind = Kind::kComputesWrongly};
  const auto blank = line.find(' ');
  if (blank == std::string_view::npos) return std::nullopt;
  const std::string_view word = line.substr(0, blank);
  const auto step = parse_int(std::string(line.substr(blank + 1)));
  const bool stranded = word == "stranded";
  if ((word != "progress" && word != "checkpointed" && !stranded) || !step || *step < (stranded ? -1 : 0))
    return std::nullopt;
  if (stranded) return StatusReport{.kind = Kind::kStranded, .step = *step};
  return StatusReport{.kind = word == "progress" ? Kind::kProgress : Kind::kCheckpointed, .step = *step};
}

bool report_status(const StatusReport& report) noexcept {
  try {
    const int fd = listener().fd;
    if (fd < 0) return false;
    const std::string bytes = encode_status(report);
    ssize_t sent;
    do sent = ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == static_cast<ssize_t>(bytes.size());
  } catch (...) {
    return false;  // no memory left: the reported work continues without it
  }
}

std::string encode_place(const Place& place) {
  std::string bytes;
  for (const auto& [name, value] : place) bytes += fmt::format("{}={}", name, value) + '\0';
  return bytes;
}

std::optional<Place> decode_place(std::string_view bytes) {
  Place place;
  while (!bytes.empty()) {
    const auto end = bytes.find('\0'), equals = bytes.find('=');
    if (end == std::string_view::npos || equals == 0 || equals > end) return std::nullopt;
    place.emplace_back(bytes.substr(0, equals), bytes.substr(equals + 1, end - equals - 1));
    bytes.remove_prefix(end + 1);
  }
  return place;
}

std::optional<Place> wait_for_place(FunctionRef<bool()> gives_up) {
  constexpr int kLookEveryMs = 10;
  constexpr std::size_t kMostBytes = 1 << 16;
  std::string bytes(kMostBytes, '\0');
  while (listener().fd >= 0 && !gives_up()) {
    pollfd look{listener().fd, POLLIN, 0};
    if (::poll(&look, 1, kLookEveryMs) <= 0) continue;
    const ssize_t got = ::recv(listener().fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) return std::nullopt;
    if (auto place = decode_place(std::string_view(bytes).substr(0, static_cast<std::size_t>(got)))) return place;
  }
  return std::nullopt;
}

namespace {

// Of this process; a step of training is one thread's at a time.
struct ProgressReport {
  std::mutex mutex;
  std::optional<std::int64_t> unsent;
  Clock::time_point next{};
};
constexpr auto kProgressEvery = std::chrono::milliseconds(100);

ProgressReport& progress_report() {
  static ProgressReport made;
  return made;
}

}  // namespace

void report_progress(std::int64_t step) noexcept {
  try {
    if (listener().fd < 0) return;
    ProgressReport& progress = progress_report();
    const std::lock_guard lock(progress.mutex);
    const auto now = Clock::now();
    progress.unsent = step;
    if (now < progress.next) return;
    progress.next = now + kProgressEvery;
    if (report_status({.kind = StatusReport::Kind::kProgress, .step = step})) progress.unsent.reset();
  } catch (...) {
    return;
  }
}

void flush_progress() noexcept {
  try {
    ProgressReport& progress = progress_report();
    const std::lock_guard lock(progress.mutex);
    if (!progress.unsent) return;
    report_status({.kind = StatusReport::Kind::kProgress, .step = *progress.unsent});
    progress.unsent.reset();
  } catch (...) {
    return;
  }
}

void report_missing_ranks(std::span<const int> ranks) noexcept {
  try {
    report_status({.kind = StatusReport::Kind::kMissingRanks, .ranks = {ranks.begin(), ranks.end()}});
  } catch (...) {
    return;
  }
}

bool report_usage_error(const std::string& line) noexcept {
  try {
    return listener().has_stderr && report_status({.kind = StatusReport::Kind::kUsageError, .text = line});
  } catch (...) {
    return false;
  }
}

}  // namespace lockstep
