// ProcessGroup's sends, receives and all-to-all.
#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/pairs.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::comm {

struct ProcessGroup::PairState {
  std::vector<std::uint64_t> sent, received;          // by rank
  std::uint64_t all_to_alls = 0;                      // so far
  std::vector<std::shared_ptr<PairTransfer>> issued;  // those that were not done when last looked at, and later ones
  std::vector<std::shared_ptr<PairTransfer>> spare;   // nobody else's: allocation is a tenth of a short message's time
  std::size_t next_look = 64;                         // as soon as there are so many

  std::shared_ptr<PairTransfer> make() {
    if (issued.size() >= next_look) look();
    if (spare.empty()) return std::make_shared<PairTransfer>();
    auto transfer = std::move(spare.back());
    spare.pop_back();
    transfer->done.store(false, std::memory_order_relaxed);
    return transfer;
  }

  /// What moves a transfer reads nothing of it once it is done.
  void look() {
    std::erase_if(issued, [&](auto& one) {
      if (!one->done.load(std::memory_order_acquire)) return false;
      if (one.use_count() == 1) spare.push_back(std::move(one));
      return true;
    });
    next_look = std::max<std::size_t>(64, 2 * issued.size());
    constexpr std::size_t kMostSpare = 1024;
    if (spare.size() > kMostSpare) spare.resize(kMostSpare);
  }
};

ProcessGroup::PairState& ProcessGroup::pair_state() {
  if (pairs_ == nullptr) {
    const auto ranks = static_cast<std::size_t>(size_);
    pairs_ = std::make_shared<PairState>();
    pairs_->sent.resize(ranks);
    pairs_->received.resize(ranks);
  }
  return *pairs_;
}

Transfer ProcessGroup::isend(const void* values, std::size_t count, DType dtype, int to,
                             std::shared_ptr<const void> keeps) {
  return pair_group().issue_transfer(true, const_cast<void*>(values), count, dtype, to, 0, std::move(keeps));
}

Transfer ProcessGroup::irecv(void* values, std::size_t count, DType dtype, int from,
                             std::shared_ptr<const void> keeps) {
  return pair_group().issue_transfer(false, values, count, dtype, from, 0, std::move(keeps));
}

Transfer ProcessGroup::isend(const Region& region, int to) {
  failure_.throw_if_any();
  check_region(region, "a send");
  return issue_transfer(true, region.data(), region.count, region.dtype, to);
}

Transfer ProcessGroup::irecv(const Region& region, int from) {
  failure_.throw_if_any();
  check_region(region, "a receive");
  return issue_transfer(false, region.data(), region.count, region.dtype, from);
}

Transfer ProcessGroup::issue_transfer(bool sends, void* values, std::size_t count, DType dtype, int peer,
                                      std::uint64_t all_to_all, std::shared_ptr<const void> keeps) {
  check_thread(sends ? "a send" : "a receive");
  failure_.throw_if_any();
  if (peer < 0 || peer >= size_ || peer == rank_)
    throw UsageError(
        fmt::format("rank {} {} rank {}, in a group of {}", rank_, sends ? "sends to" : "receives from", peer, size_),
        "name another rank, below ProcessGroup::size()");
  PairState& pairs = pair_state();
  std::uint64_t& number = (sends ? pairs.sent : pairs.received)[static_cast<std::size_t>(peer)];
  const auto fill = [&](PairTransfer& transfer) {
    transfer.what.number = number + 1;
    transfer.what.count = count;
    transfer.what.all_to_all = all_to_all;
    transfer.what.dtype = dtype;
    transfer.sends = sends;
    transfer.peer = peer;
    transfer.data = static_cast<std::byte*>(values);
  };
  // Of a short message all else is most of its time: what is done at once is neither allocated nor kept.
  PairTransfer at_once;
  fill(at_once);
  std::shared_ptr<PairTransfer> transfer;
  if (!transfer_at_once(at_once)) {
    transfer = pairs.make();
    fill(*transfer);
    transfer->keeps = std::move(keeps);
    start_transfer(transfer);
    pairs.issued.push_back(transfer);
  }
  // One that was refused does not count.
  ++number;
  return transfer == nullptr ? Transfer() : Transfer(this, std::move(transfer));
}

void ProcessGroup::check_transfers_done() const {
  if (pairs_ == nullptr) return;
  for (const auto& transfer : pairs_->issued)
    if (!transfer->done)
      throw UsageError(fmt::format("the group is shut down, and {} is not done",
                                   describe(*transfer, fmt::format("rank {}", job_rank(transfer->peer)))),
                       "wait for every transfer before shutdown()");
}

bool ProcessGroup::has_transfer_in(const Arena& arena) noexcept {
  if (pairs_ == nullptr) return false;
  const auto is_done = [&](const PairTransfer& transfer) {
    try {
      return is_transfer_done(transfer);
    } catch (const std::exception&) {  // the group is broken: nobody knows
      return false;
    }
  };
  return std::ranges::any_of(pairs_->issued, [&](const auto& one) {
    return one->data >= arena.data() && one->data < arena.data() + arena.bytes() && !one->done && !is_done(*one);
  });
}

// ---- All to all ----

void ProcessGroup::check_counts(std::span<const std::size_t> counts, std::size_t all, const char* does) const {
  const std::size_t sum = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  if (counts.size() == static_cast<std::size_t>(size_) && sum == all) return;
  throw UsageError(fmt::format("an all-to-all {} {} values in {} parts of together {}, in a group of {}", does, all,
                               counts.size(), sum, size_),
                   "give a count for each rank; they add up to the buffer's size");
}

