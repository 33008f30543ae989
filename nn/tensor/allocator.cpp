#include "nn/tensor/allocator.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::nn {
namespace {

constexpr std::size_t kCacheLine = 64;
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

CachingAllocator::CachingAllocator(std::unique_ptr<MemorySource> source)
    : source_(std::move(source)), free_lists_{std::vector<Block*>(4 * 64), std::vector<Block*>(4 * 64)} {}

CachingAllocator::~CachingAllocator() {
  for (const auto& block : blocks_) source_->free(block->data, block->bytes);
}

void CachingAllocator::limit(std::optional<std::size_t> bytes) {
  const std::lock_guard lock(mutex_);
  allowed_ = bytes;
}

Block* CachingAllocator::acquire(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
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
    block = make_block(size_class);
  block->references.store(1, std::memory_order_relaxed);
  stats_.bytes_in_use += block->bytes;
  stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
  block->asked = bytes;
  stats_.bytes_asked += bytes;
  stats_.peak_bytes_asked = std::max(stats_.peak_bytes_asked, stats_.bytes_asked);
  return block;
}

Block* CachingAllocator::make_block(int size_class) {
  auto made = std::make_unique<Block>();
  made->bytes = class_bytes(size_class);
  made->size_class = size_class;
  made->pool = static_cast<int>(pool_);
  made->owner = this;
  made->data = allocate(made->bytes);
  ++stats_.system_allocations;
  stats_.bytes_held += made->bytes;
  return blocks_.emplace_back(std::move(made)).get();
}

std::byte* CachingAllocator::allocate(std::size_t bytes) {
  try {
    return source_->allocate(bytes);
  } catch (const OutOfMemoryError&) {
    if (!give_back_idle()) throw;
  }
  return source_->allocate(bytes);
}

bool CachingAllocator::give_back_idle() {
  constexpr std::size_t kOrdinary = 0;
  for (Block*& list : free_lists_[kOrdinary])
    for (; list != nullptr; list = list->next_free) {
      source_->free(list->data, list->bytes);
      stats_.bytes_held -= list->bytes;
      list->data = nullptr;
    }
  return std::erase_if(blocks_, [](const auto& block) { return block->data == nullptr; }) > 0;
}

void CachingAllocator::use(Pool pool) {
  const std::lock_guard lock(mutex_);
  pool_ = pool == Pool::kRecorded ? 1 : 0;
}

void CachingAllocator::recycle(Block* block) noexcept {
  const std::lock_guard lock(mutex_);
  Block*& list = free_lists_[static_cast<std::size_t>(block->pool)][static_cast<std::size_t>(block->size_class)];
  block->next_free = list;
  list = block;
  stats_.bytes_in_use -= block->bytes;
  stats_.bytes_asked -= block->asked;
}

CachingAllocator::Stats CachingAllocator::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace lockstep::nn
