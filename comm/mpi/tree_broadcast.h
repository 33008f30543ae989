// Broadcast.
#pragma once

#include <vector>

#include "comm/mpi/collective_algorithm.h"

namespace lockstep::comm {

/// Down a binomial tree, in chunks: a rank passes a chunk on while the next one arrives. Counted from the root, rank
/// v's parent is v without its lowest set bit.
class TreeBroadcast final : public CollectiveAlgorithm {
 public:
  TreeBroadcast(int rank, int size, const Tuning& tuning, Transfers& transfers)
      : CollectiveAlgorithm(rank, size, tuning, transfers) {
    children_.reserve(32);
  }

  void on_complete(const Transfer& transfer) override;
  bool done() const override { return unfinished_ == 0; }

 private:
  struct Child {
    int rank = 0;
    std::uint32_t sending = 0;  // next chunk
    std::uint32_t sent = 0;
  };

  void start() override;
  void expect();
  void pass_on(Child& child);

  Chunks chunks_;
  int parent_ = -1;
  Ticks arrived_;
  std::uint32_t expecting_ = 0;
  std::uint32_t available_ = 0;  // chunks that are here
  std::size_t unfinished_ = 0;
  std::vector<Child> children_;  // largest subtree first
};

}  // namespace lockstep::comm
