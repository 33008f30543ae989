#include "nn/onnx/passes.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "nn/onnx/recorder.h"

namespace lockstep::nn::onnx {
namespace {

// Of recorded passes: nothing is computed, so they may be any, and are unlike a model's sizes.
constexpr std::array<std::int64_t, 2> kBatches = {11, 13}, kLengths = {19, 17};

// Two, or one where they are not free.
std::vector<std::int64_t> lengths_of(const std::vector<OnnxInput>& inputs) {
  std::int64_t most = kLengths[0];
  bool free = false;
  for (const OnnxInput& input : inputs) {
    if (!input.any_length) continue;
    free = true;
    most = std::min(most, input.shape[1]);
  }
  if (!free) return {0};
  if (most < 3) return {most};  // of one token, axes look as if they were not there
  return {most, std::min(most - 1, kLengths[1])};
}

void check(const Module& module, const std::vector<OnnxInput>& inputs) {
  check_usage(!module.training(), "a module in training mode is to be exported to ONNX",
              "call train(false) before: dropout and batch statistics are training's");
  for (const OnnxInput& input : inputs) {
    if (input.dtype != DType::kF32 && input.dtype != DType::kI32)
      throw UsageError(fmt::format("input '{}' of {} for ONNX", input.name, name_of(input.dtype)),
                       "inputs are f32, or i32 for numbers of tokens");
    if (input.shape.size() < 1 || (input.any_length && (input.shape.size() < 2 || input.shape[1] < 1)))
      throw UsageError(fmt::format("input '{}' of {} for ONNX", input.name, to_string(input.shape)),
                       "the first axis is that of the samples, the second that of a free length");
  }
}

// Its place in the graph, and the tensor that stands for it.
Tensor make_input(const OnnxInput& input, std::int64_t batch, std::int64_t length, Backend& backend,
                  Recorder& recorder) {
  Shape shape = input.shape;
  shape[0] = batch;
  if (input.any_length) shape[1] = length;
  Tensor x = backend.empty(shape, input.dtype);
  if (x.count() == 0) return x;  // of a table without numbers: nobody reads it
  const int axes = shape.size();
  const Order order = axes == 4 ? channels_second(axes) : plain_order(axes);
  Extents extents;
  for (const int axis : order) extents.push_back(shape[axis]);
  const auto type = input.dtype == DType::kF32 ? Element::kF32 : Element::kI64;
  const Id id = recorder.graph().add_input(input.name, type, extents);
  recorder.set(x, Content(shape, order, id));
  return x;
}

Pass record(Backend& backend, Module& module, const std::vector<StateEntry>& entries,
            const std::vector<OnnxInput>& inputs, std::int64_t batch, std::int64_t length) {
  Recorder recorder(backend, module, entries);
  const auto stand_in = make_recording_backend(recorder);
  Tape tape(*stand_in);
  tape.set_recording(false);
  tape.set_observer(&recorder);
  Vars given;
  for (const OnnxInput& input : inputs)
    given.push_back(tape.input(make_input(input, batch, length, *stand_in, recorder)));
  try {
    for (const Var output : module(tape, given)) recorder.graph().add_output(recorder.value(output.value()));
  } catch (const UsageError& error) {
    const std::string culprit = recorder.culprit();
    if (culprit.empty()) throw;
    throw UsageError(fmt::format("{} cannot be exported to ONNX: {}", culprit, error.what()), error.remedy());
  }
  return {std::move(recorder.graph()), batch, length};
}

}  // namespace

std::vector<Pass> record_passes(Backend& backend, Module& module, const std::vector<StateEntry>& entries,
                                const std::vector<OnnxInput>& inputs) {
  check(module, inputs);
  const auto lengths = lengths_of(inputs);
  std::vector<Pass> passes;
  for (const std::int64_t batch : kBatches)
    passes.push_back(record(backend, module, entries, inputs, batch, lengths[0]));
  if (lengths.size() > 1) passes.push_back(record(backend, module, entries, inputs, kBatches[0], lengths[1]));
  return passes;
}

}  // namespace lockstep::nn::onnx
