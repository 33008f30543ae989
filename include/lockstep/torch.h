// DistributedDataParallel for LibTorch's modules: find_package(lockstep COMPONENTS torch). Needs LibTorch's headers.
#pragma once

#include "lockstep/comm.h"
#include "lockstep/torch/distributed_data_parallel.h"
