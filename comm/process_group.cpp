#include "lockstep/comm/process_group.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <utility>

#include "base/error.h"
#include "comm/agree.h"

namespace lockstep::comm {
namespace {

// Objects travel in pieces of this many bytes per rank.
constexpr std::size_t kObjectPieceBytes = 4096;
// The host's memory, in halves of this: one is copied while the other is reduced.
constexpr std::size_t kStagedBytes = std::size_t{2} << 20;
// Where ranks read each other's copies: what stays in the caches between being written and being read.
constexpr std::size_t kDirectBytes = std::size_t{128} << 10;
// Each rank of a direct allreduce reads all copies; of more ranks, each reducing a part costs less.
constexpr int kMostDirectRanks = 3;

}  // namespace

ProcessGroup::~ProcessGroup() {
  // Those that outlive their group have nobody to ask any more.
  for (Arena* const arena : arenas_) {
    arena->group_ = nullptr;
    if (arena->last_use_.sequence <= waited_for_) arena->last_use_ = {};
  }
}

// ---- Arenas ----

std::unique_ptr<Arena> ProcessGroup::allocate(std::size_t bytes) {
  check_thread("an allocation");
  const auto sizes = exchange(fmt::to_string(bytes));
  const auto other = std::ranges::find_if(sizes, [&](const std::string& size) { return size != sizes.front(); });
  if (other != sizes.end()) {
    const auto rank = static_cast<int>(other - sizes.begin());
    const std::string what = fmt::format(
        "out of step: rank {} allocates an arena of {} bytes where rank 0 allocates {}", rank, *other, sizes.front());
    if (rank != rank_) throw PeerError(static_cast<int>(ExitCode::kTimeout), what);
    throw OutOfStepError(what, "allocate arenas of the same sizes in the same order on every rank");
  }
  auto arena = map_arena(bytes);
  arenas_.push_back(arena.get());
  arena->group_ = this;
  arena->id_ = ++allocated_;
  return arena;
}

bool ProcessGroup::has(const Arena* arena) const { return std::ranges::find(arenas_, arena) != arenas_.end(); }

const Arena* ProcessGroup::arena_of(const void* data, std::size_t bytes) const {
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  const auto at = std::ranges::find_if(arenas_, [&](const Arena* arena) {
    const auto begin = reinterpret_cast<std::uintptr_t>(arena->data());
    return first >= begin && first - begin <= arena->bytes() && bytes <= arena->bytes() - (first - begin);
  });
  return at == arenas_.end() ? nullptr : *at;
}

bool ProcessGroup::detach(const Arena& arena) noexcept {
  std::erase(arenas_, &arena);
  const OpDescriptor& use = arena.last_use_;
  // An exception that unwinds past an arena is reason enough for its operations to be left as they are.
  if (std::uncaught_exceptions() > 0) return false;
  const bool has_transfer = has_transfer_in(arena);
  if (!has_transfer && (use.sequence <= waited_for_ || has_let_go(use.sequence))) return true;
  try {
    failure_.set(std::make_exception_ptr(
        UsageError(fmt::format("arena {} of {} bytes was destroyed while {} on it was under way", arena.id(),
                               arena.bytes(), has_transfer ? std::string("a send or a receive") : describe(use)),
                   "wait for the operations on an arena before it is destroyed")));
  } catch (const std::exception&) {  // no memory for words: the next call that needs some says so
  }
  return false;
}

Arena::~Arena() = default;

std::byte* Arena::copy_of(int rank) const {
  if (group_ == nullptr) return nullptr;
  if (rank < 0 || rank >= group_->size())
    throw UsageError(fmt::format("the copy that rank {} of a group of {} has of an arena", rank, group_->size()),
                     "name a rank below ProcessGroup::size()");
  if (rank == group_->rank()) return data_;
  if (!group_->sees_all_copies()) return nullptr;
  return data_ + (rank - group_->rank()) * static_cast<std::ptrdiff_t>(stride_bytes_);
}

bool Arena::detach() noexcept {
  if (ProcessGroup* const group = std::exchange(group_, nullptr)) return group->detach(*this);
  return last_use_.sequence == 0 && std::uncaught_exceptions() == 0;
}

void ProcessGroup::check_region(const Region& region, const char* doing) const {
  check_usage(region.arena != nullptr, "a collective names no arena", "allocate one with ProcessGroup::allocate");
  if (!has(region.arena))
    throw UsageError(fmt::format("{} names an arena that is not this group's: another group has allocated it, or it "
                                 "was destroyed",
                                 doing),
                     "allocate one with this group's ProcessGroup::allocate, and keep it");
  const std::size_t element = size_of(region.dtype);
  if (region.offset_bytes % element != 0 || region.offset_bytes > region.arena->bytes() ||
      region.count > (region.arena->bytes() - region.offset_bytes) / element)
    throw UsageError(
        fmt::format("{} of {} {} elements at byte {} does not fit an arena of {} bytes", doing, region.count,
                    lockstep::name_of(region.dtype), region.offset_bytes, region.arena->bytes()),
        "name elements that lie within it, at a multiple of their size");
}

// ---- Operations ----

void ProcessGroup::check_thread(const char* doing) {
  if (forks_ != forks()) [[unlikely]]
    throw UsageError(fmt::format("{} in a forked process, on a group that was made before", doing),
                     "make a group in the process that uses it, or start that process anew (fork and exec)");
  const ThreadId here = this_thread();
  if (user_ == here) [[likely]]
    return;
  if (user_ != nullptr && sequence_ > waited_for_ && !has_let_go(sequence_)) {
    failure_.throw_if_any();
    throw UsageError(fmt::format("{} from another thread than the one whose operations are under way", doing),
                     "let one thread use a group, or wait for all operations before another one does; "
                     "ProcessGroup::duplicate() makes a group for each");
  }
  user_ = here;
}

Op ProcessGroup::next_op(OpKind kind, ReduceOp reduce, int root, std::size_t count, DType dtype) {
  if (root < 0 || root >= size_)
    throw UsageError(fmt::format("a {} names rank {} as its root, in a group of {}", name_of(kind), root, size_),
                     "name a rank below ProcessGroup::size()");
  Op op;
  op.sequence = ++sequence_;
  op.kind = kind;
  op.reduce = reduce;
  op.root = root;
  op.step = step_;
  op.count = count;
  op.dtype = dtype;
  return op;
}

Work ProcessGroup::issue(OpKind kind, ReduceOp reduce, int root, const Region& region, std::int32_t bucket,
                         const Op::Into& into, const ReductionTree* along, std::size_t partial_stride,
                         Rounding rounding) {
  check_thread(name_of(kind));
  if (kind != OpKind::kBarrier) {
    failure_.throw_if_any();  // before the region is looked at: an arena that was destroyed may be its arena
    check_region(region, name_of(kind));
  }
  Op op = next_op(kind, reduce, root, region.count, region.dtype);
  op.bucket = bucket;
  op.offset_bytes = region.offset_bytes;
  op.into = into;
  if (rounding == Rounding::kPerHost) op.tree = OpDescriptor::kRoundedPerHost;
  if (along != nullptr) {
    op.along = along;
    op.tree = along->number();
    op.partial_stride = partial_stride;
  }
  if (region.arena != nullptr) {
    op.arena = region.arena;
    op.data = region.data();
    op.stride_bytes = region.arena->stride_bytes_;
    op.arena_id = region.arena->id_;
    op.arena_bytes = region.arena->bytes_;
    // On behalf of another group, it is that one's to note.
    if (region.arena->group_ == this) region.arena->last_use_ = op;
  }
  start(op);
  return Work(this, op.sequence);
}

Work ProcessGroup::issue_at(OpKind kind, ReduceOp reduce, int root, void* data, std::size_t count, DType dtype,
                            void* part) {
  check_thread(name_of(kind));
  failure_.throw_if_any();
  Op op = next_op(kind, reduce, root, count, dtype);
  op.data = static_cast<std::byte*>(data);
  op.part = static_cast<std::byte*>(part);
  start(op);
  return Work(this, op.sequence);
}

Work ProcessGroup::all_reduce(const Region& region, ReduceOp op, std::int32_t bucket, Rounding rounding) {
  return issue(OpKind::kAllReduce, op, 0, region, bucket, {}, nullptr, 0, rounding);
}
const ReductionTree& ProcessGroup::define_tree(std::size_t leaves, std::span<const std::uint32_t> shares) {
  compare_manifests(*this, {{"shards of a sum", fmt::to_string(leaves)},
                            {"shares of it", shares.empty() ? "equal" : fmt::to_string(fmt::join(shares, ", "))}});
  const std::vector<int> order = ranks_by_host();
  std::vector<int> positions(static_cast<std::size_t>(size_));
  std::iota(positions.begin(), positions.end(), 0);
  for (std::size_t position = 0; position < order.size(); ++position)
    positions[static_cast<std::size_t>(order[position])] = static_cast<int>(position);
  const std::size_t number = trees_.size() + 1;
  auto made = std::make_unique<ReductionTree>(leaves, std::move(positions), static_cast<std::uint8_t>(number), shares);
  const auto same = std::ranges::find_if(trees_, [&](const auto& tree) { return tree->has_runs_of(*made); });
  if (same != trees_.end()) return **same;
  constexpr std::size_t kMostTrees = OpDescriptor::kRoundedPerHost - 1;
  check_usage(number <= kMostTrees, "a group's 255th reduction tree", "define a tree once, and use it again");
  return *trees_.emplace_back(std::move(made));
}

Work ProcessGroup::all_reduce(const Region& region, const ReductionTree& tree, std::size_t partial_stride,
                              std::int32_t bucket) {
  const auto is_it = [&](const auto& mine) { return mine.get() == &tree; };
  check_usage(std::ranges::any_of(trees_, is_it), "an allreduce along a tree of another group",
              "use one of this group's ProcessGroup::define_tree()");
  check_usage(region.dtype == DType::kF32 || region.dtype == DType::kF64,
              "an allreduce along a tree, of other numbers than f32 or f64", "sum in one of these");
  failure_.throw_if_any();
  if (const std::size_t most = tree.most_partials(); most > 1) {
    check_region(region, "an allreduce along a tree");
    const std::size_t end = region.offset_bytes + region.bytes();
    const std::size_t left = region.arena->bytes() - end;
    if (partial_stride % kArenaAlignment != 0 || partial_stride < region.bytes() || partial_stride > left / (most - 1))
      throw UsageError(fmt::format("partial sums of {} bytes at a stride of {}, {} of them, do not fit an arena of {} "
                                   "bytes from byte {} on",
                                   region.bytes(), partial_stride, most, region.arena->bytes(), region.offset_bytes),
                       fmt::format("let them not overlap, at multiples of {} bytes", kArenaAlignment));
  }
  return issue(OpKind::kAllReduce, ReduceOp::kSum, 0, region, bucket, {}, &tree, partial_stride);
}

Work ProcessGroup::reduce_scatter(const Region& region, ReduceOp op) {
  return issue(OpKind::kReduceScatter, op, 0, region);
}
Work ProcessGroup::all_gather(const Region& region) { return issue(OpKind::kAllGather, ReduceOp::kSum, 0, region); }
Work ProcessGroup::broadcast(const Region& region, int root) {
  return issue(OpKind::kBroadcast, ReduceOp::kSum, root, region);
}
Work ProcessGroup::reduce(const Region& region, ReduceOp op, int root) {
  return issue(OpKind::kReduce, op, root, region);
}
Work ProcessGroup::barrier() { return issue(OpKind::kBarrier, ReduceOp::kSum, 0, {}); }

// ---- The host's buffers ----

/// Elements of a buffer, and where they are in staging_.
struct ProcessGroup::Piece {
  std::size_t begin = 0;
  std::size_t count = 0;
  std::size_t offset_bytes = 0;
};

/// A buffer of `count` elements, or parts of so many, goes through the halves of staging_, at most `most` elements,
/// which have `bytes`, at a time: one half is copied while the other is on its way. Of no elements too: the ranks
/// compare that there are none. In shared memory, where all of it is there from the beginning, groups whose buffers are
/// small take little: a program may have thousands.
void ProcessGroup::stage(std::size_t count, std::size_t most, std::size_t bytes, FunctionRef<void(const Piece&)> fill,
                         FunctionRef<Work(const Piece&)> issue, FunctionRef<void(const Piece&)> take) {
  const bool small = sees_all_copies() && bytes <= kDirectBytes;
  const std::size_t half =
      std::max(small ? kDirectBytes : kStagedBytes, static_cast<std::size_t>(size_) * kArenaAlignment);
  if (staging_ == nullptr || staging_->bytes() < 2 * half) staging_ = allocate(2 * half);
  Piece pieces[2];
  std::optional<Work> works[2];
  const auto finish = [&](std::size_t i) {
    if (!works[i]) return;
    works[i]->wait_host();
    take(pieces[i]);
    works[i].reset();
  };
  std::size_t done = 0, i = 0;
  do {
    finish(i);
    pieces[i] = {done, std::min(most, count - done), i * half};
    fill(pieces[i]);
    works[i] = issue(pieces[i]);
    done += pieces[i].count;
    i = 1 - i;
  } while (done < count);
  finish(i);
  finish(1 - i);
}

Region ProcessGroup::piece_of(const Piece& piece, DType dtype) const {
  return {staging_.get(), piece.offset_bytes, piece.count, dtype};
}

/// The piece of every rank's part, each in a slice_of() its own.
Region ProcessGroup::parts_of(const Piece& piece, DType dtype) const {
  const std::size_t part = align_up(piece.count * size_of(dtype)) / size_of(dtype);
  return {staging_.get(), piece.offset_bytes, part * static_cast<std::size_t>(size_), dtype};
}

std::size_t ProcessGroup::most_of_part(DType dtype) const {
  const std::size_t lines = std::max<std::size_t>(kStagedBytes / kArenaAlignment / static_cast<std::size_t>(size_), 1);
  return lines * kArenaAlignment / size_of(dtype);
}

void ProcessGroup::check_parts(std::size_t mine, std::size_t all) const {
  const auto ranks = static_cast<std::size_t>(size_);
  if (all % ranks != 0 || all / ranks != mine)
    throw UsageError(fmt::format("{} values of each of {} ranks, and a buffer of {} for all of them", mine, size_, all),
                     "make it ProcessGroup::size() times as large");
}

void ProcessGroup::all_reduce_host(void* values, std::size_t count, DType dtype, ReduceOp op) {
  auto* const bytes = static_cast<std::byte*>(values);
  const std::size_t element = size_of(dtype);
  const bool direct = sees_all_copies() && size_ <= kMostDirectRanks;
  const std::size_t most = std::min(count, (direct ? kDirectBytes : kStagedBytes) / element);
  stage(
      count, most, most * element,
      [&](const Piece& piece) {
        copy(piece_of(piece, dtype).data(), bytes + piece.begin * element, piece.count * element);
      },
      [&](const Piece& piece) {
        Op::Into into;
        if (direct) into = {bytes + piece.begin * element, piece.count * element};
        return issue(OpKind::kAllReduce, op, 0, piece_of(piece, dtype), -1, into);
      },
      [&](const Piece& piece) {
        if (!direct) copy(bytes + piece.begin * element, piece_of(piece, dtype).data(), piece.count * element);
      });
}

void ProcessGroup::broadcast_host(void* values, std::size_t count, DType dtype, int root) {
  auto* const bytes = static_cast<std::byte*>(values);
  const std::size_t element = size_of(dtype);
  const bool direct = sees_all_copies();
  const std::size_t most = std::min(count, kStagedBytes / element);
  stage(
      count, most, most * element,
      [&](const Piece& piece) {
        if (rank_ == root) copy(piece_of(piece, dtype).data(), bytes + piece.begin * element, piece.count * element);
      },
      [&](const Piece& piece) {
        Op::Into into;
        if (direct) into = {bytes + piece.begin * element, piece.count * element};
        return issue(OpKind::kBroadcast, ReduceOp::kSum, root, piece_of(piece, dtype), -1, into);
      },
      [&](const Piece& piece) {
        if (!direct && rank_ != root)
          copy(bytes + piece.begin * element, piece_of(piece, dtype).data(), piece.count * element);
      });
}

void ProcessGroup::reduce_host(void* values, std::size_t count, DType dtype, ReduceOp op, int root) {
  auto* const bytes = static_cast<std::byte*>(values);
  const std::size_t element = size_of(dtype), most = std::min(count, kStagedBytes / element);
  stage(
      count, most, most * element,
      [&](const Piece& piece) {
        copy(piece_of(piece, dtype).data(), bytes + piece.begin * element, piece.count * element);
      },
      [&](const Piece& piece) { return issue(OpKind::kReduce, op, root, piece_of(piece, dtype)); },
      [&](const Piece& piece) {
        if (rank_ == root) copy(bytes + piece.begin * element, piece_of(piece, dtype).data(), piece.count * element);
      });
}

void ProcessGroup::all_gather_host(const void* mine, std::size_t count, DType dtype, void* all) {
  const auto* const from = static_cast<const std::byte*>(mine);
  auto* const to = static_cast<std::byte*>(all);
  const std::size_t element = size_of(dtype), ranks = static_cast<std::size_t>(size_);
  const bool direct = sees_all_copies();
  const std::size_t most = std::min(count, most_of_part(dtype));
  stage(
      count, most, align_up(most * element) * ranks,
      [&](const Piece& piece) {
        const Region parts = parts_of(piece, dtype);
        copy(parts.data() + parts.bytes() / ranks * static_cast<std::size_t>(rank_), from + piece.begin * element,
             piece.count * element);
      },
      [&](const Piece& piece) {
        Op::Into into;
        if (direct) into = {to + piece.begin * element, piece.count * element, count * element};
        return issue(OpKind::kAllGather, ReduceOp::kSum, 0, parts_of(piece, dtype), -1, into);
      },
      [&](const Piece& piece) {
        const Region parts = parts_of(piece, dtype);
        for (std::size_t r = 0; !direct && r < ranks; ++r)
          copy(to + (r * count + piece.begin) * element, parts.data() + parts.bytes() / ranks * r,
               piece.count * element);
      });
}

void ProcessGroup::reduce_scatter_host(const void* all, void* mine, std::size_t count, DType dtype, ReduceOp op) {
  const auto* const from = static_cast<const std::byte*>(all);
  auto* const to = static_cast<std::byte*>(mine);
  const std::size_t element = size_of(dtype), ranks = static_cast<std::size_t>(size_);
  const bool direct = sees_all_copies();
  const std::size_t most = std::min(count, most_of_part(dtype));
  stage(
      count, most, align_up(most * element) * ranks,
      [&](const Piece& piece) {
        const Region parts = parts_of(piece, dtype);
        for (std::size_t r = 0; r < ranks; ++r)
          copy(parts.data() + parts.bytes() / ranks * r, from + (r * count + piece.begin) * element,
               piece.count * element);
      },
      [&](const Piece& piece) {
        Op::Into into;
        if (direct) into = {to + piece.begin * element, piece.count * element};
        return issue(OpKind::kReduceScatter, op, 0, parts_of(piece, dtype), -1, into);
      },
      [&](const Piece& piece) {
        const Region parts = parts_of(piece, dtype);
        if (!direct)
          copy(to + piece.begin * element, parts.data() + parts.bytes() / ranks * static_cast<std::size_t>(rank_),
               piece.count * element);
      });
}

void ProcessGroup::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void ProcessGroup::zero(const Region& region) {
  check_region(region, "zeroing");
  if (region.count > 0) std::memset(region.data(), 0, region.bytes());
}

void ProcessGroup::make_wait(std::uint64_t sequence, StreamView) { wait_done(sequence, Deadline::after(timeout_)); }

Arena& ProcessGroup::control_arena() {
  if (control_ == nullptr) control_ = allocate(static_cast<std::size_t>(size_) * (kObjectPieceBytes + kArenaAlignment));
  return *control_;
}

std::vector<std::vector<std::byte>> ProcessGroup::all_gather_objects(std::span<const std::byte> mine) {
  LOCKSTEP_ASSERT(device().kind == DeviceKind::kCpu, "objects through an arena on {}", to_string(device()));
  Arena& arena = control_arena();
  const auto ranks = static_cast<std::size_t>(size_);

  // Sizes first: one cache line per rank, so that rank r's slice is line r.
  const Region lengths{&arena, 0, ranks * (kArenaAlignment / 8), DType::kI64};
  const auto lines = arena.view<std::int64_t>(0, lengths.count);
  lines[static_cast<std::size_t>(rank_) * 8] = static_cast<std::int64_t>(mine.size());
  all_gather(lengths).wait_host();
  std::vector<std::vector<std::byte>> objects(ranks);
  std::size_t longest = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    objects[r].resize(static_cast<std::size_t>(lines[r * 8]));
    longest = std::max(longest, objects[r].size());
  }

