// Sums of gradients over the ranks of a job, while they are computed: find_package(lockstep COMPONENTS ddp).
#pragma once

#include "lockstep/comm.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/ddp/sharded_update.h"
