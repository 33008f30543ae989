// Batch normalisation over all ranks' samples.
#pragma once

#include "lockstep/comm/process_group.h"
#include "lockstep/nn/layers/module.h"

namespace lockstep::parallel {

/// What torch.nn.SyncBatchNorm.convert_sync_batchnorm does, in place. Collective: from now on, in training mode, all
/// BatchNorm layers of `module` take mean and variance over the samples of all ranks, in forward and in backward, so
/// that ranks compute what one process would on the global batch. The ranks run the same passes in the same order, also
/// a rank that has no samples: with inputs of no rows. `group`, whose arenas are on the module's device, must outlive
/// the module's training (a pass without it is a UsageError), and not the module; its other collectives have to keep
/// their places among these (comm Note [Same order]). Returns how many layers there are. Where ranks have different
/// ones, one throws OutOfStepError and the others PeerError.
int convert_sync_batchnorm(nn::Module& module, comm::ProcessGroup& group);

}  // namespace lockstep::parallel
