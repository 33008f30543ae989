#include "bench/bypass_group.h"

#include "base/error.h"

namespace lockstep::bench {

using comm::Op;
using comm::OpKind;

BypassGroup::BypassGroup(comm::ProcessGroup& inner)
    : ProcessGroup(inner.rank(), inner.size(), inner.timeout()), inner_(inner) {}

void BypassGroup::set_bypass(bool bypassed) {
  is_done(last_issued());  // nobody may have asked for those that a device has done by itself
  LOCKSTEP_ASSERT(under_way_.empty(), "bypassed while {} operations are under way", under_way_.size());
  bypassed_ = bypassed;
}

void BypassGroup::poll() {
  if (!bypassed_) inner_.poll();
}

std::vector<std::vector<std::byte>> BypassGroup::all_gather_objects(std::span<const std::byte> mine) {
  return inner_.all_gather_objects(mine);
}

std::unique_ptr<comm::Arena> BypassGroup::map_arena(std::size_t bytes) {
  LOCKSTEP_ASSERT(false, "a bypassed group maps an arena of {} bytes", bytes);
  return nullptr;
}

std::vector<std::string> BypassGroup::exchange(const std::string& mine) {
  LOCKSTEP_ASSERT(false, "a bypassed group sends '{}'", mine);
  return {};
}

comm::Work BypassGroup::forward(const Op& op) {
  inner_.set_step(op.step);
  const comm::Region region{op.arena, op.offset_bytes, op.count, op.dtype};
  switch (op.kind) {
    case OpKind::kAllReduce: return inner_.all_reduce(region, op.reduce, op.bucket, op.rounding());
    case OpKind::kReduceScatter: return inner_.reduce_scatter(region, op.reduce);
    case OpKind::kAllGather: return inner_.all_gather(region);
    case OpKind::kBroadcast: return inner_.broadcast(region, op.root);
    case OpKind::kBarrier: return inner_.barrier();
    case OpKind::kReduce: return inner_.reduce(region, op.reduce, op.root);
  }
  LOCKSTEP_ASSERT(false, "an unknown operation");
  return {};
}

void BypassGroup::start(const Op& op) {
  if (observer_) observer_(op);
  if (!bypassed_) under_way_.emplace_back(op.sequence, forward(op));
}

bool BypassGroup::is_done(std::uint64_t sequence) {
  while (!under_way_.empty() && under_way_.front().first <= sequence) {
    if (!under_way_.front().second.done()) return false;
    under_way_.pop_front();
  }
  return true;
}

void BypassGroup::wait_done(std::uint64_t sequence, Deadline deadline) {
  while (!under_way_.empty() && under_way_.front().first <= sequence) {
    under_way_.front().second.wait_host(deadline);
    under_way_.pop_front();
  }
}

void BypassGroup::make_wait(std::uint64_t sequence, StreamView stream) {
  // Whoever is ordered after an operation is so after those before it.
  const comm::Work* last = nullptr;
  for (const auto& [number, work] : under_way_)
    if (number <= sequence) last = &work;
  if (last != nullptr) last->wait(stream);
  is_done(sequence);
}

}  // namespace lockstep::bench
