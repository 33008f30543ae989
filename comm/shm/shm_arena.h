// Arenas in memory that the ranks of a host share.
#pragma once

#include <utility>

#include "comm/arena.h"
#include "comm/shm/segment.h"

namespace lockstep::comm {

/// Part `local` of a segment that the ranks of a host have mapped, one part a rank.
class ShmArena final : public Arena {
 public:
  ShmArena(Segment segment, int local, std::size_t bytes)
      : Arena(segment.part(local), bytes, segment.part_bytes()), segment_(std::move(segment)) {}
  ~ShmArena() override {
    // The operations that are under way stay in the group's queue.
    if (!detach()) segment_.leak();
  }

 private:
  Segment segment_;
};

}  // namespace lockstep::comm
