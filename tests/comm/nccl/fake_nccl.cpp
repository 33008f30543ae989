#include "tests/comm/nccl/fake_nccl.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/comm/reference.h"
#include "tests/soft_cuda/soft_cuda.h"

namespace lockstep::comm::fake_nccl {
namespace {

using reference::Bytes;
using namespace std::chrono_literals;

constexpr int kMostRanks = 8;
constexpr std::size_t kStagingBytes = std::size_t{1} << 20;

/// What one rank sends to another one, piece by piece.
struct Mailbox {
  static constexpr std::size_t kBytes = std::size_t{1} << 16;
  std::atomic<std::uint64_t> written, read;  // pieces
  std::size_t bytes;                         // of the one that is there
  std::array<std::byte, kBytes> data;
};

/// The memory that the ranks of a communicator share.
struct Shared {
  std::array<std::array<Mailbox, kMostRanks>, kMostRanks> mail;  // by sender, by receiver
  std::array<std::atomic<std::uint64_t>, kMostRanks> arrived;    // at how many barriers
  std::atomic<std::uint32_t> changes;                            // of the above: a futex
  std::array<std::array<std::byte, kStagingBytes>, kMostRanks> staging;
};

struct Comm {
  int rank = 0;
  int size = 0;
  Shared* shared = nullptr;
  std::uint64_t barriers = 0;  // of this rank
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> state{ncclSuccess};
  int looks_left = 0;  // until what is in progress comes to its end
  bool hangs = false;
  ncclResult_t comes_to = ncclSuccess;
  std::function<bool()> when;  // and not before this is true
  cudaStream_t stream = nullptr;
  std::vector<std::function<void()>> not_started;  // of a call that is in progress
};

std::mutex mutex;  // of all that follows
Script the_script;
Counts counted;
std::vector<std::string> called;
std::map<void*, void*> memory;  // as it was given away, and as it was allocated

thread_local int group_depth = 0;
thread_local std::vector<std::function<void()>> grouped;
thread_local Comm* group_comm = nullptr;

/// A send or a receive of a group, all of which are under way at once.
struct PairMove {
  bool sends = false;
  int peer = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t done = 0;
};
thread_local std::vector<PairMove> pairs;

Comm* of(ncclComm_t comm) { return reinterpret_cast<Comm*>(comm); }

void note(const std::string& call) {
  const std::lock_guard lock(mutex);
  called.push_back(call);
}

void tell_others(Shared& shared) {
  shared.changes.fetch_add(1);
  ::syscall(SYS_futex, &shared.changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Sleeps unless something has changed since `seen` was read. Not for long: an abort changes nothing.
void wait_for_others(Shared& shared, std::uint32_t seen) {
  const timespec patience{.tv_sec = 0, .tv_nsec = 1'000'000};
  ::syscall(SYS_futex, &shared.changes, FUTEX_WAIT, seen, &patience, nullptr, 0);
}

/// Whether all ranks came: false where this one was aborted first.
bool meet(Comm& comm) {
  comm.shared->arrived[static_cast<std::size_t>(comm.rank)].store(++comm.barriers, std::memory_order_release);
  tell_others(*comm.shared);
  for (;;) {
    const std::uint32_t seen = comm.shared->changes.load();
    bool all = true;
    for (int rank = 0; rank < comm.size; ++rank)
      all =
          all && comm.shared->arrived[static_cast<std::size_t>(rank)].load(std::memory_order_acquire) >= comm.barriers;
    if (all) return true;
    if (comm.aborted) return false;
    wait_for_others(*comm.shared, seen);
  }
}

/// What a rank contributes, and what becomes of all contributions.
struct Exchange {
  const std::byte* from = nullptr;  // nullptr: nothing
  std::byte* to = nullptr;          // nullptr: this rank gets nothing
  std::size_t bytes = 0;
  std::function<Bytes(const std::vector<Bytes>&)> combine;
};

void run(Comm& comm, const Exchange& exchange) {
  for (std::size_t at = 0; at < exchange.bytes; at += kStagingBytes) {
    const std::size_t n = std::min(kStagingBytes, exchange.bytes - at);
    if (exchange.from != nullptr)
      std::memcpy(comm.shared->staging[static_cast<std::size_t>(comm.rank)].data(), exchange.from + at, n);
    if (!meet(comm)) return;
    if (exchange.to != nullptr) {
      std::vector<Bytes> parts;
      for (int rank = 0; rank < comm.size; ++rank) {
        const std::byte* const part = comm.shared->staging[static_cast<std::size_t>(rank)].data();
        parts.emplace_back(part, part + n);
      }
      const Bytes result = exchange.combine(parts);
      std::memcpy(exchange.to + at, result.data(), n);
    }
    if (!meet(comm)) return;
  }
}

/// Whether anything was moved.
bool move_some(Comm& comm, PairMove& move) {
  const auto me = static_cast<std::size_t>(comm.rank), peer = static_cast<std::size_t>(move.peer);
  Mailbox& box = move.sends ? comm.shared->mail[me][peer] : comm.shared->mail[peer][me];
  const bool full = box.written.load(std::memory_order_acquire) > box.read.load(std::memory_order_acquire);
  if (move.sends == full) return false;
  const std::size_t n = move.sends ? std::min(Mailbox::kBytes, move.bytes - move.done) : box.bytes;
  if (move.sends) {
    std::memcpy(box.data.data(), move.data + move.done, n);
    box.bytes = n;
    box.written.fetch_add(1, std::memory_order_release);
  } else {
    std::memcpy(move.data + move.done, box.data.data(), n);
    box.read.fetch_add(1, std::memory_order_release);
  }
  tell_others(*comm.shared);
  move.done += n;
  return true;
}

/// Of one pair and direction the first that is not done.
void run_pairs(Comm& comm, std::vector<PairMove> moves) {
  while (!moves.empty() && !comm.aborted) {
    const std::uint32_t seen = comm.shared->changes.load();
    bool moved = false;
    for (std::size_t i = 0; i < moves.size(); ++i) {
      const auto same_way = [&](const PairMove& other) {
        return other.sends == moves[i].sends && other.peer == moves[i].peer;
      };
      const auto here = moves.begin() + static_cast<std::ptrdiff_t>(i);
      if (std::find_if(moves.begin(), here, same_way) == here) moved |= move_some(comm, moves[i]);
    }
    std::erase_if(moves, [](const PairMove& move) { return move.done == move.bytes; });
    if (!moved && !moves.empty()) wait_for_others(*comm.shared, seen);
  }
}

void begin(Comm& comm, bool hangs, ncclResult_t comes_to) {
  comm.looks_left = the_script.looks_in_progress;
  comm.hangs = hangs;
  comm.comes_to = comes_to;
  const bool at_once = comm.looks_left == 0 && !hangs && comm.when == nullptr;
  comm.state = at_once ? comes_to : ncclInProgress;
}

/// Gives the stream what a call asked for, once the call has come to its end: NCCL does that on a thread of its own,
/// and what the caller gives the stream before comes before.
void start_work(Comm& comm, std::unique_lock<std::mutex>& lock) {
  if (comm.state != ncclSuccess) return;
  const bool stalls = the_script.stalls;
  auto work = std::exchange(comm.not_started, {});
  lock.unlock();  // an eager device runs it now
  for (auto& piece : work)
    soft_cuda::submit_collective(comm.stream, [&comm, stalls, piece = std::move(piece)] {
      while (stalls && !comm.aborted) std::this_thread::sleep_for(1ms);
      if (comm.aborted) return;
      if (the_script.on_run) the_script.on_run();
      piece();
    });
  lock.lock();
}

ncclResult_t finish_group() {
  Comm& comm = *group_comm;
  std::unique_lock lock(mutex);
  if (!pairs.empty()) grouped.emplace_back([&comm, moves = std::exchange(pairs, {})] { run_pairs(comm, moves); });
  if (the_script.call != ncclSuccess && the_script.calls_before-- <= 0) {
    grouped.clear();
    return the_script.call;
  }
  if (comm.state == ncclInProgress) ++counted.calls_in_progress;
  comm.not_started = std::exchange(grouped, {});
  begin(comm, the_script.call_hangs, the_script.call_ends);
  start_work(comm, lock);
  return comm.state;
}

ncclResult_t group_start() {
  note("group(");
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t group_end() {
  note(")");
  if (--group_depth > 0) return ncclSuccess;
  return group_comm == nullptr ? ncclSuccess : finish_group();
}

ncclResult_t issue(ncclComm_t handle, cudaStream_t stream, std::function<void()> work) {
  Comm& comm = *of(handle);
  group_comm = &comm;
  comm.stream = stream;
  grouped.push_back(std::move(work));
  return group_depth > 0 ? ncclSuccess : finish_group();
}

DType dtype_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat32: return DType::kF32;
    case ncclFloat64: return DType::kF64;
    case ncclBfloat16: return DType::kBF16;
    case ncclFloat16: return DType::kF16;
    case ncclInt32: return DType::kI32;
    case ncclInt64: return DType::kI64;
    default: return DType::kU8;
  }
}

ReduceOp reduction_of(ncclRedOp_t op) {
  if (op == ncclProd) return ReduceOp::kProd;
  return op == ncclMin ? ReduceOp::kMin : op == ncclMax ? ReduceOp::kMax : ReduceOp::kSum;
}

std::string text_of(std::size_t count, ncclDataType_t type) {
  return fmt::format("{} {}", count, lockstep::name_of(dtype_of(type)));
}

auto reducer(ncclDataType_t type, ncclRedOp_t op) {
  return [dtype = dtype_of(type), reduction = reduction_of(op)](const std::vector<Bytes>& parts) {
    return reference::reduce(dtype, reduction, parts);
  };
}

auto chooser(int rank) {
  // Of ranks that are only said to be there, the one that is there.
  return [rank](const std::vector<Bytes>& parts) {
    return parts[std::min(static_cast<std::size_t>(rank), parts.size() - 1)];
  };
}

const std::byte* bytes_of(const void* p) { return static_cast<const std::byte*>(p); }
std::byte* bytes_of(void* p) { return static_cast<std::byte*>(p); }

ncclResult_t all_reduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                        ncclComm_t comm, cudaStream_t stream) {
  note(fmt::format("allreduce {} {}", text_of(count, type), name_of(reduction_of(op))));
  return issue(comm, stream, [=] {
    run(*of(comm), {bytes_of(from), bytes_of(to), count * size_of(dtype_of(type)), reducer(type, op)});
  });
}

ncclResult_t reduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                    ncclComm_t comm, cudaStream_t stream) {
  note(fmt::format("reduce {} {} to {}", text_of(count, type), name_of(reduction_of(op)), root));
  return issue(comm, stream, [=] {
    Comm& own = *of(comm);
    run(own, {bytes_of(from), own.rank == root ? bytes_of(to) : nullptr, count * size_of(dtype_of(type)),
              reducer(type, op)});
  });
}

ncclResult_t broadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  note(fmt::format("broadcast {} from {}", text_of(count, type), root));
  return issue(comm, stream, [=] {
    Comm& own = *of(comm);
    run(own,
        {own.rank == root ? bytes_of(from) : nullptr, bytes_of(to), count * size_of(dtype_of(type)), chooser(root)});
  });
}

