#include "comm/nccl/progress_exchange.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kNumbers = kArenaAlignment / sizeof(std::int64_t);  // a rank's slice

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

}  // namespace

// At least twice what the control group takes to find that the ranks wait in different operations (patience_for).
Clock::duration patience_of(Clock::duration timeout) {
  return std::clamp<Clock::duration>(timeout / 5, std::chrono::seconds(2), std::chrono::seconds(10));
}

ProgressExchange::ProgressExchange(ProcessGroup& control)
    : control_(control), arena_(control.allocate(static_cast<std::size_t>(control.size()) * kArenaAlignment)) {}

ProgressExchange::Answers ProgressExchange::ask(const RankProgress& mine, Deadline deadline) {
  const auto ranks = static_cast<std::size_t>(control_.size());
  const auto numbers = arena_->view<std::int64_t>(0, ranks * kNumbers);
  const auto line_of = [&](std::size_t rank) { return numbers.subspan(rank * kNumbers, kNumbers); };
  const auto own = line_of(static_cast<std::size_t>(control_.rank()));
  own[0] = static_cast<std::int64_t>(mine.issued);
  own[1] = static_cast<std::int64_t>(mine.completed);
  own[2] = mine.failure;
  own[3] = static_cast<std::int64_t>(mine.words);
  Answers answers;
  try {
    control_.all_gather({arena_.get(), 0, numbers.size(), DType::kI64}).wait_host(deadline);
  } catch (const InterruptedError&) {
    throw;
  } catch (const Error&) {
    answers.silence = std::current_exception();
    return answers;
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const auto line = line_of(rank);
    answers.all.push_back({static_cast<std::uint64_t>(line[0]), static_cast<std::uint64_t>(line[1]), line[2],
                           static_cast<std::uint64_t>(line[3])});
  }
  return answers;
}

int first_behind(const ProgressExchange::Answers& answers, std::uint64_t sequence) {
  for (std::size_t rank = 0; rank < answers.all.size(); ++rank)
    if (answers.all[rank].issued < sequence) return static_cast<int>(rank);
  return -1;
}

std::string waiting_text(const ProgressExchange::Answers& answers, std::uint64_t sequence) {
  if (answers.all.empty()) return fmt::format("; asked where they are: {}", text_of(answers.silence));
  constexpr std::size_t kNamed = 8;
  std::vector<std::string> behind;
  std::size_t more = 0;
  for (std::size_t rank = 0; rank < answers.all.size(); ++rank) {
    const RankProgress& there = answers.all[rank];
    if (there.issued >= sequence) continue;
    if (behind.size() < kNamed)
      behind.push_back(
          fmt::format("rank {}, which has issued {} and completed {} operations", rank, there.issued, there.completed));
    else
      ++more;
  }
  if (more > 0) behind.push_back(fmt::format("{} more", more));
  if (!behind.empty()) return fmt::format(" waiting for {}", join(behind, "; "));
  return ", although every rank has issued it: a GPU or the network between them stands still";
}

}  // namespace lockstep::comm
