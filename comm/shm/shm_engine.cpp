#include "comm/shm/shm_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/backends.h"
#include "comm/engine.h"
#include "comm/reduce.h"

namespace lockstep::comm {
namespace {

// In each rank's part of the board.
constexpr std::size_t kRingsAt = align_up(sizeof(RankControlBlock));

}  // namespace

ShmEngine::ShmEngine(int rank, int size, Peers peers, Segment board)
    : Engine(rank, size),
      peers_(std::move(peers)),
      memory_(std::move(board)),
      board_(rank, size, memory_),
      rings_(rank, size, memory_, kRingsAt),
      sources_(static_cast<std::size_t>(size)),
      copies_(static_cast<std::size_t>(size)) {
  if (peers_.sockets().empty()) return;
  levels_.emplace(peers_.sockets(), rank);
  if (!levels_->help()) levels_.reset();
}

std::size_t ShmEngine::board_bytes(int ranks) { return kRingsAt + PairRings::bytes_of(ranks); }

std::unique_ptr<Arena> ShmEngine::map_arena(std::size_t bytes, TextExchange exchange) {
  auto segment = Segment::map(rank(), size(), bytes, [&](const std::string& mine) { return exchange(mine, false); });
  return std::make_unique<ShmArena>(std::move(segment), rank(), bytes);
}

// ---- Operations ----

bool ShmEngine::advance_operations() {
  if (idle()) return false;
  const std::uint64_t posted = posted_, worked = worked_, before = completed();
  const unsigned stage = stage_;
  bool few_bytes = posted == worked;
  while (posted_ < submitted() && board_.may_post(posted_ + 1)) {
    const Op& op = op_at(++posted_);
    post(op);
    few_bytes = few_bytes && is_small(op);
  }
  // Of few bytes this rank's share takes less time than to wake somebody.
  if (posted_ != posted && !few_bytes) board_.wake_sleepers();
  while (worked_ < posted_ && may_work(op_at(worked_ + 1))) {
    const Op& op = op_at(worked_ + 1);
    if (in_two_levels(op)) {
      if (!advance_levels(op)) break;
    } else {
      work(op);
    }
    worked_ = op.op_index;
    next_to_post_ = 0;
    board_.finish(worked_);
  }
  if (worked_ != worked || (posted_ != posted && few_bytes)) board_.wake_sleepers();
  retire();
  return posted_ != posted || worked_ != worked || stage_ != stage || completed() != before;
}

/// The same on all ranks: rank 0's slice is the largest.
bool ShmEngine::is_small(const Op& op) const {
  if (op.kind == OpKind::kBarrier) return true;
  if (op.along != nullptr && !op.along->one_each()) return false;  // a slot has a rank's region alone
  return (op.kind == OpKind::kAllGather ? slice_bytes_of(op, 0).bytes : op.bytes()) <= Slot::kBytes;
}

void ShmEngine::post(const Op& op) {
  const Stretch mine = is_small(op) ? contribution_of(op, rank()) : Stretch{};
  board_.post(op, {op.data + mine.begin, mine.bytes});
}

/// Whose part in `op` this rank's share needs.
ShmEngine::Ranks ShmEngine::sources_of(const Op& op) const {
  if (op.kind == OpKind::kBroadcast && is_small(op)) return {op.root, op.root + 1};
  if (op.kind == OpKind::kReduce && rank() != op.root && is_small(op)) return {};
  return {0, size()};
}

/// Whether all that this rank takes from have posted the same operation. Its share of something else would read and
/// write where nobody expects it.
bool ShmEngine::may_work(const Op& op) {
  const Ranks sources = sources_of(op);
  for (next_to_post_ = std::max(next_to_post_, sources.begin); next_to_post_ < sources.end; ++next_to_post_)
    if (!board_.has_posted(next_to_post_, op.op_index)) return false;
  for (int r = sources.begin; r < sources.end; ++r)
    if (board_.history_of(r, op.op_index) != op.history) return false;
  return true;
}

// Where a result is rounded once, a socket's sum would be rounded too; along a tree the order is another one; and few
// bytes are not worth two more signals.
bool ShmEngine::in_two_levels(const Op& op) const {
  constexpr std::size_t kFewBytes = std::size_t{64} << 10;
  return levels_ && op.kind == OpKind::kAllReduce && op.along == nullptr && op.into.data == nullptr &&
         op.bytes() > kFewBytes && !rounds(op.dtype, op.reduce);
}

/// Whether this rank has done its share. All ranks have posted the operation.
bool ShmEngine::advance_levels(const Op& op) {
  const auto copy = [&](int r) { return copy_of(op, r); };
  const auto reach = [&](unsigned stage) {
    board_.reach_stage(op.op_index, stage_ = stage);
    board_.wake_sleepers();
  };
  if (stage_ == 0) {
    levels_->reduce_inside(op, copy);
    reach(1);
  }
  if (stage_ == 1 && all_reached(op.op_index, 1)) {
    levels_->reduce_between(op, copy);
    reach(2);
  }
  if (stage_ < 2 || !all_reached(op.op_index, 2)) return false;
  levels_->spread_inside(op, copy);
  stage_ = 0;
  return true;
}

bool ShmEngine::all_reached(std::uint64_t index, unsigned stage) const {
  for (int r = 0; r < size(); ++r)
    if (!board_.has_reached(r, index, stage)) return false;
  return true;
}

void ShmEngine::work(const Op& op) {
  if (is_small(op))
    work_from_slots(op);
  else
    work_in_place(op);
}

void ShmEngine::work_from_slots(const Op& op) {
  switch (op.kind) {
    case OpKind::kReduce:
      if (rank() != op.root) return;
      [[fallthrough]];
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter: {
      const Stretch wanted = reduced_bytes_of(op);
      if (op.along != nullptr) {
        set_sources_along_tree(op, [&](int r, std::size_t) { return board_.bytes_of(r, op.op_index); });
        return reduce_along_tree(op.dtype, op.data, sources_, program_of(op).additions, op.count);
      }
      sources_.resize(static_cast<std::size_t>(size()));
      for (int r = 0; r < size(); ++r)
        sources_[static_cast<std::size_t>(r)] = board_.bytes_of(r, op.op_index) + wanted.begin;
      std::byte* const to = op.into.data != nullptr ? op.into.data : op.data + wanted.begin;
      reduce_in_order(op.dtype, op.reduce, to, sources_, wanted.bytes / size_of(op.dtype));
      return;
    }
    case OpKind::kAllGather:
    case OpKind::kBroadcast:
      for (int r = 0; r < size(); ++r) take_from(op, r, board_.bytes_of(r, op.op_index));
      return;
    case OpKind::kBarrier: return;
  }
}

void ShmEngine::work_in_place(const Op& op) {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter: return op.into.data != nullptr ? reduce_into(op) : reduce_slice(op);
    case OpKind::kAllGather:
    case OpKind::kBroadcast:
      // Each rank begins with another one's slice, so that they do not all read from the same memory.
      for (int i = 1; i <= size(); ++i) {
        const int r = (rank() + i) % size();
        take_from(op, r, copy_of(op, r) + contribution_of(op, r).begin);
      }
      return;
    case OpKind::kBarrier: return;
  }
}

