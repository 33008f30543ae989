#include "lockstep/nn/tensor/tensor.h"

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/nn/tensor/allocator.h"

namespace lockstep::nn {
namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kOrdinary = 0, kGraph = 1;         // pools
constexpr std::size_t kMaxBytes = std::size_t{1} << 60;  // sums of sizes below do not overflow

// Class 4k + q holds blocks of (4 + q) · 2^k cache lines, q in 0…3.
int class_of(std::size_t bytes) {
  const std::size_t lines = std::max<std::size_t>(4, (bytes + kCacheLine - 1) / kCacheLine);
  const int k = std::bit_width(lines) - 3;
  const std::size_t quarter = std::size_t{1} << k;
  const std::size_t q = (lines - 4 * quarter + quarter - 1) / quarter;  // 4 is class 4(k + 1) + 0
  return 4 * k + static_cast<int>(q);
}

std::size_t class_bytes(int size_class) {
  return ((4 + static_cast<std::size_t>(size_class % 4)) << (size_class / 4)) * kCacheLine;
}

}  // namespace

void Tensor::refuse_type(DType wanted) const {
  throw UsageError(fmt::format("a tensor of {} {} read as {}", name_of(dtype_), to_string(shape_), name_of(wanted)),
                   "read it as its own type (Tensor::dtype()), or give one of the wanted type");
}

void Tensor::refuse_nothing() const {
  check_usage(
      data_ == nullptr,
      "a model or a loss looks at numbers, and is run on shapes alone to estimate its memory, or to export it",
      "compute with operators (nn/autograd/functions.h); set TrainConfig::estimate_memory to false where it has "
      "to look");
  throw UsageError("a tensor that holds nothing is read",
                   "ask Tensor::defined() before; gradients are there after backward, and only where some has flowed");
}

void Tensor::refuse_pitch() const {
  throw UsageError(
      fmt::format("rows of {} are {} elements apart and are read as contiguous ones", to_string(shape_), pitch_),
      "copy it with Backend::contiguous() before");
}

void Tensor::refuse_shape(const Shape& wanted) const {
  throw UsageError(fmt::format("{} does not hold the elements of {}", to_string(wanted), to_string(shape_)),
                   "give a shape of as many elements");
}

void Tensor::refuse_rows(std::int64_t begin, std::int64_t end) const {
  throw UsageError(fmt::format("rows {} to {} of {}", begin, end, to_string(shape_)),
                   "give a range within the first axis");
}

