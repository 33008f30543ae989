// Which messages an operation consists of, and in which order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/mpi/transfers.h"
#include "comm/op.h"

namespace lockstep::comm {

/// Sizes that steer the algorithms; every rank of a group has the same. They change times, never results. The
/// defaults are the best of what was measured on one host.
struct Tuning {
  std::size_t chunk_bytes = 1 << 20;     // of one message; a multiple of 64
  std::uint32_t chunks_under_way = 4;    // to and from each peer, in each phase; 1 to 32
  std::size_t small_bytes = 16 << 10;    // allreduces in which a rank would send no more take one exchange with all
  std::size_t scratch_bytes = 8 << 20;   // an operation's, at most: many ranks get smaller chunks
  std::size_t operations_under_way = 4;  // later ones wait their turn

  /// Regions up to this size are small. A few numbers always are: two exchanges of them cost more.
  std::size_t small_limit(int world_size) const {
    return std::max<std::size_t>(small_bytes / static_cast<std::size_t>(world_size - 1), 256);
  }
};

/// One operation's state machine: begin() starts the first messages, each complete one may start others. Objects are
/// kept and used again, so that an operation allocates nothing once its scratch has grown to what is needed.
class CollectiveAlgorithm {
 public:
  virtual ~CollectiveAlgorithm() = default;
  CollectiveAlgorithm(const CollectiveAlgorithm&) = delete;
  CollectiveAlgorithm& operator=(const CollectiveAlgorithm&) = delete;

  void begin(const Op& op) {
    op_ = op;
    start();
  }
  virtual void on_complete(const Transfer& transfer) = 0;
  virtual bool done() const = 0;
  const Op& op() const { return op_; }

 protected:
  CollectiveAlgorithm(int rank, int size, const Tuning& tuning, Transfers& transfers)
      : rank_(rank), size_(size), tuning_(tuning), transfers_(transfers) {}

  virtual void start() = 0;

  void send(int peer, std::uint8_t phase, std::uint32_t chunk, const std::byte* from, std::size_t bytes) {
    transfers_.send(op_, {this, Transfer::Direction::kSend, phase, peer, chunk, bytes}, from);
  }
  void receive(int peer, std::uint8_t phase, std::uint32_t chunk, std::byte* to, std::size_t bytes) {
    transfers_.receive(op_, {this, Transfer::Direction::kReceive, phase, peer, chunk, bytes}, to);
  }

  const int rank_;
  const int size_;
  const Tuning tuning_;

 private:
  Transfers& transfers_;
  Op op_;
};

/// Numbers that are ticked off in any order, up to 64 ahead of the first that is not.
class Ticks {
 public:
  void tick(std::uint32_t number) {
    ahead_ |= std::uint64_t{1} << (number - prefix_);
    while ((ahead_ & 1) != 0) {
      ahead_ >>= 1;
      ++prefix_;
    }
  }
  /// All numbers below this are ticked off.
  std::uint32_t prefix() const { return prefix_; }

 private:
  std::uint32_t prefix_ = 0;
  std::uint64_t ahead_ = 0;
};

/// A byte range cut into messages.
struct Chunks {
  std::size_t begin = 0;
  std::size_t bytes = 0;
  std::size_t chunk_bytes = 1;

  std::uint32_t count() const { return static_cast<std::uint32_t>((bytes + chunk_bytes - 1) / chunk_bytes); }
  std::size_t begin_of(std::uint32_t chunk) const { return begin + chunk * chunk_bytes; }
  std::size_t bytes_of(std::uint32_t chunk) const {
    const std::size_t rest = bytes - chunk * chunk_bytes;
    return rest < chunk_bytes ? rest : chunk_bytes;
  }
};

}  // namespace lockstep::comm