  // Then the bytes, piece by piece, each rank's piece in a slice of its own.
  const Region pieces{&arena, 0, ranks * kObjectPieceBytes, DType::kU8};
  for (std::size_t at = 0; at < longest; at += kObjectPieceBytes) {
    const auto copy_length = [&](std::size_t size) { return at < size ? std::min(kObjectPieceBytes, size - at) : 0; };
    const std::size_t own = static_cast<std::size_t>(rank_) * kObjectPieceBytes;
    if (const std::size_t n = copy_length(mine.size()); n > 0) std::memcpy(arena.data() + own, mine.data() + at, n);
    all_gather(pieces).wait_host();
    for (std::size_t r = 0; r < ranks; ++r)
      if (const std::size_t n = copy_length(objects[r].size()); n > 0)
        std::memcpy(objects[r].data() + at, arena.data() + r * kObjectPieceBytes, n);
  }
  return objects;
}

std::vector<std::vector<std::byte>> ProcessGroup::gather_objects(std::span<const std::byte> mine, int root) {
  auto all = all_gather_objects(mine);
  if (rank_ != root) all.clear();
  return all;
}

std::vector<std::string> ProcessGroup::all_gather_text(const std::string& mine) {
  std::vector<std::string> texts;
  for (const auto& object : all_gather_objects(std::as_bytes(std::span(mine))))
    texts.emplace_back(reinterpret_cast<const char*>(object.data()), object.size());
  return texts;
}

