#include "bench/collective_case.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"

namespace lockstep::bench {
namespace {

using comm::ReduceOp;

/// What rank `rank` puts in at `i`: small whole numbers, whose sums are exact in every type (bf16 and f16: rounded
/// once); of a product 1 and 2, and 1 of most ranks.
int contribution(std::size_t i, int rank, ReduceOp op) {
  const auto number = static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 31);
  if (op != ReduceOp::kProd) return number;
  return rank < 8 ? 1 + number % 2 : 1;
}

int reduction(std::size_t i, ReduceOp op, int ranks) {
  int result = contribution(i, 0, op);
  for (int rank = 1; rank < ranks; ++rank) {
    const int next = contribution(i, rank, op);
    if (op == ReduceOp::kSum) result += next;
    if (op == ReduceOp::kMin) result = std::min(result, next);
    if (op == ReduceOp::kMax) result = std::max(result, next);
    if (op == ReduceOp::kProd) result *= next;
  }
  return result;
}

template <class T>
T from_int(int value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>)
    return T::from_float(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

/// Calls `run` with a value of the C++ type that `dtype` means.
template <class Run>
void with_type(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::kF32: return run(float{});
    case DType::kF64: return run(double{});
    case DType::kBF16: return run(BFloat16{});
    case DType::kF16: return run(Float16{});
    case DType::kI32: return run(std::int32_t{});
    case DType::kI64: return run(std::int64_t{});
    case DType::kU8: return run(std::uint8_t{});
  }
  LOCKSTEP_ASSERT(false, "no type for {}", name_of(dtype));
}

template <class T>
void store(std::byte* at, std::size_t i, int value) {
  const T number = from_int<T>(value);
  std::memcpy(at + i * sizeof(T), &number, sizeof(T));
}

template <class T>
bool holds(const std::byte* at, std::size_t i, int value) {
  const T number = from_int<T>(value);
  return std::ranges::equal(std::span(at + i * sizeof(T), sizeof(T)),
                            std::as_bytes(std::span(&number, 1)));  // each bit
}

}  // namespace

CollectiveCase::CollectiveCase(comm::ProcessGroup& group, comm::ProcessGroup& host, const CollectiveOptions& options)
    : group_(group),
      host_(host),
      options_(options),
      family_(family_of(options.collective)),
      rank_(group.rank()),
      ranks_(group.size()) {
  const auto most = static_cast<std::size_t>(sizes_of(options, ranks_).back());
  stride_ = comm::align_up(most);
  const bool in_arena = !options_.own_memory && options_.collective != Collective::kBarrier;
  if (in_arena) {
    source_ = group_.allocate(stride_ * static_cast<std::size_t>(options_.in_flight));
    arena_ = group_.allocate(stride_ * static_cast<std::size_t>(options_.in_flight));
  }
  values_.resize(most);
  if (!in_arena || !options_.compare.empty()) other_.resize(most);
}

void CollectiveCase::resize(std::int64_t bytes) {
  bytes_ = static_cast<std::size_t>(bytes);
  part_bytes_ = bytes_ / static_cast<std::size_t>(ranks_);
  zero();
}

comm::Region CollectiveCase::region(const comm::Arena& arena, int number) const {
  return {&arena, stride_ * static_cast<std::size_t>(number), bytes_ / size_of(options_.dtype), options_.dtype};
}

// ---- Once ----

void CollectiveCase::run(Way way) {
  if (options_.own_memory && options_.collective != Collective::kBarrier) return run_own(way);
  if (options_.collective == Collective::kSendRecv) {
    const comm::Arena& from = *source_;
    if (options_.pattern == Pattern::kRing) {
      for (int i = 0; i < options_.in_flight; ++i) exchange(region(from, i), region(*arena_, i));
    } else {
      run_pattern([&](int to) { return group_.isend(region(from), to); },
                  [&](int peer) { return group_.irecv(region(*arena_), peer); });
    }
  } else {
    for (int i = 0; i < options_.in_flight; ++i) issue(way, i);
  }
  for (const comm::Work& work : works_) work.wait_host();
  for (const comm::Transfer& transfer : transfers_) transfer.wait();
  works_.clear();
  transfers_.clear();
}

void CollectiveCase::issue(Way way, int number) {
  const bool root = rank_ == options_.root;
  if (options_.collective == Collective::kBarrier) {
    works_.push_back(group_.barrier());
    return;
  }
  const comm::Region to = region(*arena_, number);
  if (options_.collective == Collective::kAllToAll) return group_.all_to_all(region(*source_, number), to);
  if (way == Way::kOutOfPlace) {
    const comm::Region from = region(*source_, number);
    std::size_t begin = 0, bytes = from.bytes();
    if (options_.collective == Collective::kAllGather) {
      const comm::Slice own = comm::slice_of(to.count, size_of(to.dtype), rank_, ranks_);
      begin = own.begin * size_of(to.dtype);
      bytes = own.count * size_of(to.dtype);
    }
    if (options_.collective != Collective::kBroadcast || root)
      group_.copy(to.data() + begin, from.data() + begin, bytes);
  }
  switch (options_.collective) {
    case Collective::kAllReduce: works_.push_back(group_.all_reduce(to, options_.op)); break;
    case Collective::kReduceScatter: works_.push_back(group_.reduce_scatter(to, options_.op)); break;
    case Collective::kAllGather: works_.push_back(group_.all_gather(to)); break;
    case Collective::kBroadcast: works_.push_back(group_.broadcast(to, options_.root)); break;
    case Collective::kReduce: works_.push_back(group_.reduce(to, options_.op, options_.root)); break;
    case Collective::kAllToAll:
    case Collective::kSendRecv:
    case Collective::kBarrier: break;
  }
}

