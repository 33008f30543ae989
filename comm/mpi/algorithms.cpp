#include "comm/mpi/algorithms.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "comm/reduce.h"
#include "lockstep/comm/arena.h"
#include "lockstep/comm/op.h"

namespace lockstep::comm {
namespace {

/// The chunk size where so many come at a time: as tuned, but never more scratch than allowed; a multiple of 64.
std::size_t chunk_bytes_for(const Tuning& tuning, std::size_t at_a_time) {
  const std::size_t allowed = tuning.scratch_bytes / at_a_time / 64 * 64;
  return std::max<std::size_t>(std::min(tuning.chunk_bytes, allowed), 64);
}

}  // namespace

const TreeProgram& CollectiveAlgorithm::program_of(const ReductionTree& tree) {
  if (programs_.size() <= tree.number()) programs_.resize(tree.number() + std::size_t{1});
  TreeProgram& program = programs_[tree.number()];
  if (!program.additions.empty()) return program;
  return program = TreeProgram(tree);
}

Exchange::Exchange(int rank, int size, const Tuning& tuning, Transfers& transfers)
    : CollectiveAlgorithm(rank, size, tuning, transfers),
      peers_(static_cast<std::size_t>(size - 1)),
      sources_(static_cast<std::size_t>(size)) {}

void Exchange::start() {
  const std::size_t element = size_of(op().dtype);
  const auto partials_of = [&](int rank) {
    return op().along == nullptr ? 1u : static_cast<std::uint32_t>(op().along->partials_of(rank).size());
  };
  partials_ = partials_of(rank_);
  places_ = 0;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer = {};
    peer.rank = (rank_ + 1 + static_cast<int>(i)) % size_;
    peer.partials = partials_of(peer.rank);
    peer.first_scratch = std::exchange(places_, places_ + peer.partials);
  }
  const auto most = static_cast<std::uint32_t>(op().along == nullptr ? 1 : op().along->most_partials());
  window_ = std::clamp(Ticks::kMostAhead / most, 1u, tuning_.chunks_under_way);
  const std::size_t chunk = chunk_bytes_for(tuning_, (peers_.size() - 1 + most) * window_);
  const auto chunks_of = [&](int rank) {
    const Slice slice = slice_of(op().count, element, rank, size_);
    return Chunks{slice.begin * element, slice.count * element, chunk};
  };
  data_ = op().data;
  own_ = chunks_of(rank_);
  reduced_ = reduces() ? 0 : own_.count();
  unfinished_ = 0;
  for (Peer& peer : peers_) {
    peer.slice = chunks_of(peer.rank);
    if (reduces()) unfinished_ += own_.count() * peer.partials + peer.slice.count() * partials_;
    if (gathers_at(peer.rank)) unfinished_ += own_.count();
    if (gathers_at(rank_)) unfinished_ += peer.slice.count();
  }
  if (reduces()) {
    const std::size_t slots = std::min(own_.count(), window_) * places_;
    const std::size_t needed = slots * std::min(chunk, own_.bytes);
    if (needed > scratch_bytes_) {
      scratch_ = std::make_unique_for_overwrite<std::byte[]>(needed);
      scratch_bytes_ = needed;
    }
  }
  for (Peer& peer : peers_) {
    if (reduces()) {
      expect(peer);
      scatter(peer);
    }
    collect(peer);
    gather(peer);
  }
}

void Exchange::on_complete(const Message& transfer) {
  --unfinished_;
  Peer& peer = peer_of(transfer.peer);
  const bool sent = transfer.direction == Message::Direction::kSend;
  if (transfer.phase == kReduceScatter && sent) {
    peer.scattered.tick(transfer.chunk);
    scatter(peer);
    collect(peer);
  } else if (transfer.phase == kReduceScatter) {
    peer.arrived.tick(transfer.chunk);
    reduce_arrived();
  } else if (sent) {
    ++peer.gathered;
    gather(peer);
  } else {
    ++peer.collected;
    collect(peer);
  }
}

