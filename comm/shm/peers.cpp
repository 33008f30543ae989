#include "comm/shm/peers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/error.h"
#include "base/host.h"
#include "comm/cpus.h"

namespace lockstep::comm {
namespace {

struct Introduction {
  std::array<char, 64> host{};
  int pid = 0;
  CpuMask cpus;
};
static_assert(std::is_trivially_copyable_v<Introduction>);

}  // namespace

Peers::Peers(Store& store, Deadline deadline) {
  Introduction mine;
  const std::string host = host_name();
  host.copy(mine.host.data(), mine.host.size() - 1);
  mine.pid = ::getpid();
  mine.cpus = allowed_cpus();
  CpuMask cpus;
  const std::string_view text(reinterpret_cast<const char*>(&mine), sizeof mine);
  for (const std::string& bytes : store.all_gather_text("meeting the other ranks", text, deadline)) {
    Introduction theirs;
    if (bytes.size() != sizeof theirs)
      throw OutOfStepError("a rank introduces itself as this one does not", "start every rank with the same binary");
    std::memcpy(&theirs, bytes.data(), sizeof theirs);
    peers_.push_back({theirs.host.data(), theirs.pid, UniqueFd()});
    cpus |= theirs.cpus;
    if (elsewhere_ < 0 && peers_.back().host != peers_.front().host) elsewhere_ = static_cast<int>(peers_.size()) - 1;
  }
  oversubscribed_ = cpus.count() < peers_.size();
  if (oversubscribed_ && elsewhere_ < 0 && store.rank() == 0) warn_of_crowd(static_cast<int>(peers_.size()), cpus);
}

std::string Peers::name_of(int rank) const {
  return fmt::format("rank {} (host {})", rank, peers_[static_cast<std::size_t>(rank)].host);
}

std::string Peers::full_name_of(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  return fmt::format("rank {} (host {}, pid {})", rank, peer.host, peer.pid);
}

void Peers::watch(int own_rank) {
  for (std::size_t r = 0; r < peers_.size(); ++r)
    if (static_cast<int>(r) != own_rank)
      peers_[r].process.reset(static_cast<int>(::syscall(SYS_pidfd_open, peers_[r].pid, 0)));
}

bool Peers::has_ended(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.process) return ::kill(peer.pid, 0) != 0 && errno == ESRCH;
  pollfd look{peer.process.get(), POLLIN, 0};
  return ::poll(&look, 1, 0) == 1;
}

}  // namespace lockstep::comm
