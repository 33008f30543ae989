#include "launcher/hosts/remote_hosts.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

constexpr auto kLookEvery = Millis(200);
constexpr auto kOverdue = Millis(2500);  // pings go out every second
/// From the end of a connection to that of the agent, whose exit code explains it.
constexpr auto kAgentGrace = Millis(200);
constexpr auto kAgentEnds = Millis(500);
constexpr double kAnswerSeconds = 10;
constexpr auto kFirstPause = std::chrono::seconds(1);
/// A host that answers although its ranks fail is tried again after half a minute at the earliest.
constexpr int kFailuresOfBroken = 6;
constexpr auto kLongestPause = std::chrono::seconds(60);
/// For the ends of helpers that have nothing left to do.
constexpr auto kHelpersEnd = std::chrono::seconds(4);

std::string why_it_ended(const HostLink& link, std::optional<ExitStatus> exit_status) {
  if (const auto words = link.last_words(); !words.empty()) return words;
  if (!exit_status) return "it was closed";
  if (exit_status->how == ExitStatus::How::kSignalled)
    return fmt::format("its agent was ended by {}", signal_name(exit_status->value));
  return fmt::format("its agent ended with code {}", exit_status->exit_code());
}

}  // namespace

RemoteHosts::RemoteHosts(const std::vector<HostSpec>& hosts, const std::vector<bool>& is_own, Setup setup)
    : setup_(std::move(setup)) {
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    Host& host = hosts_.emplace_back(Host{.spec = hosts[i]});
    if (is_own[i]) {
      host.state = State::kOwn;
      host.greeting = setup_.own;
    } else {
      call(host);
    }
  }
}

std::optional<std::size_t> RemoteHosts::find(const std::string& mpirun_name) const {
  for (std::size_t i = 0; i < hosts_.size(); ++i)
    if (takes_part(i) && hosts_[i].spec.mpirun_name() == mpirun_name) return i;
  return std::nullopt;
}

bool RemoteHosts::is_there(std::size_t host) const {
  const State state = hosts_[host].state;
  return state == State::kOwn || state == State::kIdle || state == State::kTakesPart;
}

void RemoteHosts::dismiss(std::size_t host, std::string problem) {
  hosts_[host].link.reset();
  hosts_[host].state = State::kDismissed;
  hosts_[host].problem = std::move(problem);
}

void RemoteHosts::call(Host& host) {
  host.called_at = Clock::now();
  try {
    host.link = std::make_unique<HostLink>(host.spec, *setup_.agent, setup_.self);
    host.state = State::kCalled;
  } catch (const DeviceError& error) {
    // This host has no pipe or process left now, which is no reason to end a job that runs.
    exclude_host(host, error.line());
  }
}

/// Whether it has answered, and as it should.
void RemoteHosts::look_at_call(Host& host) {
  HostLink& link = *host.link;
  if (link.greeting()) {
    host.greeting = *link.greeting();
    if (const auto other = difference(host.greeting, setup_.own); !other.empty())
      return exclude_host(host, other + " → install the same build on every host");
    host.problem.clear();
    host.state = State::kIdle;
  } else if (link.gone()) {
    // Wait for the exit code, which explains more; but not for an agent that stays although its output has ended.
    if (link.agent_exit_status() || link.silence() > kAgentEnds) exclude_host(host, link.explain_failure());
  } else if (Clock::now() - host.called_at > duration_of(kAnswerSeconds)) {
    const auto words = link.last_words();
    exclude_host(host, fmt::format("it did not answer within {} s{} → is it up, and can you log in without a password?",
                                   kAnswerSeconds, words.empty() ? "" : fmt::format(" ({})", words)));
  }
}

/// Ends the connection to `host` and counts a failure; it is called again at once after the first, later after more.
void RemoteHosts::exclude_host(Host& host, std::string problem) {
  host.link.reset();
  host.state = State::kAway;
  host.problem = std::move(problem);
  ++host.failures;
  host.call_at = Clock::now();
  if (host.failures < 2) return;
  host.call_at += std::min<Clock::duration>(kFirstPause * (1 << std::min(host.failures - 2, 16)), kLongestPause);
}

void RemoteHosts::fail(std::size_t host, std::string problem) { exclude_host(hosts_[host], std::move(problem)); }

void RemoteHosts::leave_out(std::size_t host, std::string problem) {
  hosts_[host].failures = std::max(hosts_[host].failures, kFailuresOfBroken);
  fail(host, std::move(problem));
}

void RemoteHosts::forget_failures() {
  for (auto& host : hosts_)
    if (host.state == State::kTakesPart) host.failures = 0;
}

void RemoteHosts::begin(std::size_t host, const JobSetup& setup) {
  concluding_ = false;
  hosts_[host].state = State::kTakesPart;
  hosts_[host].ready = {};
  send(host, setup);
}

bool RemoteHosts::any_takes_part() const {
  return std::ranges::any_of(hosts_, [](const Host& host) { return host.state == State::kTakesPart; });
}