void Exchange::scatter(Peer& peer) {
  while (peer.scattering < peer.slice.count() * partials_ &&
         peer.scattering - peer.scattered.prefix() < window_ * partials_) {
    const std::uint32_t number = peer.scattering++, chunk = number / partials_;
    const std::byte* const from = data_ + number % partials_ * op().partial_stride + peer.slice.begin_of(chunk);
    send(peer.rank, kReduceScatter, number, from, peer.slice.bytes_of(chunk));
  }
}

void Exchange::expect(Peer& peer) {
  while (peer.expecting < own_.count() * peer.partials &&
         peer.expecting - reduced_ * peer.partials < window_ * peer.partials) {
    const std::uint32_t number = peer.expecting++, chunk = number / peer.partials;
    receive(peer.rank, kReduceScatter, number, scratch_of(chunk, peer.first_scratch + number % peer.partials),
            own_.bytes_of(chunk));
  }
}

void Exchange::reduce_arrived() {
  const auto all_have = [&](std::uint32_t chunk) {
    return std::ranges::all_of(peers_,
                               [&](const Peer& peer) { return peer.arrived.prefix() >= (chunk + 1) * peer.partials; });
  };
  while (reduced_ < own_.count() && all_have(reduced_)) {
    std::byte* const own = data_ + own_.begin_of(reduced_);
    const auto add_sources_of = [&](int rank) {
      if (rank == rank_) {
        for (std::uint32_t p = 0; p < partials_; ++p) sources_.push_back(own + p * op().partial_stride);
      } else {
        const Peer& peer = peer_of(rank);
        for (std::uint32_t p = 0; p < peer.partials; ++p)
          sources_.push_back(scratch_of(reduced_, peer.first_scratch + p));
      }
    };
    sources_.clear();
    const std::size_t count = own_.bytes_of(reduced_) / size_of(op().dtype);
    if (op().along != nullptr) {
      for (const int rank : op().along->order()) add_sources_of(rank);
      reduce_along_tree(op().dtype, own, sources_, program_of(*op().along).additions, count);
    } else {
      for (int rank = 0; rank < size_; ++rank) add_sources_of(rank);
      reduce_in_order(op().dtype, op().reduce, own, sources_, count);
    }
    ++reduced_;
    for (Peer& peer : peers_) {
      expect(peer);
      gather(peer);
    }
  }
}

void Exchange::gather(Peer& peer) {
  if (!gathers_at(peer.rank)) return;
  while (peer.gathering < reduced_ && peer.gathering - peer.gathered < tuning_.chunks_under_way) {
    const std::uint32_t chunk = peer.gathering++;
    send(peer.rank, kAllGather, chunk, data_ + own_.begin_of(chunk), own_.bytes_of(chunk));
  }
}

void Exchange::collect(Peer& peer) {
  if (!gathers_at(rank_)) return;
  const std::uint32_t free = reduces() ? peer.scattered.prefix() / partials_ : peer.slice.count();
  while (peer.collecting < free && peer.collecting - peer.collected < tuning_.chunks_under_way) {
    const std::uint32_t chunk = peer.collecting++;
    receive(peer.rank, kAllGather, chunk, data_ + peer.slice.begin_of(chunk), peer.slice.bytes_of(chunk));
  }
}

Exchange::Peer& Exchange::peer_of(int rank) {
  return peers_[static_cast<std::size_t>((rank - rank_ - 1 + size_) % size_)];
}

std::byte* Exchange::scratch_of(std::uint32_t chunk, std::size_t place) {
  const std::size_t slot = chunk % window_ * places_ + place;
  return scratch_.get() + slot * std::min(own_.chunk_bytes, own_.bytes);
}

SmallReduce::SmallReduce(int rank, int size, const Tuning& tuning, Transfers& transfers)
    : CollectiveAlgorithm(rank, size, tuning, transfers),
      part_bytes_(align_up(tuning.small_limit(size))),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(size) * part_bytes_)),
      sources_(static_cast<std::size_t>(size)) {}

