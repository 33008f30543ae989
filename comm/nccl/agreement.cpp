#include "comm/nccl/agreement.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "base/cuda/library.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agree.h"
#include "comm/stall.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/failure.h"

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

/// None of those that have only waited in vain says so where another rank knows why.
void check_that_all_joined(const ProgressExchange::Answers& answers, int rank, const std::exception_ptr& own) {
  constexpr auto kTimeout = static_cast<std::int64_t>(ExitCode::kTimeout);
  auto speaker = std::ranges::find_if(
      answers.all, [](const auto& there) { return there.failure != 0 && there.failure != kTimeout; });
  if (speaker == answers.all.end())
    speaker = std::ranges::find_if(answers.all, [](const auto& there) { return there.failure != 0; });
  if (speaker == answers.all.end()) return;
  const auto spoken_for = [&](const RankProgress& there) {
    return there.failure == 0 || there.failure == kTimeout || there.words == speaker->words;
  };
  const auto speaking_rank = static_cast<int>(speaker - answers.all.begin());
  const RankProgress& here = answers.all[static_cast<std::size_t>(rank)];
  if (rank == speaking_rank || !spoken_for(here)) std::rethrow_exception(own);
  throw PeerError(failure_code(speaker->failure),
                  fmt::format("rank {} could not join the others by NCCL", speaking_rank));
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

int first_late(const ProgressExchange::Answers& answers, std::uint64_t sequence) {
  for (std::size_t rank = 0; rank < answers.all.size(); ++rank)
    if (answers.all[rank].issued < sequence) return static_cast<int>(rank);
  return -1;
}

std::string waiting_text(const ProgressExchange::Answers& answers, std::uint64_t sequence) {
  if (answers.all.empty()) return fmt::format("; asked where they are: {}", text_of(answers.silence));
  std::vector<std::string> late;
  for (std::size_t rank = 0; rank < answers.all.size(); ++rank)
    if (const RankProgress& there = answers.all[rank]; there.issued < sequence)
      late.push_back(
          fmt::format("rank {}, which has issued {} and completed {} operations", rank, there.issued, there.completed));
  if (!late.empty()) return fmt::format(" waiting for {}", first_names(late));
  return ", although every rank has issued it: a GPU or the network between them hangs";
}

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
  throw OutOfStepError(fmt::format("out of step: {} came to {}{}, {} to {}", ranks_text(division.others), describe(odd),
                                   is_same_operation(odd, usual) ? " after other operations" : "",
                                   ranks_text(division.most), describe(usual)),
                       "run the same steps on every rank; a rank without samples in a step contributes nothing, but "
                       "does not skip the step");
}

void separate_sharing_ranks(ProcessGroup& control) {
  const std::string gpu = current_cuda_bus_id();
  const auto all = control.all_gather_text(gpu.empty() ? "" : fmt::format("{} {}", host_name(), gpu));
  const auto& mine = all[static_cast<std::size_t>(control.rank())];
  if (mine.empty()) return;  // a driver that does not report PCI addresses
  const auto first = std::ranges::find(all, mine) - all.begin();
  if (first == control.rank()) return;
  log_debug("shares its GPU with rank {}", first);
  set_env("NCCL_HOSTID", fmt::format("{}-rank-{}", host_name(), control.rank()), /*overwrite=*/false);
}

ncclUniqueId agree_on_id(ProcessGroup& control, const NcclApi& api) {
  ncclUniqueId id{};
  run_collectively(control, [&] {
    if (control.rank() > 0) return;
    const ncclResult_t result = api.get_unique_id(&id);
    if (result != ncclSuccess) throw_nccl_error(api, nullptr, result, "preparing to join the ranks by NCCL");
  });
  const std::span<const std::byte> bytes = std::as_bytes(std::span(&id, 1));
  const auto ids = control.all_gather_objects(control.rank() == 0 ? bytes : bytes.first(0));
  LOCKSTEP_ASSERT(ids[0].size() == sizeof id, "an id of {} bytes", ids[0].size());
  std::memcpy(&id, ids[0].data(), sizeof id);
  return id;
}

void join_ranks(Communicator& communicator, const ncclUniqueId& id, ProcessGroup& control,
                ProgressExchange& progress_exchange, Clock::duration timeout, FunctionRef<void()> look) {
  const auto begin = Clock::now();
  const auto deadline = Deadline::after(timeout);
  const auto patience = patience_of(timeout);
  std::exception_ptr failure;
  RankProgress mine;
  try {
    communicator.join(id, [&] {
      look();
      if (!deadline.expired()) return;
      throw TimeoutError(fmt::format("joining {} ranks by NCCL timed out after {:.3g} s", control.size(),
                                     seconds_between(begin, Clock::now())),
                         "look at the network between them (NCCL_SOCKET_IFNAME); NCCL_DEBUG=INFO says more");
    });
  } catch (const InterruptedError&) {
    throw;
  } catch (const Error& error) {
    failure = std::current_exception();
    mine.failure = error.code();
    mine.words = std::hash<std::string_view>()(error.what());
  }
  // Whoever has joined waits for as long as another may still try.
  const auto answers =
      progress_exchange.ask(mine, Deadline::after(failure == nullptr ? deadline.remaining() + 2 * patience : patience));
  if (!answers.all.empty()) {
    check_that_all_joined(answers, control.rank(), failure);
    return;
  }
  if (failure == nullptr) std::rethrow_exception(answers.silence);
  try {
    std::rethrow_exception(failure);
  } catch (const TimeoutError& error) {
    throw TimeoutError(error.what() + waiting_text(answers, 0), error.remedy());
  }
}

}  // namespace lockstep::comm