void CollectiveCase::exchange(const comm::Region& from, const comm::Region& to) {
  if (ranks_ == 1) return group_.copy(to.data(), from.data(), from.bytes());
  const Partners partners = *partners_of(Pattern::kRing, rank_, ranks_);
  transfers_.push_back(group_.irecv(to, partners.from));
  transfers_.push_back(group_.isend(from, partners.to));
}

template <class Send, class Receive>
void CollectiveCase::run_pattern(const Send& send, const Receive& receive) {
  const auto partners = partners_of(options_.pattern, rank_, ranks_);
  if (!partners) return;
  const auto [to, from, first] = *partners;
  if (options_.pattern == Pattern::kLatency) {
    if (first) send(to).wait();
    receive(from).wait();
    if (!first) send(to).wait();
    return;
  }
  const bool both = options_.pattern == Pattern::kBidirectional;
  for (int i = 0; i < window_of(bytes_); ++i) {
    if (both || !first) transfers_.push_back(receive(from));
    if (both || first) transfers_.push_back(send(to));
  }
  for (const comm::Transfer& transfer : transfers_) transfer.wait();
  transfers_.clear();
  // That all have arrived.
  std::int32_t done = 0;
  if (first)
    group_.recv(std::span(&done, 1), from);
  else
    group_.send(std::span(&done, 1), to);
}

void CollectiveCase::run_own(Way way) {
  const DType dtype = options_.dtype;
  const std::size_t count = bytes_ / size_of(dtype), part = part_bytes_ / size_of(dtype);
  std::byte* const values = values_.data();
  std::byte* const other = other_.data();
  std::byte* to = values;
  if (way == Way::kOutOfPlace && family_.in_place) {
    if (options_.collective != Collective::kBroadcast || rank_ == options_.root) std::memcpy(other, values, bytes_);
    to = other;
  }
  switch (options_.collective) {
    case Collective::kAllReduce: return group_.all_reduce_host(to, count, dtype, options_.op);
    case Collective::kReduce: return group_.reduce_host(to, count, dtype, options_.op, options_.root);
    case Collective::kBroadcast: return group_.broadcast_host(to, count, dtype, options_.root);
    case Collective::kReduceScatter: return group_.reduce_scatter_host(values, other, part, dtype, options_.op);
    case Collective::kAllGather: return group_.all_gather_host(other, part, dtype, values);
    case Collective::kAllToAll: {
      const std::vector<std::size_t> counts(static_cast<std::size_t>(ranks_), part);
      return group_.all_to_all_host(values, counts, other, counts, dtype);
    }
    case Collective::kSendRecv: {
      const auto send = [&](int peer) { return group_.isend(values, count, dtype, peer); };
      const auto receive = [&](int peer) { return group_.irecv(other, count, dtype, peer); };
      if (options_.pattern != Pattern::kRing) return run_pattern(send, receive);
      if (ranks_ == 1) return static_cast<void>(std::memcpy(other, values, bytes_));
      const Partners partners = *partners_of(Pattern::kRing, rank_, ranks_);
      const comm::Transfer received = receive(partners.from), sent = send(partners.to);
      received.wait();
      return sent.wait();
    }
    case Collective::kBarrier: break;
  }
}

void CollectiveCase::run(Rival& rival) { rival.run(options_, values_.data(), other_.data(), bytes_); }

double CollectiveCase::units() const {
  if (options_.collective != Collective::kSendRecv || options_.pattern == Pattern::kRing) return options_.in_flight;
  return options_.pattern == Pattern::kLatency ? 2 : window_of(bytes_);
}

double CollectiveCase::bytes_moved() const {
  const bool both = options_.collective == Collective::kSendRecv && options_.pattern == Pattern::kBidirectional;
  return static_cast<double>(bytes_) * (both ? 2 : 1);
}

// ---- Right or wrong ----

void CollectiveCase::fill() {
  with_type(options_.dtype, [&]<class T>(T) {
    for (std::size_t i = 0; i < bytes_ / sizeof(T); ++i)
      store<T>(values_.data(), i, contribution(i, rank_, options_.op));
  });
}

void CollectiveCase::zero() {
  std::fill_n(values_.begin(), bytes_, std::byte{0});
  std::fill_n(other_.begin(), std::min(other_.size(), bytes_), std::byte{0});
  for (int i = 0; arena_ != nullptr && i < options_.in_flight; ++i) {
    group_.zero(region(*source_, i));
    group_.zero(region(*arena_, i));
  }
}

