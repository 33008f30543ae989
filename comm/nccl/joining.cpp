#include "comm/nccl/joining.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <string_view>

#include "base/cuda/probe.h"
#include "base/env.h"
#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "comm/agree.h"
#include "comm/failure.h"

namespace lockstep::comm {
namespace {

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

void tell_sharing_ranks_apart(ProcessGroup& control) {
  const std::string gpu = current_cuda_bus_id();
  const auto all = control.all_gather_text(gpu.empty() ? "" : fmt::format("{} {}", host_name(), gpu));
  const auto& mine = all[static_cast<std::size_t>(control.rank())];
  if (mine.empty()) return;  // a driver that does not tell where its GPUs are
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
