#include "comm/mpi/small_reduce.h"

#include "comm/arena.h"
#include "comm/reduce.h"

namespace lockstep::comm {

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
    receive(peer, 0, 0, part, op().bytes());
    send(peer, 0, 0, op().data, op().bytes());
    unfinished_ += 2;
  }
}

void SmallReduce::on_complete(const Transfer&) {
  // The sends too: what is sent is what the result overwrites.
  if (--unfinished_ > 0) return;
  reduce_in_order(op().dtype, op().reduce, op().data, sources_, op().count);
}

}  // namespace lockstep::comm
