#include "launcher/hosts/remote_hosts.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

constexpr auto kLookEvery = Millis(200);
constexpr auto kOverdue = Millis(2500);  // pings go out every second
constexpr auto kAgentGrace = Millis(200);

}  // namespace

RemoteHosts::RemoteHosts(std::vector<std::unique_ptr<HostLink>> links, Clock::duration silence)
    : links_(std::move(links)), lost_(links_.size()), nonsense_(links_.size()), silence_(silence) {}

std::optional<std::size_t> RemoteHosts::find(const std::string& mpirun_name) const {
  const auto found =
      std::ranges::find_if(links_, [&](const auto& link) { return link->host().mpirun_name() == mpirun_name; });
  if (found == links_.end()) return std::nullopt;
  return static_cast<std::size_t>(found - links_.begin());
}

void RemoteHosts::add_entries(std::vector<pollfd>& entries, bool listen) {
  for (const auto& link : links_) {
    entries.resize(entries.size() + HostLink::kPollEntries);
    link->fill(std::span(entries).last<HostLink::kPollEntries>(), listen);
  }
}

void RemoteHosts::serve(std::span<const pollfd> entries, const Handler& handle) {
  for (std::size_t host = 0; host < links_.size(); ++host) {
    HostLink& link = *links_[host];
    try {
      link.serve(entries.subspan(HostLink::kPollEntries * host).first<HostLink::kPollEntries>());
      while (const auto message = link.next()) handle(host, *message);
    } catch (const MpiError& error) {
      nonsense_[host] = error.what();
      link.cut();
    }
  }
}

Clock::duration RemoteHosts::look_after() {
  if (links_.empty()) return Clock::duration::max();
  for (const auto& link : links_) link->ping();
  return kLookEvery;
}

std::vector<LostHost> RemoteHosts::take_lost() {
  std::vector<LostHost> lost;
  const auto now = Clock::now();
  for (std::size_t host = 0; host < links_.size(); ++host) {
    HostLink& link = *links_[host];
    if (lost_[host] || finishing_) continue;
    LostHost loss{.host = host,
                  .name = link.name(),
                  .last_heard = link.last_heard(),
                  .silent = false,
                  .why = {},
                  .ranks = {},
                  .directories = {link.ready.directory, link.ready.shm_directory}};
    if (link.gone()) {
      const auto exit_status = link.agent_exit_status();
      // The agent's exit status explains more, if it ends soon.
      if (!exit_status && now - link.last_heard() < kAgentGrace) continue;
      const auto words = link.last_words();
      loss.why = !nonsense_[host].empty() ? nonsense_[host]
                 : !words.empty()         ? words
                 : !exit_status           ? "it was closed"
                 : exit_status->how == ExitStatus::How::kSignalled
                     ? fmt::format("its agent was ended by {}", signal_name(exit_status->value))
                     : fmt::format("its agent ended with code {}", exit_status->exit_code());
    } else if (now - link.last_heard() > silence_) {
      loss.silent = true;
    } else {
      continue;
    }
    lost_[host] = true;
    link.cut();
    lost.push_back(std::move(loss));
  }
  return lost;
}

void RemoteHosts::send_all(const HostMessage& message) {
  for (const auto& link : links_) link->send(message);
}

void RemoteHosts::pause() { send_all(Pause{}); }

void RemoteHosts::resume() {
  for (const auto& link : links_) link->forgive_silence();
}

bool RemoteHosts::any_overdue() const {
  for (std::size_t host = 0; host < links_.size(); ++host)
    if (!lost_[host] && (links_[host]->gone() || Clock::now() - links_[host]->last_heard() > kOverdue)) return true;
  return false;
}

void RemoteHosts::finish() {
  if (!finishing_) send_all(Finish{});
  finishing_ = true;
}

Clock::time_point RemoteHosts::last_heard() const {
  auto last = Clock::time_point::min();
  for (const auto& link : links_)
    if (!link->gone()) last = std::max(last, link->last_heard());
  return last;
}

bool RemoteHosts::all_gone() const {
  return std::ranges::all_of(links_, [](const auto& link) { return link->gone(); });
}

}  // namespace lockstep::launcher
