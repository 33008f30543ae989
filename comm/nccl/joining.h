// How the ranks of an NCCL group come together, and what they say where they do not.
#pragma once

#include <nccl.h>

#include "base/deadline.h"
#include "base/function_ref.h"
#include "comm/nccl/communicator.h"
#include "comm/nccl/progress_exchange.h"
#include "comm/process_group.h"

namespace lockstep::comm {

/// NCCL refuses two ranks on one GPU of one host. All but the first of them are told to take themselves for hosts of
/// their own (NCCL_HOSTID, unless it is set), which then reach each other as such: over sockets. Collective; before
/// NCCL is asked for anything, as it looks once. Whether ranks may share GPUs at all is for others to say.
void tell_sharing_ranks_apart(ProcessGroup& control);

/// Rank 0's id for a communicator, on every rank. Collective. Throws NcclError, and PeerError on those that could not
/// be told one.
ncclUniqueId agree_on_id(ProcessGroup& control, const NcclApi& api);

/// Joins `communicator` on every rank. Collective: the ranks tell each other through the control group how it went,
/// and one of them speaks for all that say the same. `look` is called a few times a millisecond meanwhile, and ends
/// the wait by throwing. Throws NcclError, TimeoutError naming those who do not come, PeerError.
void join_ranks(Communicator& communicator, const ncclUniqueId& id, ProcessGroup& control,
                ProgressExchange& progress_exchange, Clock::duration timeout, FunctionRef<void()> look);

}  // namespace lockstep::comm