ncclResult_t reduce_scatter(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                            ncclComm_t comm, cudaStream_t stream) {
  note(fmt::format("reduce_scatter {} {}", text_of(count, type), name_of(reduction_of(op))));
  return issue(comm, stream, [=] {
    Comm& own = *of(comm);
    const std::size_t bytes = count * size_of(dtype_of(type));
    for (int rank = 0; rank < own.size; ++rank)
      run(own, {bytes_of(from) + static_cast<std::size_t>(rank) * bytes, own.rank == rank ? bytes_of(to) : nullptr,
                bytes, reducer(type, op)});
  });
}

ncclResult_t all_gather(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                        cudaStream_t stream) {
  note(fmt::format("allgather {}", text_of(count, type)));
  return issue(comm, stream, [=] {
    Comm& own = *of(comm);
    const std::size_t bytes = count * size_of(dtype_of(type));
    for (int rank = 0; rank < own.size; ++rank)
      run(own, {own.rank == rank ? bytes_of(from) : nullptr, bytes_of(to) + static_cast<std::size_t>(rank) * bytes,
                bytes, chooser(rank)});
  });
}

ncclResult_t issue_pair(ncclComm_t handle, cudaStream_t stream, const PairMove& move) {
  Comm& comm = *of(handle);
  group_comm = &comm;
  comm.stream = stream;
  if (move.bytes > 0) pairs.push_back(move);
  return group_depth > 0 ? ncclSuccess : finish_group();
}