/// Copies what `rank` contributes, which is at `from`, to where this rank wants to have it.
void ShmEngine::take_from(const Op& op, int rank, const std::byte* from) {
  const Stretch theirs = contribution_of(op, rank);
  std::byte* to = op.data + theirs.begin;
  std::size_t bytes = theirs.bytes;
  if (op.into.data != nullptr) {
    if (op.kind == OpKind::kAllGather) {
      to = op.into.data + static_cast<std::size_t>(rank) * op.into.stride_bytes;
      bytes = op.into.bytes;
    } else if (rank == op.root) {
      to = op.into.data;
    }
  }
  const bool has_it = rank == this->rank() && (op.into.data == nullptr || op.kind == OpKind::kBroadcast);
  if (!has_it && bytes > 0) std::memcpy(to, from, bytes);
}

void ShmEngine::reduce_slice(const Op& op) {
  const Stretch slice = slice_bytes_of(op, rank());
  if (op.along != nullptr) return reduce_slice_along_tree(op, slice);
  sources_.resize(static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r)
    sources_[static_cast<std::size_t>(r)] = copies_[static_cast<std::size_t>(r)] = copy_of(op, r) + slice.begin;
  const std::size_t count = slice.bytes / size_of(op.dtype);
  if (op.kind == OpKind::kAllReduce)
    reduce_into_all(op.dtype, op.reduce, copies_, count);
  else
    reduce_in_order(op.dtype, op.reduce, copy_of(op, op.kind == OpKind::kReduce ? op.root : rank()) + slice.begin,
                    sources_, count);
}

