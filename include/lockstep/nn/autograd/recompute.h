// Activations that are recomputed in backward instead of stored.
#pragma once

#include <functional>

#include "lockstep/nn/autograd/vars.h"

namespace lockstep::nn {

/// A part of a pass: what it computes from its inputs. It runs again in backward, to the same bits, so it depends on
/// nothing else that changes in between, such as an RnnState that it advances. The tape keeps it, and whatever it
/// refers to is there, until backward has walked it or the tape is reset. What it throws comes out of recompute(), or
/// of Tape::backward().
using Segment = std::function<Vars(Tape&, const Vars&)>;

/// Note [Recomputation]
/// segment(tape, inputs), of which the tape keeps the inputs and the results alone (torch.utils.checkpoint; Chen et
/// al., "Training deep nets with sublinear memory cost", 2016). When backward comes to it, the segment is recorded
/// again, and walked then: values and gradients are the same bits as without, for one more forward pass of the segment.
///
/// - Running statistics move in the first pass alone; dropout drops the same elements in both, of the tape's state.
/// - A loss that is returned is a value like others, which backward() does not start from: losses come after it.
/// - Values that the segment has made but not returned are gone after it, as those of a pass that was walked.
/// - A parameter of the segment is not ready before backward has walked all segments and operators that use it. One
///   that is gone by then is a UsageError, as is another number of values than the first time.
/// - Segments may be in segments. On a tape that does not record it is the segment's own call.
Vars recompute(Tape& tape, const Vars& inputs, Segment segment);

}  // namespace lockstep::nn