void RemoteHosts::add_entries(std::vector<pollfd>& entries, bool listen) {
  for (const auto& host : hosts_) {
    entries.resize(entries.size() + HostLink::kPollEntries, pollfd{-1, 0, 0});
    if (host.link) host.link->fill(std::span(entries).last<HostLink::kPollEntries>(), listen);
  }
}

void RemoteHosts::serve(std::span<const pollfd> entries, const Handler& handle) {
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    Host& host = hosts_[i];
    if (!host.link) continue;
    try {
      host.link->serve(entries.subspan(HostLink::kPollEntries * i).first<HostLink::kPollEntries>());
      if (host.state == State::kCalled) look_at_call(host);
      // What is said to an attempt that has ended is for nobody.
      while (host.link) {
        const auto message = host.link->next();
        if (!message) break;
        if (std::holds_alternative<Concluded>(*message))
          host.state = State::kIdle;
        else if (host.state == State::kTakesPart)
          handle(i, *message);
      }
    } catch (const MpiError& error) {
      host.problem = error.what();
      host.link->cut();
    }
  }
}

Clock::duration RemoteHosts::look_after() {
  bool any = false;
  for (auto& host : hosts_) {
    if (host.state == State::kAway && keeps_calling_) {
      any = true;
      if (Clock::now() >= host.call_at) call(host);
    }
    if (!host.link) continue;
    any = true;
    if (host.state == State::kCalled) {
      look_at_call(host);
      continue;
    }
    host.link->ping();
    // One that takes part is for take_lost().
    if (host.state != State::kIdle) continue;
    if (host.link->gone())
      exclude_host(host, why_it_ended(*host.link, host.link->agent_exit_status()));
    else if (is_silent(host))
      exclude_host(host, "it fell silent");
  }
  return any ? kLookEvery : Clock::duration::max();
}

std::vector<LostHost> RemoteHosts::take_lost() {
  std::vector<LostHost> lost;
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    Host& host = hosts_[i];
    if (host.state != State::kTakesPart) continue;
    HostLink& link = *host.link;
    LostHost loss{.host = i,
                  .name = host.spec.name,
                  .last_heard = link.last_heard(),
                  .silent = false,
                  .why = {},
                  .ranks = {},
                  .directories = {host.ready.directory, host.ready.shm_directory}};
    if (link.gone()) {
      const auto exit_status = link.agent_exit_status();
      // The agent's exit status explains more, if it ends soon.
      if (!exit_status && link.silence() < kAgentGrace) continue;
      loss.why = !host.problem.empty() ? host.problem : why_it_ended(link, exit_status);
    } else if (is_silent(host)) {
      loss.silent = true;
    } else {
      continue;
    }
    exclude_host(host, loss.silent ? "it fell silent" : loss.why);
    if (!concluding_) lost.push_back(std::move(loss));
  }
  return lost;
}

Clock::time_point RemoteHosts::to_local(std::size_t host, Clock::time_point there) const {
  return hosts_[host].link ? hosts_[host].link->to_local(there) : there;
}

void RemoteHosts::send(std::size_t host, const HostMessage& message) {
  if (hosts_[host].link) hosts_[host].link->send(message);
}

void RemoteHosts::send_all(const HostMessage& message) {
  for (const auto& host : hosts_)
    if (host.state == State::kTakesPart) host.link->send(message);
}

void RemoteHosts::pause() {
  for (const auto& host : hosts_)
    if (host.link && host.link->greeting()) host.link->send(Pause{});
}

void RemoteHosts::resume() {
  for (const auto& host : hosts_)
    if (host.link) host.link->forgive_silence();
}

bool RemoteHosts::any_overdue() const {
  return std::ranges::any_of(hosts_, [](const Host& host) {
    return host.state == State::kTakesPart && (host.link->gone() || host.link->silence() > kOverdue);
  });
}

void RemoteHosts::conclude() {
  if (!concluding_) send_all(Conclude{});
  concluding_ = true;
}

Clock::time_point RemoteHosts::last_heard() const {
  auto last = Clock::time_point::min();
  for (const auto& host : hosts_)
    if (host.state == State::kTakesPart) last = std::max(last, host.link->last_heard());
  return last;
}

void RemoteHosts::end_attempt() {
  for (auto& host : hosts_)
    if (host.state == State::kTakesPart) exclude_host(host, "it did not clean up in time");
}

void RemoteHosts::finish() {
  keeps_calling_ = false;
  for (auto& host : hosts_) {
    if (host.state == State::kCalled) host.link.reset();
    if (host.link) host.link->send(Finish{});
  }
  const auto give_up_at = Clock::now() + kHelpersEnd;
  const auto is_open = [](const Host& host) { return host.link && !host.link->gone(); };
  while (Clock::now() < give_up_at && std::ranges::any_of(hosts_, is_open)) {
    std::vector<pollfd> entries;
    add_entries(entries, true);
    ::poll(entries.data(), entries.size(), static_cast<int>(kLookEvery.count()));
    for (std::size_t i = 0; i < hosts_.size(); ++i)
      if (hosts_[i].link)
        hosts_[i].link->serve(
            std::span<const pollfd>(entries).subspan(HostLink::kPollEntries * i).first<HostLink::kPollEntries>());
  }
}

}  // namespace lockstep::launcher