/// The partial sums of all ranks, each where `at` says, in the order of their leaves.
template <class At>
void ShmEngine::set_sources_along_tree(const Op& op, const At& at) {
  sources_.clear();
  for (const int r : op.along->order())
    for (std::size_t p = 0; p < op.along->partials_of(r).size(); ++p) sources_.push_back(at(r, p));
}

void ShmEngine::reduce_slice_along_tree(const Op& op, const Stretch& slice) {
  set_sources_along_tree(op,
                         [&](int r, std::size_t p) { return copy_of(op, r) + p * op.partial_stride + slice.begin; });
  const auto& additions = program_of(op).additions;
  const std::size_t count = slice.bytes / size_of(op.dtype);
  for (int r = 0; r < size(); ++r) copies_[static_cast<std::size_t>(r)] = copy_of(op, r) + slice.begin;
  // Where every rank's region is the one source of it, and they are added as they come.
  if (size() == 2 && op.along->one_each()) return reduce_into_all(op.dtype, ReduceOp::kSum, copies_, count);
  reduce_along_tree(op.dtype, copies_, sources_, additions, count);
}

const TreeProgram& ShmEngine::program_of(const Op& op) {
  if (programs_.size() <= op.tree) programs_.resize(op.tree + std::size_t{1});
  TreeProgram& program = programs_[op.tree];
  if (!program.additions.empty()) return program;
  return program = TreeProgram(*op.along);
}

void ShmEngine::reduce_into(const Op& op) {
  sources_.resize(static_cast<std::size_t>(size()));
  const Stretch wanted = reduced_bytes_of(op);
  for (int r = 0; r < size(); ++r) sources_[static_cast<std::size_t>(r)] = copy_of(op, r) + wanted.begin;
  if (op.kind == OpKind::kAllReduce)
    sources_[static_cast<std::size_t>(rank())] = op.into.data;  // has to be loaded anyway
  reduce_in_order(op.dtype, op.reduce, op.into.data, sources_, wanted.bytes / size_of(op.dtype));
}

/// What this rank reduces, where each has a result of its own.
ShmEngine::Stretch ShmEngine::reduced_bytes_of(const Op& op) const {
  Stretch wanted = op.kind == OpKind::kReduceScatter ? slice_bytes_of(op, rank()) : Stretch{0, op.bytes()};
  if (op.into.data != nullptr) wanted.bytes = op.into.bytes;
  return wanted;
}

void ShmEngine::retire() {
  while (completed() < worked_) {
    const bool few_bytes = is_small(first());
    if (!few_bytes && !board_.all_finished(completed() + 1)) return;
    complete_first(few_bytes);
  }
}

ShmEngine::Stretch ShmEngine::slice_bytes_of(const Op& op, int rank) const {
  const std::size_t element = size_of(op.dtype);
  const Slice slice = slice_of(op.count, element, rank, size());
  return {slice.begin * element, slice.count * element};
}

ShmEngine::Stretch ShmEngine::contribution_of(const Op& op, int rank) const {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter: return {0, op.bytes()};
    case OpKind::kAllGather: return slice_bytes_of(op, rank);
    case OpKind::kBroadcast: return rank == op.root ? Stretch{0, op.bytes()} : Stretch{};
    case OpKind::kBarrier: break;
  }
  return {};
}

// ---- Waiting ----

WaitPolicy ShmEngine::wait_policy(bool) const {
  // About 100 µs, a few times what waking up costs. Where ranks outnumber cores: how often a wait lets another process
  // have the core before it sleeps, which costs both of them more than a switch.
  constexpr int kSpins = 2000, kYields = 20;
  if (peers_.oversubscribed()) return {.yields = kYields, .recovered = kYields};
  return {.spins = kSpins, .recovered = kSpins};
}

