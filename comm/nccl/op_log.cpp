#include "comm/nccl/op_log.h"

#include <utility>

#include "base/error.h"

namespace lockstep::comm {

void OpLog::complete(std::uint64_t completed) {
  if (completed == completed_) return;
  completed_ = completed;
  progress_ = Clock::now();
}

std::uint64_t OpLog::in_the_way_of(std::uint64_t count) const {
  const std::uint64_t last = launched_ + count;
  return last > completed_ + under_way_.size() ? last - under_way_.size() : 0;
}

void OpLog::launch(const Op& op) {
  LOCKSTEP_ASSERT(op.sequence == launched_ + 1, "operation #{} behind #{}", op.sequence, launched_);
  if (!any_under_way()) progress_ = Clock::now();
  launched_ = op.sequence;
  history_ = digest(op, history_);
  Op& launched = at(launched_) = op;
  launched.op_index = launched_;
  launched.history = history_;
}

std::uint64_t OpLog::end_capture() {
  const std::uint64_t count = captured_.size();
  if (count == 0) return 0;
  if (under_way_.size() < 2 * count) {
    std::vector<Op> larger(2 * count);
    for (std::uint64_t sequence = completed_ + 1; sequence <= launched_; ++sequence)
      larger[sequence % larger.size()] = at(sequence);
    under_way_ = std::move(larger);
  }
  in_graphs_[count] = std::exchange(captured_, {});
  return count;
}

void OpLog::replay(std::uint64_t count, std::int64_t step) {
  for (Op op : in_graphs_.at(count)) {
    op.sequence = launched_ + 1;
    op.step = step;
    launch(op);
  }
}

}  // namespace lockstep::comm
