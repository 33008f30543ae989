// Arenas in memory that the ranks of a host share.
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

#include "comm/arena.h"
#include "comm/shm/segment.h"

namespace lockstep::comm {

/// Part `local` of a segment that the ranks of a host have mapped, one part a rank.
class ShmArena final : public Arena {
 public:
  ShmArena(Segment segment, int local, std::size_t bytes, std::uint64_t number)
      : Arena(segment.part(local), bytes), segment_(std::move(segment)), number_(number) {}
  ~ShmArena() override {
    // An exception that unwinds past an arena leaves operations on it under way in the group's queue.
    if (std::uncaught_exceptions() > 0) segment_.leak();
  }

  /// The group's arenas are counted from 1.
  std::uint64_t number() const { return number_; }
  std::size_t part_bytes() const { return segment_.part_bytes(); }

 private:
  Segment segment_;
  std::uint64_t number_;
};

}  // namespace lockstep::comm
