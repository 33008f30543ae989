#include "comm/self_group.h"

#include "comm/host_arena.h"

namespace lockstep::comm {

std::unique_ptr<Arena> SelfGroup::map_arena(std::size_t bytes) { return HostArena::map(bytes); }

}  // namespace lockstep::comm
