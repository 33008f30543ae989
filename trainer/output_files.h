// What a run writes must not be what it reads, nor one file twice.
#pragma once

#include "trainer/config.h"

namespace lockstep::trainer {

/// Looks at --save, --metrics, --trace and --checkpoint-dir. Throws UsageError where two of them are one file, where
/// one is the file of --config, --data or --resume, lies in a checkpoint or is what standard output or error goes to,
/// and for
/// "-". --weights may be what --save replaces: it is read before, and the new file takes its place as a whole; nothing
/// else may. For the rank that writes: others may see another disk.
void check_output_files(const TrainConfig& config);

}  // namespace lockstep::trainer
