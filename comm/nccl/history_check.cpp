#include "comm/nccl/history_check.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "comm/agree.h"

namespace lockstep::comm {

HistoryCheck::HistoryCheck(ProcessGroup& control)
    : control_(control), arena_(control.allocate(static_cast<std::size_t>(control.size()) * sizeof(Line))) {
  static_assert(sizeof(Line) % kArenaAlignment == 0);
}

std::span<const HistoryCheck::Line> HistoryCheck::lines() const {
  return arena_->view<Line>(0, static_cast<std::size_t>(control_.size()));
}

void HistoryCheck::compare(const OpDescriptor& last) {
  const auto ranks = static_cast<std::size_t>(control_.size());
  arena_->view<Line>(0, ranks)[static_cast<std::size_t>(control_.rank())] = {last};
  try {
    control_.all_gather({arena_.get(), 0, arena_->bytes() / sizeof(std::uint64_t), DType::kI64}).wait_host();
  } catch (const OutOfStepError& error) {
    // Another rank has given up waiting for this one, and asks where it is (Note [Progress exchange]).
    throw OutOfStepError(fmt::format("{} after {}", error.what(), describe(last)), error.remedy());
  }
  if (std::ranges::any_of(lines(), [&](const Line& line) { return line.last.history != last.history; })) fail();
}

void HistoryCheck::fail() const {
  std::vector<std::uint64_t> histories;
  for (const Line& line : lines()) histories.push_back(line.last.history);
  const Division division = divide(histories);
  const auto last_of = [&](const std::vector<int>& those) { return lines()[static_cast<std::size_t>(those[0])].last; };
  const OpDescriptor usual = last_of(division.most), odd = last_of(division.others);
  throw OutOfStepError(
      fmt::format("out of step: {} came to {}{}, {} to {}", ranks_text(division.others), describe(odd),
                  is_same_operation(odd, usual) ? " after other operations" : "", ranks_text(division.most),
                  describe(usual)),
      "run the same steps on every rank; one that has no samples in a step contributes nothing, and leaves none out");
}

}  // namespace lockstep::comm
