// What the supervisor hears of other hosts.
#include <algorithm>
#include <csignal>

#include "base/error.h"
#include "launcher/supervisor.h"

namespace lockstep::launcher {
namespace {

/// The signal that ended a program, or as a shell reports it; 0 if none did.
int signal_of(ExitStatus exit_status) {
  if (exit_status.how == ExitStatus::How::kSignalled) return exit_status.value;
  const bool by_shell =
      exit_status.how == ExitStatus::How::kExited && exit_status.value > 128 && exit_status.value <= 128 + SIGSYS;
  return by_shell ? exit_status.value - 128 : 0;
}

}  // namespace

void Supervisor::start_daemon(Connection& connection, const StartDaemon& start) {
  connection.starts = hosts_.find(start.host);
  if (!connection.starts)
    throw MpiError(fmt::format("mpirun wants to start its daemon on {}, which is no host of this job", start.host));
  hosts_.send(*connection.starts, Run{start.command});
}

/// What a helper says.
void Supervisor::serve_host(std::size_t host, const HostMessage& message) {
  const auto with_connection = [&](std::uint32_t id, const auto& act) {
    const auto found = std::ranges::find_if(connections_, [&](const Connection& connection) {
      return connection.link && connection.link->host == host && connection.link->id == id && !connection.closed();
    });
    if (found != connections_.end()) act(*found);
  };
  const auto tell_starter = [&](const Message& news) {
    for (auto& connection : connections_)
      if (connection.starts == host && !connection.closed()) send(connection, news);
  };
  std::visit(Overloaded{
                 [&](const ConnectionOpened& opened) {
                   connections_.emplace_back(RemoteWire{host, opened.id});
                 },
                 [&](const FromRank& from) {
                   with_connection(from.id, [&](Connection& connection) {
                     connection.link->decoder.feed(from.bytes);
                     while (const auto said = connection.link->decoder.next()) handle(connection, *said);
                   });
                 },
                 [&](const ConnectionClosed& it) { with_connection(it.id, [&](Connection& each) { close(each); }); },
                 [&](const Notice& notice) { console_.say(notice.text); },
                 [&](const RunOutput& output) {
                   if (!processes_.are_mpirun() && on_starter_output_) on_starter_output_(output.bytes);
                   tell_starter(Output{2, output.bytes});
                 },
                 [&](const RankEnded& ended) {
                   processes_.end_remote(host, ended.rank, ended.exit_status);
                   collect_processes();
                 },
                 [&](const RunEnded& ended) {
                   tell_starter(Ended{ended.exit_status, false, Clock::now()});
                   const int signal_number = signal_of(ended.exit_status);
                   if (!daemon_end_ && signal_number != 0 && !processes_.were_killed())
                     daemon_end_ = DaemonEnd{hosts_.name(host), signal_number};
                 },
                 [](const auto&) {},
             },
             message);
}

void Supervisor::lose_hosts() {
  for (auto& lost : hosts_.take_lost()) {
    for (auto& connection : connections_) {
      if (!connection.link || connection.link->host != lost.host || connection.closed()) continue;
      connection.link->closed = true;
      if (connection.rank < 0) continue;
      console_.finish(connection.rank);
      auto& report = reports_[static_cast<std::size_t>(connection.rank)];
      if (report.ended()) continue;
      lose(report, lost.last_heard, lost.last_heard);
    }
    for (const auto& report : reports_)
      if (host_of_[static_cast<std::size_t>(report.rank)] == lost.host) lost.ranks.push_back(report.rank);
    processes_.lose_host(lost.host);
    lost_hosts_.push_back(std::move(lost));
    begin_ending();
    collect_processes();
  }
}

}  // namespace lockstep::launcher
