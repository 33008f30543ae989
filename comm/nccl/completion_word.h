// How far a stream has come, for the host to see.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/cuda/runtime.h"

namespace lockstep::comm {

/// Note [Completion word]
/// A number in host memory that the stream itself counts up, with a kernel of one thread behind every operation. The
/// host reads it where it likes and as often: that costs a load and asks nothing of CUDA, so it works during captures,
/// and it counts on when the operations are repeated by a CUDA graph, of which the host sees no events. What it cannot
/// see is an operation that failed: whoever waits asks the stream too.
class CompletionWord {
 public:
  CompletionWord();
  ~CompletionWord();
  CompletionWord(const CompletionWord&) = delete;
  CompletionWord& operator=(const CompletionWord&) = delete;

  /// One more, when `stream` gets there. Those that use one word come one after the other.
  void count_up(StreamView stream);
  std::uint64_t read() const { return word().load(std::memory_order_acquire); }

  /// 64 bytes of the GPU for whoever needs a place that holds nothing.
  void* scratch() const { return device_ + 64; }

 private:
  std::atomic_ref<std::uint64_t> word() const {
    return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(host_.data()));
  }

  PinnedMemory host_;
  std::byte* device_ = nullptr;  // the count, which the GPU reads where it is near
};

}  // namespace lockstep::comm
