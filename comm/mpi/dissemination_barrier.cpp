#include "comm/mpi/dissemination_barrier.h"

namespace lockstep::comm {

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

void DisseminationBarrier::on_complete(const Transfer& transfer) {
  --under_way_;
  if (transfer.direction == Transfer::Direction::kSend) return;
  distance_ *= 2;
  next_round();
}

}  // namespace lockstep::comm