void ShmEngine::sleep(Clock::duration at_most, Clock::duration, FunctionRef<bool()> awake) {
  const auto ticket = board_.announce_sleep();
  if (!advance() && !awake()) board_.sleep(ticket, at_most);
  board_.end_sleep();
}

bool ShmEngine::waits_for(int rank) const {
  const std::uint64_t index = completed() + 1;
  if (rank == this->rank()) return false;
  if (posted_ < index) return !board_.has_finished(rank, index - RankControlBlock::kSlots);
  const Ranks sources = sources_of(first());
  if (sources.contains(rank) && !board_.has_posted(rank, index)) return true;
  for (int r = sources.begin; r < sources.end; ++r)
    if (!board_.has_posted(r, index)) return false;
  if (stage_ > 0 && index == worked_ + 1) return !board_.has_reached(rank, index, stage_);
  return !board_.has_finished(rank, index);
}

void ShmEngine::check_peers() {
  if (idle()) return;
  if (const auto [other, index] = board_.find_difference(posted_); other >= 0)
    throw OutOfStepError(
        out_of_step_text(peers_.name_of(other), board_.posted_by(other, index), board_.posted_by(rank(), index)),
        kSameProgram);
  for (int rank = 0; rank < size(); ++rank) {
    if (!waits_for(rank) || !peers_.has_ended(rank)) continue;
    // What it has done before its end counts.
    advance();
    if (idle()) return;
    if (!waits_for(rank)) continue;
    await_own_stop_request();
    peers_.throw_ended(rank, fmt::format("{}; {}", describe(first()), board_.progress_of(rank)));
  }
}

void ShmEngine::check_ended_peers() {
  for (int other = 0; other < size(); ++other) {
    if (other == rank() || !peers_.has_ended(other)) continue;
    await_own_stop_request();
    peers_.throw_ended(other, {});
  }
}

void ShmEngine::find_states(const Op& op, std::span<PeerState> states) {
  for (int r = 0; r < size(); ++r)
    if (waits_for(r))
      states[static_cast<std::size_t>(r)] =
          board_.has_posted(r, op.op_index) ? PeerState::kStarted : PeerState::kAbsent;
}

std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Clock::duration timeout) {
  Peers peers(*store, Deadline::after(timeout));
  return make_shm_group(std::move(store), std::move(peers), timeout);
}

std::unique_ptr<ProcessGroup> make_shm_group(std::unique_ptr<Store>&& store, Peers&& peers, Clock::duration timeout) {
  const int rank = store->rank(), size = store->size();
  if (const int other = peers.elsewhere(); other >= 0) {
    const std::string what = fmt::format("{} and {} share no memory", peers.name_of(0), peers.name_of(other));
    if (rank != other) throw PeerError(static_cast<int>(ExitCode::kDevice), what);
    throw DeviceError(what, "leave --backend out: auto goes through the network");
  }
  int round = 0;
  const auto exchange = [&](const std::string& mine) {
    return store->all_gather_text(fmt::format("sharing memory, round {}", ++round), mine, Deadline::after(timeout));
  };
  auto board = Segment::map(rank, size, ShmEngine::board_bytes(size), exchange);
  peers.watch(rank);
  auto engine = std::make_unique<ShmEngine>(rank, size, std::move(peers), std::move(board));
  return make_inline_group(rank, size, std::move(engine), std::move(store), timeout);
}

const BackendFamily& shm_backend() {
  static const BackendFamily family{
      .name = "shm",
      .title = "shared memory",
      .about = "memory inside a host",
      .encrypts = true,  // nothing leaves the host
      .unsupported = [](const World&, const GroupOptions& options,
                        const Peers* peers) -> std::optional<UnsupportedReason> {
        if (options.backend == shm_backend().name) return std::nullopt;  // make_shm_group() names who is elsewhere
        if (options.progress == GroupOptions::Progress::kThread)
          return UnsupportedReason{"shared memory has no thread that advances operations",
                                   "let the caller advance its operations"};
        if (peers != nullptr && peers->elsewhere() >= 0) return UnsupportedReason{"the ranks are on several hosts", {}};
        return std::nullopt;
      },
      .make =
          [](JoinedRanks ranks) {
            return make_shm_group(std::move(ranks.store), std::move(ranks.peers), ranks.timeout());
          },
  };
  return family;
}

}  // namespace lockstep::comm
