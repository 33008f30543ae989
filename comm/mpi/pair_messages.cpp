#include "comm/mpi/pair_messages.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/mpi/transfers.h"
#include "comm/pairs.h"

namespace lockstep::comm {
namespace {

constexpr int kTag = 0;

}  // namespace

PairMessages::~PairMessages() {
  for (Peer& peer : peers_) {
    if (peer.outgoing != MPI_REQUEST_NULL) keep_for_mpi(std::move(peer.out));
    if (peer.incoming != MPI_REQUEST_NULL) keep_for_mpi(std::move(peer.in));
  }
}

PairMessages::Peer& PairMessages::peer(int rank) {
  if (peers_.empty()) peers_.resize(static_cast<std::size_t>(session_.size()));
  return peers_[static_cast<std::size_t>(rank)];
}

std::size_t PairMessages::write_some(int to, std::span<const std::byte> header, std::span<const std::byte> values) {
  if (!is_flushed(to)) return 0;
  Peer& peer = this->peer(to);
  if (peer.out == nullptr) peer.out = std::make_shared<std::byte[]>(kMessageBytes);
  const std::size_t count = join_some(header, values, {peer.out.get(), kMessageBytes});
  check_mpi(MPI_Isend(peer.out.get(), static_cast<int>(count), MPI_BYTE, to, kTag, session_.pairs(), &peer.outgoing),
            "sending to another rank");
  return count;
}

bool PairMessages::is_flushed(int to) {
  Peer& peer = this->peer(to);
  int sent = 1;
  if (peer.outgoing != MPI_REQUEST_NULL)
    check_mpi(MPI_Test(&peer.outgoing, &sent, MPI_STATUS_IGNORE), "sending to another rank");
  return sent != 0;
}

std::size_t PairMessages::read_some(int from, std::span<std::byte> bytes) {
  Peer& peer = this->peer(from);
  if (peer.begin == peer.end) receive(peer, from);
  const std::size_t count = std::min(bytes.size(), peer.end - peer.begin);
  if (count > 0) std::memcpy(bytes.data(), peer.in.get() + peer.begin, count);
  peer.begin += count;
  return count;
}

/// What is probed may be the announcement of a long message whose bytes are yet to come. A receive is started only
/// then, so that none is under way at the end.
void PairMessages::receive(Peer& peer, int from) {
  constexpr const char* kDoing = "receiving from another rank";
  int there = 0, bytes = 0;
  MPI_Status status;
  if (peer.incoming == MPI_REQUEST_NULL) {
    check_mpi(MPI_Iprobe(from, kTag, session_.pairs(), &there, MPI_STATUS_IGNORE), kDoing);
    if (there == 0) return;
    if (peer.in == nullptr) peer.in = std::make_shared<std::byte[]>(kMessageBytes);
    check_mpi(MPI_Irecv(peer.in.get(), static_cast<int>(kMessageBytes), MPI_BYTE, from, kTag, session_.pairs(),
                        &peer.incoming),
              kDoing);
  }
  check_mpi(MPI_Test(&peer.incoming, &there, &status), kDoing);
  if (there == 0) return;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), kDoing);
  LOCKSTEP_ASSERT(bytes >= 0, "a message of {} bytes", bytes);
  peer.begin = 0;
  peer.end = static_cast<std::size_t>(bytes);
}

}  // namespace lockstep::comm
