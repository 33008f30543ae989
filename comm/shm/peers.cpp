#include "comm/shm/peers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/error.h"
#include "base/kernel.h"
#include "base/log.h"
#include "comm/flight.h"
#include "comm/shm/sockets.h"
#include "devices/cpus.h"
#include "lockstep/base/env.h"

namespace lockstep::comm {
namespace {

struct Introduction {
  std::array<char, 64> host{};
  std::array<char, 48> kernel{};  // of this start of it
  std::array<char, 64> spaces{};  // what of it this process sees
  int pid = 0;
  devices::CpuMask cpus;
  SocketSetting sockets;
  int socket = -1;
};
static_assert(std::is_trivially_copyable_v<Introduction>);

template <std::size_t N>
void put(const std::string& text, std::array<char, N>& into) {
  text.copy(into.data(), into.size() - 1);
}

}  // namespace

Peers::Peers(Store& store, Deadline deadline, bool oversubscribed) : job_ranks_(store.job_ranks()) {
  Introduction mine;
  put(host_name(), mine.host);
  put(boot_id(), mine.kernel);
  put(namespace_id("pid") + namespace_id("net"), mine.spaces);
  mine.pid = ::getpid();
  mine.cpus = devices::allowed_cpus();
  mine.sockets = SocketSetting::from(env);
  if (mine.sockets.by_processors) mine.socket = socket_of(mine.cpus);
  std::vector<Introduction> all;
  const std::string_view text(reinterpret_cast<const char*>(&mine), sizeof mine);
  for (const std::string& bytes : store.all_gather_text("rendezvous of the ranks", text, deadline)) {
    if (bytes.size() != sizeof mine)
      throw OutOfStepError("a rank introduces itself in another format", "start every rank with the same binary");
    std::memcpy(&all.emplace_back(), bytes.data(), sizeof mine);
  }
  const auto same_host = [](const Introduction& a, const Introduction& b) {
    return a.host == b.host && a.kernel == b.kernel && a.spaces == b.spaces;
  };
  // Hosts that are one machine share its cores all the same.
  devices::CpuMask cpus;
  std::vector<int> neighbours;
  for (std::size_t r = 0; r < all.size(); ++r) {
    auto host = std::find_if(hosts_.begin(), hosts_.end(), [&](const std::vector<int>& ranks) {
      return same_host(all[static_cast<std::size_t>(ranks.front())], all[r]);
    });
    if (host == hosts_.end()) host = hosts_.emplace(hosts_.end());
    host->push_back(static_cast<int>(r));
    peers_.push_back({all[r].host.data(), all[r].pid, static_cast<int>(host - hosts_.begin()), UniqueFd()});
    if (all[r].kernel != mine.kernel) continue;
    cpus |= all[r].cpus;
    neighbours.push_back(static_cast<int>(r));
  }
  if (hosts_.size() > 1) elsewhere_ = hosts_[1].front();
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].sockets != mine.sockets)
      throw OutOfStepError(fmt::format("rank {} has another LOCKSTEP_SHM_SOCKETS than this one", r),
                           "set it for all ranks alike");
    if (mine.sockets.parts > 1)
      sockets_.push_back(static_cast<int>(r * static_cast<std::size_t>(mine.sockets.parts) / all.size()));
    else if (mine.sockets.by_processors)
      sockets_.push_back(all[r].socket);
  }
  if (std::ranges::find(sockets_, -1) != sockets_.end()) {
    if (store.rank() == 0 && hosts_.size() == 1)
      log_warn(
          "LOCKSTEP_SHM_SOCKETS=auto has no effect: a rank may run on several sockets → bind ranks to cores or "
          "sockets");
    sockets_.clear();
  }
  oversubscribed_ = oversubscribed || cpus.count() < neighbours.size();
  if (oversubscribed_ && job_ranks_.are_all() && store.rank() == neighbours.front())
    devices::warn_of_crowd(static_cast<int>(neighbours.size()), cpus);
}

std::string Peers::name_of(int rank) const {
  return job_ranks_.text(rank, fmt::format("host {}", peers_[static_cast<std::size_t>(rank)].host));
}

std::string Peers::full_name_of(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  return job_ranks_.text(rank, fmt::format("host {}, pid {}", peer.host, peer.pid));
}

void Peers::watch(int own_rank) {
  for (const int rank : hosts_[static_cast<std::size_t>(host_of(own_rank))])
    if (rank != own_rank)
      peers_[static_cast<std::size_t>(rank)].process.reset(
          static_cast<int>(::syscall(SYS_pidfd_open, peers_[static_cast<std::size_t>(rank)].pid, 0)));
}

void Peers::throw_ended(int rank, const std::string& waiting_in) const {
  const int in_job = job_ranks_.of(rank);
  if (!waiting_in.empty()) give_up_on({&in_job, 1});
  throw DeviceError(fmt::format("{} has ended{}{}", full_name_of(rank),
                                waiting_in.empty() ? "" : ", and this rank waits for it in ", waiting_in),
                    fmt::format("look at the log of rank {}", in_job));
}

bool Peers::has_ended(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.process) return ::kill(peer.pid, 0) != 0 && errno == ESRCH;
  pollfd look{peer.process.get(), POLLIN, 0};
  return ::poll(&look, 1, 0) == 1;
}

}  // namespace lockstep::comm
