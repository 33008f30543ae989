// Tensors, automatic differentiation, layers, losses, models, optimizers and weight files:
// find_package(lockstep COMPONENTS nn).
#pragma once

#include "lockstep/base/run_main.h"
#include "lockstep/nn/autograd/functions.h"
#include "lockstep/nn/io/onnx.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "lockstep/nn/optim/moving_average.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/nn/optim/optimizers.h"