ncclResult_t send(const void* from, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  note(fmt::format("send {} to {}", text_of(count, type), peer));
  return issue_pair(comm, stream,
                    {.sends = true,
                     .peer = peer,
                     .data = bytes_of(const_cast<void*>(from)),
                     .bytes = count * size_of(dtype_of(type))});
}

ncclResult_t recv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  note(fmt::format("recv {} from {}", text_of(count, type), peer));
  return issue_pair(comm, stream,
                    {.sends = false, .peer = peer, .data = bytes_of(to), .bytes = count * size_of(dtype_of(type))});
}

// ---- Communicators ----

ncclResult_t get_version(int* version) {
  *version = the_script.version;
  return ncclSuccess;
}

const char* get_error_string(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclSystemError: return "unhandled system error";
    case ncclInvalidUsage: return "invalid usage";
    default: return "some error";
  }
}

const char* get_last_error(ncclComm_t) { return the_script.last_error.c_str(); }

ncclResult_t get_unique_id(ncclUniqueId* id) {
  if (the_script.unique_id != ncclSuccess) return the_script.unique_id;
  // Open for as long as this process lives: the others come when they like.
  const int fd = ::memfd_create("fake_nccl", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, sizeof(Shared)) != 0) return ncclSystemError;
  std::memset(id, 0, sizeof *id);
  const std::string path = fmt::format("/proc/{}/fd/{}", ::getpid(), fd);
  path.copy(id->internal, sizeof id->internal - 1);
  return ncclSuccess;
}