/// What an allocator's blocks need: it ends with the last of these.
class Heap {
 public:
  explicit Heap(std::unique_ptr<MemorySource> source)
      : source_(std::move(source)), free_lists_{std::vector<Block*>(4 * 64), std::vector<Block*>(4 * 64)} {}
  ~Heap() {
    for (const auto& block : blocks_) source_->free(block->data, block->bytes);
  }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// Its allocator has ended. `this` may have by the time that it returns.
  void close() noexcept {
    bool empty = false;
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      empty = used_ == 0;
      if (!empty) source_->outlive_device();
    }
    if (empty) delete this;
  }

  Block* acquire(std::size_t bytes);
  /// The same: the last block takes it along.
  void recycle(Block* block) noexcept;
  void use(CachingAllocator::Pool pool) {
    const std::lock_guard lock(mutex_);
    pool_ = pool == CachingAllocator::Pool::kGraph ? kGraph : kOrdinary;
  }
  void trim() {
    const std::lock_guard lock(mutex_);
    give_back_idle(kOrdinary);
  }
  void limit(std::optional<std::size_t> bytes) {
    const std::lock_guard lock(mutex_);
    allowed_ = bytes;
  }
  void add(MemoryHolder& holder) {
    const std::lock_guard lock(mutex_);
    holders_.push_back(&holder);
    holders_thread_ = std::this_thread::get_id();
  }
  void remove(MemoryHolder& holder) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase(holders_, &holder);
  }
  CachingAllocator::Stats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  Device device() const { return source_->device(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  Block* make_block(int size_class, std::size_t used, Lock& lock);
  std::byte* allocate(std::size_t bytes, std::size_t used, Lock& lock);
  bool give_back_idle(std::size_t pool);
  bool give_back_held(Lock& lock);

  std::unique_ptr<MemorySource> source_;
  mutable std::mutex mutex_;
  std::vector<MemoryHolder*> holders_;
  std::thread::id holders_thread_;
  std::array<std::vector<Block*>, 2> free_lists_;  // by pool and size class
  std::size_t pool_ = kOrdinary;                   // where acquire() takes from
  std::optional<std::size_t> allowed_;             // bytes that may yet be asked for
  std::vector<std::unique_ptr<Block>> blocks_;     // all that exist
  std::size_t used_ = 0;                           // of them
  bool closed_ = false;
  CachingAllocator::Stats stats_;
};

Block* Heap::acquire(std::size_t bytes) {
  Lock lock(mutex_);
  if (allowed_) {
    if (bytes > *allowed_) throw MemoryLimitReached();
    *allowed_ -= bytes;
  }
  if (bytes > kMaxBytes)
    throw DeviceError(fmt::format("no memory holds {}", human_bytes(static_cast<double>(bytes))),
                      "use a smaller batch or model");
  const int size_class = class_of(bytes);
  Block*& list = free_lists_[pool_][static_cast<std::size_t>(size_class)];
  Block* block = list;
  if (block != nullptr)
    list = block->next_free;
  else
    block = make_block(size_class, bytes, lock);
  ++used_;
  block->references.store(1, std::memory_order_relaxed);
  stats_.bytes_in_use += block->bytes;
  stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
  block->asked = bytes;
  stats_.bytes_asked += bytes;
  stats_.peak_bytes_asked = std::max(stats_.peak_bytes_asked, stats_.bytes_asked);
  return block;
}

Block* Heap::make_block(int size_class, std::size_t used, Lock& lock) {
  auto made = std::make_unique<Block>();
  made->bytes = class_bytes(size_class);
  made->size_class = size_class;
  made->pool = static_cast<int>(pool_);
  made->owner = this;
  made->data = allocate(made->bytes, used, lock);
  ++stats_.system_allocations;
  stats_.bytes_held += made->bytes;
  return blocks_.emplace_back(std::move(made)).get();
}

std::byte* Heap::allocate(std::size_t bytes, std::size_t used, Lock& lock) {
  try {
    return source_->allocate_in_part(bytes, used);
  } catch (const OutOfMemoryError&) {
    if (!give_back_idle(kOrdinary) && !give_back_held(lock)) throw;
  }
  try {
    return source_->allocate_in_part(bytes, used);
  } catch (const OutOfMemoryError&) {
    if (!give_back_held(lock)) throw;
  }
  return source_->allocate_in_part(bytes, used);
}

// Holders give blocks back, for which the lock is taken.
bool Heap::give_back_held(Lock& lock) {
  if (holders_.empty() || holders_thread_ != std::this_thread::get_id()) return false;
  const auto holders = holders_;
  lock.unlock();
  const bool all = std::ranges::all_of(holders, [](MemoryHolder* holder) { return holder->give_up(); });
  lock.lock();
  if (!all) return false;
  const bool some = give_back_idle(kOrdinary);
  return give_back_idle(kGraph) || some;
}

bool Heap::give_back_idle(std::size_t pool) {
  for (Block*& list : free_lists_[pool])
    for (; list != nullptr; list = list->next_free) {
      source_->free(list->data, list->bytes);
      stats_.bytes_held -= list->bytes;
      list->data = nullptr;
    }
  return std::erase_if(blocks_, [](const auto& block) { return block->data == nullptr; }) > 0;
}

void Heap::recycle(Block* block) noexcept {
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    Block*& list = free_lists_[static_cast<std::size_t>(block->pool)][static_cast<std::size_t>(block->size_class)];
    block->next_free = list;
    list = block;
    stats_.bytes_in_use -= block->bytes;
    stats_.bytes_asked -= block->asked;
    last = --used_ == 0 && closed_;
  }
  if (last) delete this;
}

void recycle(Block* block) noexcept { block->owner->recycle(block); }
Device device_of(const Block& block) { return block.owner->device(); }

CachingAllocator::CachingAllocator(std::unique_ptr<MemorySource> source) : heap_(new Heap(std::move(source))) {}
CachingAllocator::~CachingAllocator() { heap_->close(); }
Block* CachingAllocator::acquire(std::size_t bytes) { return heap_->acquire(bytes); }
void CachingAllocator::use(Pool pool) { heap_->use(pool); }
void CachingAllocator::add(MemoryHolder& holder) { heap_->add(holder); }
void CachingAllocator::remove(MemoryHolder& holder) noexcept { heap_->remove(holder); }
Device CachingAllocator::device() const { return heap_->device(); }
void CachingAllocator::limit(std::optional<std::size_t> bytes) { heap_->limit(bytes); }
void CachingAllocator::trim() { heap_->trim(); }
CachingAllocator::Stats CachingAllocator::stats() const { return heap_->stats(); }

}  // namespace lockstep::nn