/// Rank `rank`'s part of the buffer, in elements. In an arena parts begin at multiples of 64 bytes.
comm::Slice CollectiveCase::part_of(int rank, bool in_arena) const {
  const std::size_t element = size_of(options_.dtype);
  if (in_arena && options_.collective != Collective::kAllToAll)
    return comm::slice_of(bytes_ / element, element, rank, ranks_);
  return {part_bytes_ / element * static_cast<std::size_t>(rank), part_bytes_ / element};
}

/// Of this rank. `result`: the larger buffer, or where not `in_arena`, what there is of it.
std::int64_t CollectiveCase::wrong_in(const std::byte* result, bool in_arena) const {
  const std::size_t element = size_of(options_.dtype);
  std::int64_t wrong = 0;
  // Elements from `at` on are those from `first` on of what `wanted` speaks of.
  const auto compare = [&](const std::byte* at, std::size_t first, std::size_t count, auto&& wanted) {
    with_type(options_.dtype, [&]<class T>(T) {
      for (std::size_t i = 0; i < count; ++i) wrong += holds<T>(at, i, wanted(first + i)) ? 0 : 1;
    });
  };
  const auto sum = [&](std::size_t i) { return reduction(i, options_.op, ranks_); };
  const auto of_rank = [&](int rank) {
    return [=, this](std::size_t i) { return contribution(i, rank, options_.op); };
  };
  const std::size_t all = bytes_ / element;
  const comm::Slice own = part_of(rank_, in_arena);
  switch (options_.collective) {
    case Collective::kAllReduce: compare(result, 0, all, sum); break;
    case Collective::kReduce:
      if (rank_ == options_.root) compare(result, 0, all, sum);
      break;
    case Collective::kReduceScatter:
      compare(result + (in_arena ? own.begin * element : 0), own.begin, own.count, sum);
      break;
    case Collective::kAllGather:
      for (int r = 0; r < ranks_; ++r) {
        const comm::Slice part = part_of(r, in_arena);
        compare(result + part.begin * element, part.begin, part.count, of_rank(r));
      }
      break;
    case Collective::kBroadcast: compare(result, 0, all, of_rank(options_.root)); break;
    case Collective::kAllToAll:
      for (int r = 0; r < ranks_; ++r)
        compare(result + part_of(r, in_arena).begin * element, own.begin, own.count, of_rank(r));
      break;
    case Collective::kSendRecv:
      if (const int from = sender(); from >= 0) compare(result, 0, all, of_rank(from));
      break;
    case Collective::kBarrier: break;
  }
  return wrong;
}

/// Of what this rank receives; -1: it receives nothing.
int CollectiveCase::sender() const {
  const auto partners = partners_of(options_.pattern, rank_, ranks_);
  return !partners || (options_.pattern == Pattern::kBandwidth && partners->first) ? -1 : partners->from;
}

/// Of all ranks.
std::int64_t CollectiveCase::sum_of_ranks(std::int64_t wrong) {
  const auto all = host_.all_gather_numbers(wrong);
  return std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

/// Inputs where a caller's own memory has them.
void CollectiveCase::fill_own() {
  fill();
  if (options_.collective == Collective::kAllGather)
    std::memcpy(other_.data(), values_.data() + part_of(rank_, false).begin * size_of(options_.dtype), part_bytes_);
}

std::int64_t CollectiveCase::count_wrong(Way way) {
  if (options_.collective == Collective::kBarrier) return -1;
  std::int64_t wrong = 0;
  if (options_.own_memory) {
    fill_own();
    run(way);
    wrong = wrong_in(is_in_values(way) ? values_.data() : other_.data(), false);
  } else {
    fill();
    const comm::Arena& input = family_.in_place && way == Way::kInPlace ? *arena_ : *source_;
    for (int i = 0; i < options_.in_flight; ++i) group_.copy(region(input, i).data(), values_.data(), bytes_);
    run(way);
    for (int i = 0; i < options_.in_flight; ++i) {
      group_.copy(values_.data(), region(*arena_, i).data(), bytes_);
      wrong += wrong_in(values_.data(), true);
    }
  }
  zero();
  return sum_of_ranks(wrong);
}

std::int64_t CollectiveCase::count_wrong(Rival& rival) {
  if (options_.collective == Collective::kBarrier) return -1;
  fill_own();
  put(rival);
  run(rival);
  rival.settle();
  rival.get(values_.data(), other_.data(), bytes_);
  const std::int64_t wrong = wrong_in(is_in_values(Way::kInPlace) ? values_.data() : other_.data(), false);
  zero();
  put(rival);
  return sum_of_ranks(wrong);
}

/// Where a caller's own memory has the result.
bool CollectiveCase::is_in_values(Way way) const {
  if (options_.collective == Collective::kAllGather) return true;
  return family_.in_place && options_.collective != Collective::kReduceScatter && way == Way::kInPlace;
}

}  // namespace lockstep::bench