ncclResult_t comm_init_rank_config(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  const std::lock_guard lock(mutex);
  *made = nullptr;
  if (the_script.init != ncclSuccess) return the_script.init;
  if ((config->blocking != 0 && !the_script.may_block) || size > kMostRanks) return ncclInvalidArgument;
  const int fd = ::open(id.internal, O_RDWR | O_CLOEXEC);
  if (fd < 0) return ncclSystemError;
  void* const shared = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (shared == MAP_FAILED) return ncclSystemError;
  ++counted.inits;
  auto* const comm = new Comm;
  comm->rank = rank;
  comm->size = size;
  comm->shared = static_cast<Shared*>(shared);
  comm->barriers = 1;
  comm->shared->arrived[static_cast<std::size_t>(rank)] = 1;
  comm->when = [comm] {
    return std::all_of(comm->shared->arrived.begin(), comm->shared->arrived.begin() + comm->size,
                       [](const auto& arrived) { return arrived >= 1; });
  };
  begin(*comm, the_script.init_hangs, the_script.init_ends);
  if (config->blocking != 0) {
    while (!comm->when()) std::this_thread::yield();
    comm->when = nullptr;
    comm->state = the_script.init_ends;
  }
  *made = reinterpret_cast<ncclComm_t>(comm);
  return comm->state;
}

ncclResult_t comm_get_async_error(ncclComm_t handle, ncclResult_t* result) {
  std::unique_lock lock(mutex);
  ++counted.looks_for_errors;
  Comm& comm = *of(handle);
  if (comm.state == ncclInProgress && !comm.hangs && (comm.when == nullptr || comm.when())) {
    if (comm.looks_left-- <= 0) {
      comm.state = comm.comes_to;
      comm.when = nullptr;
      start_work(comm, lock);
    }
  }
  *result = comm.state == ncclSuccess ? the_script.async : comm.state.load();
  return ncclSuccess;
}