std::vector<std::int64_t> ProcessGroup::all_gather_numbers(std::int64_t mine) {
  std::vector<std::int64_t> numbers;
  for (const auto& object : all_gather_objects(std::as_bytes(std::span(&mine, 1)))) {
    LOCKSTEP_ASSERT(object.size() == sizeof mine, "a number of {} bytes", object.size());
    std::memcpy(&numbers.emplace_back(), object.data(), sizeof mine);
  }
  return numbers;
}

bool Work::done() const {
  if (group_ == nullptr) return true;
  group_->check_thread("a question");
  return group_->is_done(sequence_);
}
void Work::wait_host(Deadline deadline) const {
  if (group_ == nullptr) return;
  group_->check_thread("a wait");
  group_->wait_done(sequence_, deadline);
  group_->waited_for_ = std::max(group_->waited_for_, sequence_);
}
void Work::wait_host() const {
  if (group_ == nullptr) return;
  group_->check_thread("a wait");
  // On the CPU few bytes are often there already: no deadline, whose clock takes a tenth of the time of such an
  // operation. On a GPU its stream has to be waited for.
  const bool done = group_->device().kind == DeviceKind::kCpu && group_->is_done(sequence_);
  if (!done) group_->wait_done(sequence_, Deadline::after(group_->timeout_));
  group_->waited_for_ = std::max(group_->waited_for_, sequence_);
}
void Work::wait(StreamView stream) const {
  if (group_ == nullptr) return;
  group_->check_thread("a wait");
  group_->make_wait(sequence_, stream);
}

}  // namespace lockstep::comm
