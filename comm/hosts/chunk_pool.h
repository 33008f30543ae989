// Buffers for chunks that have arrived and cannot be used yet.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "lockstep/comm/arena.h"

namespace lockstep::comm {

/// Blocks of one size that are handed out and come back. Allocates only when more are out than ever before. Not
/// thread-safe.
class ChunkPool {
 public:
  struct Block {
    Block* next = nullptr;  // for whoever has it
    std::byte* bytes = nullptr;
  };

  /// `ahead` blocks are there from the start.
  ChunkPool(std::size_t block_bytes, std::size_t ahead) : block_bytes_(align_up(block_bytes)) {
    while (blocks_.size() < ahead) add();
  }

  Block* take() {
    if (free_ == nullptr) add();
    Block* const block = free_;
    free_ = block->next;
    block->next = nullptr;
    return block;
  }
  void give_back(Block* block) {
    block->next = free_;
    free_ = block;
  }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{kArenaAlignment}); }
  };
  struct Owned {
    Block block;
    std::unique_ptr<std::byte, Free> memory;
  };

  void add() {
    auto owned = std::make_unique<Owned>();
    owned->memory.reset(static_cast<std::byte*>(::operator new[](block_bytes_, std::align_val_t{kArenaAlignment})));
    owned->block.bytes = owned->memory.get();
    give_back(&owned->block);
    blocks_.push_back(std::move(owned));
  }

  const std::size_t block_bytes_;
  std::vector<std::unique_ptr<Owned>> blocks_;
  Block* free_ = nullptr;
};

/// Blocks in the order in which they were put in.
class BlockQueue {
 public:
  bool empty() const { return first_ == nullptr; }
  ChunkPool::Block* first() const { return first_; }
  void push(ChunkPool::Block* block) {
    block->next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = block;
    last_ = block;
  }
  ChunkPool::Block* pop() {
    ChunkPool::Block* const block = first_;
    first_ = block->next;
    return block;
  }

 private:
  ChunkPool::Block* first_ = nullptr;
  ChunkPool::Block* last_ = nullptr;
};

}  // namespace lockstep::comm
