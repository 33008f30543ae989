#include "comm/mpi/tree_broadcast.h"

#include <algorithm>
#include <bit>

namespace lockstep::comm {

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

void TreeBroadcast::on_complete(const Transfer& transfer) {
  --unfinished_;
  if (transfer.direction == Transfer::Direction::kReceive) {
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

}  // namespace lockstep::comm
