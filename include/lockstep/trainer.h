// Data-parallel training of own models, on custom data sets or those that lockstep reads:
// find_package(lockstep COMPONENTS trainer).
#pragma once

#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/ddp.h"
#include "lockstep/nn.h"
#include "lockstep/parallel/data_parallel.h"
#include "lockstep/parallel/devices.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/checkpointer.h"
#include "lockstep/trainer/evaluate.h"
#include "lockstep/trainer/forward.h"
#include "lockstep/trainer/metrics.h"
#include "lockstep/trainer/train.h"
