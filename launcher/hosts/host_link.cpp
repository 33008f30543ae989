#include "launcher/hosts/host_link.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>

#include "base/text.h"

namespace lockstep::launcher {
namespace {

constexpr auto kPingEvery = Millis(1000);
// A better reading of the other clock may be older than this only by chance; clocks drift.
constexpr auto kClockReadingLasts = std::chrono::seconds(60);
constexpr std::size_t kSaidBytes = 16 * 1024;
constexpr std::size_t kTextBytes = 256 * 1024;

/// Keeps the end of what is more than `most`.
void append_bounded(std::string& text, std::string_view more, std::size_t most) {
  text.append(more);
  if (text.size() > 2 * most) text.erase(0, text.size() - most);
}

struct Ends {
  UniqueFd read, write;
};

Ends make_pipe() {
  int ends[2];
  check_system(::pipe2(ends, O_CLOEXEC) == 0, "making a pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::int64_t nanoseconds_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

HostLink::HostLink(HostSpec host, const RemoteAgent& agent, const std::string& self)
    : host_(std::move(host)), agent_name_(std::filesystem::path(agent.argv.front()).filename()), program_(self) {
  Ends to = make_pipe(), from = make_pipe(), errors = make_pipe();
  SpawnRequest request;
  request.argv = remote_command(agent, host_, shell_word(self) + " _host");
  request.stdin_fd = to.read.get();
  request.stdout_fd = from.write.get();
  request.stderr_fd = errors.write.get();
  const Spawned spawned = spawn(request);
  agent_ = spawned.pid;
  if (agent_ < 0) {
    exit_status_ = ExitStatus{ExitStatus::How::kNotStarted, spawned.error};
    return;
  }
  pipe_ = BytePipe(std::move(from.read), std::move(to.write));
  errors_ = BytePipe(std::move(errors.read), UniqueFd());
}

HostLink::~HostLink() { cut(); }

void HostLink::cut() {
  pipe_.close();
  if (exit_status_) return;
  // An agent that is a script may have started others.
  ::kill(-agent_, SIGKILL);
  ::kill(agent_, SIGKILL);
  int status = 0;
  while (::waitpid(agent_, &status, 0) < 0 && errno == EINTR) {
  }
  exit_status_ = exit_status_of(status);
}

void HostLink::fill(std::span<pollfd, kPollEntries> entries, bool listen) {
  if (!listen) forgive_silence();
  entries[0] = {listen ? pipe_.in() : -1, POLLIN, 0};
  entries[1] = {pipe_.pending_bytes() > 0 ? pipe_.out() : -1, POLLOUT, 0};
  entries[2] = {errors_.in(), POLLIN, 0};
}

void HostLink::serve(std::span<const pollfd, kPollEntries> entries) {
  if (entries[1].revents != 0) pipe_.flush();
  if (entries[2].revents != 0) append_bounded(said_, errors_.receive(), kSaidBytes);
  if (entries[0].revents == 0) return;
  const std::string_view bytes = pipe_.receive();
  if (bytes.empty()) return;
  last_heard_ = Clock::now();
  silent_since_ = RunningClock::now();
  greeting_ ? decoder_.feed(bytes) : take_text(bytes);
}

void HostLink::take_text(std::string_view bytes) {
  append_bounded(text_, bytes, kTextBytes);
  for (auto end = text_.find('\n'); end != std::string::npos; end = text_.find('\n')) {
    greeting_ = parse_greeting(std::string_view(text_).substr(0, end));
    text_.erase(0, end + 1);
    if (!greeting_) continue;
    decoder_.feed(text_);
    text_.clear();
    return;
  }
}

void HostLink::ping() {
  const auto now = Clock::now();
  if (now < next_ping_ || gone()) return;
  next_ping_ = now + kPingEvery;
  send(Ping{nanoseconds_of(now)});
}

std::optional<HostMessage> HostLink::next() {
  while (auto message = decoder_.next()) {
    const auto* pong = std::get_if<Pong>(&*message);
    if (pong == nullptr) return message;
    take_pong(*pong);
  }
  return std::nullopt;
}

void HostLink::take_pong(const Pong& pong) {
  const auto now = Clock::now();
  const auto sent = Clock::time_point(std::chrono::nanoseconds(pong.launcher_ns));
  const auto round_trip = now - sent;
  if (round_trip > best_round_trip_ && now - clock_read_at_ < kClockReadingLasts) return;
  best_round_trip_ = round_trip;
  clock_read_at_ = now;
  clock_ahead_ = Clock::time_point(std::chrono::nanoseconds(pong.helper_ns)) - (sent + round_trip / 2);
}

std::optional<ExitStatus> HostLink::agent_exit_status() {
  int status = 0;
  if (!exit_status_ && ::waitpid(agent_, &status, WNOHANG) == agent_) exit_status_ = exit_status_of(status);
  return exit_status_;
}

std::string HostLink::explain_failure() {
  while (errors_.in() >= 0) {
    const auto more = errors_.receive();
    if (more.empty()) break;
    append_bounded(said_, more, kSaidBytes);
  }
  return explain({host_, agent_name_, program_, exit_status_.value_or(ExitStatus{}), said_});
}

}  // namespace lockstep::launcher