void SmallReduce::start() {
  unfinished_ = 0;
  if (op().count == 0) return;
  sources_[static_cast<std::size_t>(rank_)] = op().data;
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    std::byte* part = scratch_.get() + static_cast<std::size_t>(peer) * part_bytes_;
    sources_[static_cast<std::size_t>(peer)] = part;
    if (reduces_at(rank_)) {
      receive(peer, 0, 0, part, op().bytes());
      ++unfinished_;
    }
    if (reduces_at(peer)) {
      send(peer, 0, 0, op().data, op().bytes());
      ++unfinished_;
    }
  }
}

void SmallReduce::on_complete(const Message&) {
  // The sends too: what is sent is what the result overwrites.
  if (--unfinished_ > 0 || !reduces_at(rank_)) return;
  if (op().along == nullptr) return reduce_in_order(op().dtype, op().reduce, op().data, sources_, op().count);
  in_order_.clear();
  for (const int rank : op().along->order()) in_order_.push_back(sources_[static_cast<std::size_t>(rank)]);
  reduce_along_tree(op().dtype, op().data, in_order_, program_of(*op().along).additions, op().count);
}

void TreeBroadcast::start() {
  chunks_ = {0, op().bytes(), tuning_.chunk_bytes};
  arrived_ = {};
  expecting_ = 0;
  children_.clear();

  const int root = op().root;
  const auto v = static_cast<unsigned>((rank_ - root + size_) % size_);
  const auto n = static_cast<unsigned>(size_);
  const auto rank_of = [&](unsigned node) { return static_cast<int>((node + static_cast<unsigned>(root)) % n); };
  const unsigned subtree = v == 0 ? std::bit_ceil(n) : v & (~v + 1);  // nodes v to v + subtree - 1
  parent_ = v == 0 ? -1 : rank_of(v & (v - 1));
  for (unsigned step = subtree / 2; step > 0; step /= 2)
    if (v + step < n) children_.push_back({rank_of(v + step), 0, 0});

  available_ = parent_ < 0 ? chunks_.count() : 0;
  unfinished_ = chunks_.count() * (children_.size() + (parent_ < 0 ? 0 : 1));
  if (parent_ >= 0) expect();
  for (Child& child : children_) pass_on(child);
}

void TreeBroadcast::on_complete(const Message& transfer) {
  --unfinished_;
  if (transfer.direction == Message::Direction::kReceive) {
    arrived_.tick(transfer.chunk);
    available_ = arrived_.prefix();
    expect();
    for (Child& child : children_) pass_on(child);
  } else {
    Child& child = *std::find_if(children_.begin(), children_.end(),
                                 [&](const Child& candidate) { return candidate.rank == transfer.peer; });
    ++child.sent;
    pass_on(child);
  }
}

void TreeBroadcast::expect() {
  while (expecting_ < chunks_.count() && expecting_ - arrived_.prefix() < tuning_.chunks_under_way) {
    const std::uint32_t chunk = expecting_++;
    receive(parent_, 0, chunk, op().data + chunks_.begin_of(chunk), chunks_.bytes_of(chunk));
  }
}

void TreeBroadcast::pass_on(Child& child) {
  while (child.sending < available_ && child.sending - child.sent < tuning_.chunks_under_way) {
    const std::uint32_t chunk = child.sending++;
    send(child.rank, 0, chunk, op().data + chunks_.begin_of(chunk), chunks_.bytes_of(chunk));
  }
}

void DisseminationBarrier::start() {
  distance_ = 1;
  under_way_ = 0;
  next_round();
}

void DisseminationBarrier::next_round() {
  if (distance_ >= size_) return;
  receive((rank_ - distance_ + size_) % size_, 0, 0, nullptr, 0);
  send((rank_ + distance_) % size_, 0, 0, nullptr, 0);
  under_way_ += 2;
}

void DisseminationBarrier::on_complete(const Message& transfer) {
  --under_way_;
  if (transfer.direction == Message::Direction::kSend) return;
  distance_ *= 2;
  next_round();
}

}  // namespace lockstep::comm
