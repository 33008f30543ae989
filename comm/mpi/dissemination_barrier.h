// Barrier.
#pragma once

#include "comm/mpi/collective_algorithm.h"

namespace lockstep::comm {

/// ⌈log2 N⌉ rounds of empty messages: in round k every rank tells the one 2^k after it that it, and all that it has
/// heard of, have come. Each round has other peers, so the messages need no round number.
class DisseminationBarrier final : public CollectiveAlgorithm {
 public:
  DisseminationBarrier(int rank, int size, const Tuning& tuning, Transfers& transfers)
      : CollectiveAlgorithm(rank, size, tuning, transfers) {}

  void on_complete(const Transfer& transfer) override;
  bool done() const override { return distance_ >= size_ && under_way_ == 0; }

 private:
  void start() override;
  void next_round();

  int distance_ = 1;  // of this round's peers; at least size_ after the last round
  int under_way_ = 0;
};

}  // namespace lockstep::comm
