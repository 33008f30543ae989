// Allreduce of regions so small that a second exchange would cost more than the bytes it saves.
#pragma once

#include <memory>
#include <vector>

#include "comm/mpi/collective_algorithm.h"

namespace lockstep::comm {

/// Every rank sends its whole region to every other and reduces all of them itself, in rank order: the same bits
/// everywhere as with an Exchange (Note [Rank order]), in one exchange instead of two.
class SmallReduce final : public CollectiveAlgorithm {
 public:
  SmallReduce(int rank, int size, const Tuning& tuning, Transfers& transfers);

  void on_complete(const Transfer& transfer) override;
  bool done() const override { return unfinished_ == 0; }

 private:
  void start() override;

  const std::size_t part_bytes_;
  int unfinished_ = 0;
  std::unique_ptr<std::byte[]> scratch_;  // one part for each rank; our own stays unused
  std::vector<const std::byte*> sources_;
};

}  // namespace lockstep::comm