void end(Comm* comm) {
  ::munmap(comm->shared, sizeof(Shared));
  delete comm;
}

ncclResult_t comm_finalize(ncclComm_t handle) {
  const std::lock_guard lock(mutex);
  if (of(handle)->state == ncclInProgress) ++counted.calls_in_progress;
  ++counted.finalizes;
  begin(*of(handle), the_script.finalize_hangs, ncclSuccess);
  return of(handle)->state;
}

ncclResult_t comm_destroy(ncclComm_t handle) {
  {
    const std::lock_guard lock(mutex);
    ++counted.destroys;
  }
  end(of(handle));
  return ncclSuccess;
}

// Lives on: what is left in its streams looks at it.
ncclResult_t comm_abort(ncclComm_t handle) {
  of(handle)->aborted = true;
  {
    const std::lock_guard lock(mutex);
    ++counted.aborts;
  }
  const auto hangs = [] {
    const std::lock_guard lock(mutex);
    return the_script.abort_hangs;
  };
  while (hangs()) std::this_thread::sleep_for(1ms);
  return ncclSuccess;
}

// ---- Memory ----

// NCCL's is page-aligned, and ncclMemFree() unmaps it without waiting for anything.
ncclResult_t mem_alloc(void** made, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  if (the_script.mem_alloc != ncclSuccess) return the_script.mem_alloc;
  constexpr std::size_t kPage = 4096;
  void* whole = nullptr;
  if (cudaMalloc(&whole, bytes + kPage) != cudaSuccess) return ncclUnhandledCudaError;
  const auto address = (reinterpret_cast<std::uintptr_t>(whole) + kPage - 1) / kPage * kPage;
  *made = reinterpret_cast<void*>(address);
  memory[*made] = whole;
  ++counted.allocations;
  return ncclSuccess;
}

ncclResult_t mem_free(void* made) {
  const std::lock_guard lock(mutex);
  const auto found = memory.find(made);
  if (found == memory.end()) return ncclInvalidArgument;
  soft_cuda::unmap(found->second);
  memory.erase(found);
  --counted.allocations;
  return ncclSuccess;
}

ncclResult_t comm_register(ncclComm_t, void* buffer, std::size_t, void** handle) {
  const std::lock_guard lock(mutex);
  *handle = nullptr;
  if (the_script.comm_register != ncclSuccess) return the_script.comm_register;
  if (the_script.registers_nothing) return ncclSuccess;
  *handle = buffer;
  ++counted.registrations;
  return ncclSuccess;
}

ncclResult_t comm_deregister(ncclComm_t, void*) {
  const std::lock_guard lock(mutex);
  --counted.registrations;
  return ncclSuccess;
}

}  // namespace

const NcclApi& api() {
  static const NcclApi functions = {
      .get_version = get_version,
      .get_error_string = get_error_string,
      .get_last_error = get_last_error,
      .get_unique_id = get_unique_id,
      .comm_init_rank_config = comm_init_rank_config,
      .comm_get_async_error = comm_get_async_error,
      .comm_finalize = comm_finalize,
      .comm_destroy = comm_destroy,
      .comm_abort = comm_abort,
      .mem_alloc = mem_alloc,
      .mem_free = mem_free,
      .comm_register = comm_register,
      .comm_deregister = comm_deregister,
      .all_reduce = all_reduce,
      .reduce_scatter = reduce_scatter,
      .all_gather = all_gather,
      .broadcast = broadcast,
      .reduce = reduce,
      .send = send,
      .recv = recv,
      .group_start = group_start,
      .group_end = group_end,
  };
  return functions;
}

Script& script() { return the_script; }

Counts counts() {
  const std::lock_guard lock(mutex);
  return counted;
}

std::vector<std::string> calls() {
  const std::lock_guard lock(mutex);
  return called;
}

void reset() {
  const std::lock_guard lock(mutex);
  the_script = {};
  counted = {};
  called.clear();
}

}  // namespace lockstep::comm::fake_nccl

namespace lockstep::comm {

const NcclApi& load_nccl() { return fake_nccl::api(); }

}  // namespace lockstep::comm
