// Collectives among the ranks of a job: find_package(lockstep COMPONENTS comm).
#pragma once

#include "lockstep/base/error.h"
#include "lockstep/base/run_main.h"
#include "lockstep/comm/device_group.h"
#include "lockstep/comm/key_value_store.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/comm/process_group.h"