std::vector<std::size_t> ProcessGroup::equal_counts(std::size_t from, std::size_t to) const {
  const auto ranks = static_cast<std::size_t>(size_);
  if (from != to || from % ranks != 0)
    throw UsageError(fmt::format("an all-to-all of {} values into a buffer of {}, in a group of {}", from, to, size_),
                     "give two buffers of the same size, a multiple of ProcessGroup::size(), or the counts");
  return std::vector<std::size_t>(ranks, from / ranks);
}

void ProcessGroup::all_to_all_host(const void* from, std::span<const std::size_t> from_counts, void* to,
                                   std::span<const std::size_t> to_counts, DType dtype) {
  ProcessGroup& group = pair_group();
  if (&group != this) return group.all_to_all_host(from, from_counts, to, to_counts, dtype);
  const auto ranks = static_cast<std::size_t>(size_), own = static_cast<std::size_t>(rank_);
  if (from_counts.size() != ranks || to_counts.size() != ranks || from_counts[own] != to_counts[own])
    throw UsageError(fmt::format("an all-to-all with {} counts to send and {} to receive, in a group of {}{}",
                                 from_counts.size(), to_counts.size(), size_,
                                 from_counts.size() == ranks && to_counts.size() == ranks
                                     ? fmt::format(", of which rank {}'s for itself are {} and {}", rank_,
                                                   from_counts[own], to_counts[own])
                                     : std::string()),
                     "give a count for each rank, the same both ways for the rank itself");
  exchange_parts(static_cast<const std::byte*>(from), from_counts, static_cast<std::byte*>(to), to_counts, dtype);
}

void ProcessGroup::all_to_all(const Region& from, const Region& to) {
  failure_.throw_if_any();
  check_region(from, "an all-to-all");
  check_region(to, "an all-to-all");
  check_usage(from.dtype == to.dtype, "an all-to-all of two types", "give it two regions of one type");
  const auto counts = equal_counts(from.count, to.count);
  exchange_parts(from.data(), counts, to.data(), counts, from.dtype);
}

void ProcessGroup::exchange_parts(const std::byte* from, std::span<const std::size_t> from_counts, std::byte* to,
                                  std::span<const std::size_t> to_counts, DType dtype) {
  const auto offsets_of = [&](std::span<const std::size_t> counts) {
    std::vector<std::size_t> offsets(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), std::size_t{0});
    for (std::size_t& offset : offsets) offset *= size_of(dtype);
    return offsets;
  };
  const auto from_offsets = offsets_of(from_counts), to_offsets = offsets_of(to_counts);
  const std::uint64_t number = pair_state().all_to_alls + 1;
  // Each rank begins with the one after it, so that they do not all talk to the same one. What others wait for comes
  // first.
  std::vector<Transfer> transfers;
  transfers.reserve(2 * from_counts.size());
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const auto next = static_cast<std::size_t>(peer);
    transfers.push_back(issue_transfer(true, const_cast<std::byte*>(from) + from_offsets[next], from_counts[next],
                                       dtype, peer, number));
    pair_state().all_to_alls = number;
  }
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + size_ - step) % size_;
    const auto before = static_cast<std::size_t>(peer);
    transfers.push_back(issue_transfer(false, to + to_offsets[before], to_counts[before], dtype, peer, number));
  }
  const auto own = static_cast<std::size_t>(rank_);
  copy(to + to_offsets[own], from + from_offsets[own], from_counts[own] * size_of(dtype));
  for (const Transfer& transfer : transfers) transfer.wait();
}

// ---- Transfers ----

bool ProcessGroup::transfer_at_once(const PairTransfer&) { return false; }
void ProcessGroup::start_transfer(const std::shared_ptr<PairTransfer>&) {
  throw UsageError(fmt::format("a group over {} sends and receives nothing between two ranks", name()),
                   "use a group that make_group() has made");
}
bool ProcessGroup::is_transfer_done(const PairTransfer& transfer) { return transfer.done; }
void ProcessGroup::wait_for_transfer(const PairTransfer&, Deadline) {
  LOCKSTEP_ASSERT(false, "a group over {} has started no transfer", name());
}

void ProcessGroup::make_wait_for_transfer(const PairTransfer& transfer, StreamView) {
  wait_for_transfer(transfer, Deadline::after(timeout_));
}

bool Transfer::done() const {
  if (group_ == nullptr) return true;
  group_->check_thread("a question");
  return group_->is_transfer_done(*transfer_);
}

void Transfer::wait(Deadline deadline) const {
  if (group_ == nullptr) return;
  group_->check_thread("a wait");
  group_->wait_for_transfer(*transfer_, deadline);
}

void Transfer::wait() const {
  if (group_ == nullptr) return;
  group_->check_thread("a wait");
  const bool done = group_->device().kind == DeviceKind::kCpu && group_->is_transfer_done(*transfer_);
  if (!done) group_->wait_for_transfer(*transfer_, Deadline::after(group_->timeout()));
}

void Transfer::wait(StreamView stream) const {
  if (group_ == nullptr) return;
  group_->check_thread("a wait");
  group_->make_wait_for_transfer(*transfer_, stream);
}

}  // namespace lockstep::comm
