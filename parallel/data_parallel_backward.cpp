// The way back of a DataParallel: gradients of outputs to the devices, and of parameters and inputs from them.
#include <algorithm>
#include <utility>

#include "lockstep/nn/ops/transfer.h"
#include "lockstep/parallel/data_parallel.h"
#include "parallel/pass.h"

namespace lockstep::parallel {

void DataParallel::run_backward(nn::Tape& tape, Pass& pass) {
  if (!pass.has_loss) scatter_gradients(pass);
  try {
    on_devices(pass.count, [&](std::size_t i) {
      Pass::Part& part = pass.parts[i];
      if (pass.has_loss) return part.tape->backward(part.loss);
      for (nn::Tensor& gradient : part.gradients)
        if (gradient.defined()) gradient = nn::to_device(*copies_[i]->backend, gradient, output_);
      if (std::ranges::any_of(part.gradients, &nn::Tensor::defined))
        part.tape->backward({part.outputs.begin(), part.outputs.size()}, part.gradients);
      part.gradients.clear();
    });
  } catch (...) {
    clear_grads();
    throw;
  }
  for (std::size_t k = 0; k < pass.inputs.size(); ++k)
    if (pass.inputs[k].needs_grad()) gather_gradient(tape, pass, k);
}

void DataParallel::scatter_gradients(Pass& pass) {
  for (std::size_t i = 0; i < pass.count; ++i) pass.parts[i].gradients.resize(pass.outputs.size());
  for (std::size_t o = 0; o < pass.outputs.size(); ++o) {
    const auto [axis, scalars, whole] = std::exchange(pass.outputs[o], {});
    if (!whole.defined()) continue;
    for (std::size_t i = 0; i < pass.count; ++i) {
      Pass::Part& part = pass.parts[i];
      if (!part.outputs[o].needs_grad()) continue;
      nn::Tensor& gradient = part.gradients[o];
      gradient = pass.count == 1 ? whole : narrow(output_, whole, axis, part.out[o]);
      if (scalars) gradient = gradient.reshaped({});
      moved(gradient.bytes(), output_, *copies_[i]->backend);
    }
  }
}

void DataParallel::gather_gradient(nn::Tape& tape, const Pass& pass, std::size_t input) {
  const nn::Var x = pass.inputs[input];
  const nn::Tensor whole = output_.empty(x.shape(), x.dtype());
  output_.pointwise().fill(whole, 0.0f);
  for (std::size_t i = 0; i < pass.count; ++i) {
    const Pass::Part& part = pass.parts[i];
    const nn::Tensor& gradient = part.tape->grad(part.inputs[input]);
    if (!gradient.defined()) continue;
    put(output_, whole, pass.axes[input], part.in, gradient, *copies_[i]->backend);
    moved(gradient.bytes(), *copies_[i]->backend, output_);
  }
  tape.contribute(x, whole);
}

// The nodes that add up come before Replicas, so backward walks them after it, the last parameters first. As they
// are uses of the module's parameters, none is ready before all copies' gradients are in it.
void DataParallel::add_up_later(nn::Tape& tape, Pass& pass) {
  pass.marks.clear();
  AddUp::Group group;
  const auto record = [&] {
    const nn::Var mark = tape.make_var(mark_, true);
    pass.marks.push_back(mark);
    tape.record<AddUp>(mark, *this, group, pass.count);
    group = {};
  };
  const nn::Tape::OpScope scope(tape, "add_up");
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].parameter->requires_grad()) continue;
    group.parameters[group.count] = parameters_[i].parameter;
    group.numbers[group.count++] = i;
    if (group.count == group.numbers.size()) record();
  }
  if (group.count > 0) record();
}

void DataParallel::add_up(std::size_t number, std::size_t copies) {
  nn::Parameter& sum = *parameters_[number].parameter;
  for (std::size_t i = 1; i < copies; ++i) {
    nn::Parameter& part = *copies_[i]->parameters[number].parameter;
    if (!part.has_gradient()) continue;
    const auto target = sum.contribute();
    if (target.accumulate) {
      // Before the kernels are asked for: who fetches from another GPU makes that the thread's.
      const nn::Tensor here = nn::to_device(sum.backend(), part.gradient(), part.backend());
      sum.backend().pointwise().add_to(here, 1.0f, target.gradient);
    } else {
      nn::copy_to(sum.backend(), target.gradient, part.gradient(), part.backend());
    }
    moved(part.gradient().bytes(), part.backend(), sum.backend());
    part.clear_grad();
  }
}

void DataParallel::clear_grads() {
  for (std::size_t i = 1; i < copies_.size(); ++i)
    for (const auto& [name, parameter] : copies_[i]->parameters) parameter->clear_grad();
}

}  // namespace lockstep::parallel
