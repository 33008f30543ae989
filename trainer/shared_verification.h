// Verifying a checkpoint by all ranks that see it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::trainer {

/// Note [Shared verification]
/// A checkpoint is used after the SHA-256 of each of its files has been compared. Rank 0 looks for one, and where its
/// moments are in parts the others help: every rank that sees the same manifest under the same path compares some of
/// the files, and rank 0 gets to know what is wrong with any of them before it takes the checkpoint or looks at an
/// older one. With as many ranks as parts each compares the part that it is going to read, and rank 0 all other files
/// too, which it reads for all. Ranks that do not see the checkpoint compare nothing; if none but rank 0 does, it
/// compares all.

/// Collective. Calls `look` on rank 0, which calls `verify` in place of checkpoint::verify_checkpoint() as often as it
/// likes, while the other ranks help. What `look` throws comes out on rank 0 alone; the others return.
void verify_together(comm::ProcessGroup& group, FunctionRef<void(checkpoint::Verify verify)> look);

/// Which of `files`, as checkpoint::files_of() lists them, is compared by the rank that is number `index` of `count`
/// that see the checkpoint. Each is by one of them.
std::vector<std::string> share_of(const std::vector<std::string>& files, const checkpoint::CheckpointManifest& manifest,
                                  std::size_t index, std::size_t count);

}  // namespace lockstep::trainer
