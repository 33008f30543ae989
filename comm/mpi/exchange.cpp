#include "comm/mpi/exchange.h"

#include <algorithm>

#include "comm/reduce.h"
#include "comm/op.h"

namespace lockstep::comm {
namespace {

/// The chunk size for this many peers: as tuned, but never more scratch than allowed; a multiple of 64.
std::size_t chunk_bytes_for(const Tuning& tuning, std::size_t peers) {
  const std::size_t allowed = tuning.scratch_bytes / (peers * tuning.chunks_under_way) / 64 * 64;
  return std::max<std::size_t>(std::min(tuning.chunk_bytes, allowed), 64);
}

}  // namespace

Exchange::Exchange(int rank, int size, const Tuning& tuning, Transfers& transfers)
    : Schedule(rank, size, tuning, transfers),
      peers_(static_cast<std::size_t>(size - 1)),
      sources_(static_cast<std::size_t>(size)) {}

void Exchange::start() {
  const std::size_t element = size_of(op().dtype);
  const std::size_t chunk = chunk_bytes_for(tuning_, peers_.size());
  const auto chunks_of = [&](int rank) {
    const Slice slice = slice_of(op().count, element, rank, size_);
    return Chunks{slice.begin * element, slice.count * element, chunk};
  };
  data_ = op().data;
  own_ = chunks_of(rank_);
  reduced_ = reduces() ? 0 : own_.count();
  unfinished_ = 0;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer = {};
    peer.rank = (rank_ + 1 + static_cast<int>(i)) % size_;
    peer.slice = chunks_of(peer.rank);
    const std::size_t each_half = own_.count() + peer.slice.count();
    unfinished_ += (reduces() ? each_half : 0) + (gathers() ? each_half : 0);
  }
  if (reduces()) {
    const std::size_t slots = std::min(own_.count(), tuning_.chunks_under_way) * peers_.size();
    const std::size_t needed = slots * std::min(chunk, own_.bytes);
    if (needed > scratch_bytes_) {
      scratch_ = std::make_unique_for_overwrite<std::byte[]>(needed);
      scratch_bytes_ = needed;
    }
  }
  for (Peer& peer : peers_) {
    if (reduces()) {
      expect(peer);
      contribute(peer);
    }
    if (gathers()) {
      collect(peer);
      publish(peer);
    }
  }
}

void Exchange::on_complete(const Transfer& transfer) {
  --unfinished_;
  Peer& peer = peer_of(transfer.peer);
  const bool sent = transfer.direction == Transfer::Direction::kSend;
  if (transfer.phase == kReduce && sent) {
    peer.contributed.tick(transfer.chunk);
    contribute(peer);
    if (gathers()) collect(peer);
  } else if (transfer.phase == kReduce) {
    peer.arrived.tick(transfer.chunk);
    reduce_arrived();
  } else if (sent) {
    ++peer.published;
    publish(peer);
  } else {
    ++peer.collected;
    collect(peer);
  }
}

void Exchange::contribute(Peer& peer) {
  while (peer.contributing < peer.slice.count() &&
         peer.contributing - peer.contributed.prefix() < tuning_.chunks_under_way) {
    const std::uint32_t chunk = peer.contributing++;
    send(peer.rank, kReduce, chunk, data_ + peer.slice.begin_of(chunk), peer.slice.bytes_of(chunk));
  }
}

void Exchange::expect(Peer& peer) {
  const auto index = static_cast<std::size_t>(&peer - peers_.data());
  while (peer.expecting < own_.count() && peer.expecting - reduced_ < tuning_.chunks_under_way) {
    const std::uint32_t chunk = peer.expecting++;
    receive(peer.rank, kReduce, chunk, scratch_of(chunk, index), own_.bytes_of(chunk));
  }
}

void Exchange::reduce_arrived() {
  const auto all_have = [&](std::uint32_t chunk) {
    return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) { return peer.arrived.prefix() > chunk; });
  };
  while (reduced_ < own_.count() && all_have(reduced_)) {
    std::byte* own = data_ + own_.begin_of(reduced_);
    sources_[static_cast<std::size_t>(rank_)] = own;
    for (std::size_t i = 0; i < peers_.size(); ++i)
      sources_[static_cast<std::size_t>(peers_[i].rank)] = scratch_of(reduced_, i);
    const DType dtype = op().dtype;
    reduce_in_order(dtype, op().reduce, own, sources_, own_.bytes_of(reduced_) / size_of(dtype));
    ++reduced_;
    for (Peer& peer : peers_) {
      expect(peer);
      if (gathers()) publish(peer);
    }
  }
}

void Exchange::publish(Peer& peer) {
  while (peer.publishing < reduced_ && peer.publishing - peer.published < tuning_.chunks_under_way) {
    const std::uint32_t chunk = peer.publishing++;
    send(peer.rank, kGather, chunk, data_ + own_.begin_of(chunk), own_.bytes_of(chunk));
  }
}

void Exchange::collect(Peer& peer) {
  const std::uint32_t free = reduces() ? peer.contributed.prefix() : peer.slice.count();
  while (peer.collecting < free && peer.collecting - peer.collected < tuning_.chunks_under_way) {
    const std::uint32_t chunk = peer.collecting++;
    receive(peer.rank, kGather, chunk, data_ + peer.slice.begin_of(chunk), peer.slice.bytes_of(chunk));
  }
}

Exchange::Peer& Exchange::peer_of(int rank) {
  return peers_[static_cast<std::size_t>((rank - rank_ - 1 + size_) % size_)];
}

std::byte* Exchange::scratch_of(std::uint32_t chunk, std::size_t peer_index) {
  const std::size_t slot = chunk % tuning_.chunks_under_way * peers_.size() + peer_index;
  return scratch_.get() + slot * std::min(own_.chunk_bytes, own_.bytes);
}

}  // namespace lockstep::comm
