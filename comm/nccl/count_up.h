// The kernel of CompletionWord.
#pragma once

#include <cstdint>

#include "lockstep/base/device.h"

namespace lockstep::comm {

/// Adds 1 to `count` on the GPU, and shows it in `word`, host memory that the GPU can write.
void launch_count_up(std::uint64_t* count, std::uint64_t* word, StreamView stream);

}  // namespace lockstep::comm
