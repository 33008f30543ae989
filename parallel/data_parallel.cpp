#include "lockstep/parallel/data_parallel.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "lockstep/nn/ops/transfer.h"
#include "parallel/chunks.h"
#include "parallel/pass.h"

namespace lockstep::parallel {
namespace {

std::vector<int> checked_ids(const Devices& devices, const DeviceIds& wanted) {
  std::vector<int> ids;
  if (!wanted.given())
    for (int id = 0; id < devices.count(); ++id) ids.push_back(id);
  else
    ids = *wanted.given();
  check_usage(!ids.empty(), "device_ids is empty", "name a device, or leave device_ids out for all of them");
  for (auto at = ids.begin(); at != ids.end(); ++at) {
    if (*at < 0 || *at >= devices.count())
      throw UsageError(fmt::format("device_ids names device {}, and there {}", *at, devices.describe()),
                       "name devices that there are");
    if (std::find(ids.begin(), at, *at) != at)
      throw UsageError(fmt::format("device_ids names {} twice", devices.name_of(*at)), "name each device once");
  }
  return ids;
}

int checked_output(const Devices& devices, std::optional<int> wanted, int first) {
  const int id = wanted.value_or(first);
  if (id < 0 || id >= devices.count())
    throw UsageError(fmt::format("output_device is {}, and there {}", id, devices.describe()),
                     "name a device that there is, or leave output_device out for the first of device_ids");
  return id;
}

nn::Module& there(const std::unique_ptr<nn::Module>& owned, nn::Module* module) {
  if (owned != nullptr) module = owned.get();
  check_usage(module != nullptr, "DataParallel without a module", "give it one");
  return *module;
}

}  // namespace

DataParallel::DataParallel(std::unique_ptr<nn::Module> module, Devices& devices, const DeviceIds& device_ids,
                           std::optional<int> output_device, int dim)
    : DataParallel(std::move(module), nullptr, devices, device_ids, output_device, dim) {}

DataParallel::DataParallel(nn::Module& module, Devices& devices, const DeviceIds& device_ids,
                           std::optional<int> output_device, int dim)
    : DataParallel(nullptr, &module, devices, device_ids, output_device, dim) {}

DataParallel::DataParallel(std::unique_ptr<nn::Module> owned, nn::Module* module, Devices& devices,
                           const DeviceIds& device_ids, std::optional<int> output_device, int dim)
    : module_(there(owned, module)),
      devices_(devices),
      device_ids_(checked_ids(devices, device_ids)),
      output_device_(checked_output(devices, output_device, device_ids_.front())),
      dim_(dim),
      output_(devices[output_device_]),
      parameters_(module_.named_parameters()),
      buffers_(module_.named_buffers()),
      mark_(output_.empty({1})),
      caller_began_(cpu_time_of_this_thread()) {
  for (const int id : device_ids_) {
    auto copy = std::make_unique<Copy>();
    copy->backend = &devices_[id];
    copy->use.id = id;
    copies_.push_back(std::move(copy));
  }
  copies_.front()->module = &module_;
  output_use_.id = output_device_;
  check_place();
  if (device_ids_.size() > 1 && !module_.factory())
    throw UsageError(fmt::format("{} cannot be built again on another device: it has no factory", module_.type_name()),
                     "make it with nn::build or nn::build_from, or call set_factory");
  if (owned != nullptr)
    register_module("module", std::move(owned));
  else
    register_borrowed("module", module_);
}

DataParallel::~DataParallel() = default;

void DataParallel::check_place() const {
  const auto check = [&](const std::string& name, const nn::Backend& backend) {
    if (&backend == copies_.front()->backend) return;
    throw UsageError(fmt::format("the module must be on device_ids[0], which is {}, and its {} is on {}",
                                 devices_.name_of(device_ids_.front()), name, devices_.name_of(backend)),
                     fmt::format("build it there, with nn::Context{{devices[{}], …}}, or name its device first",
                                 device_ids_.front()));
  };
  for (const auto& [name, parameter] : parameters_) check(name, parameter->backend());
  for (const auto& buffer : buffers_) check(buffer.name, *buffer.backend);
}

nn::Var DataParallel::forward(nn::Tape& tape, nn::Var x) {
  const nn::Tensor value = x.value();
  check_usage(tape.has(x), "DataParallel on a tape was given a value of another tape",
              "compute on the tape that the value is on, or give its tensor to Tape::input() as a constant");
  return run(tape, value, tape.backend(), &x);
}

nn::Var DataParallel::forward(nn::Tape& tape, const nn::Tensor& x, nn::Backend& where) {
  return run(tape, x, where, nullptr);
}

nn::Var DataParallel::run(nn::Tape& tape, const nn::Tensor& x, nn::Backend& where, const nn::Var* var) {
  if (&tape.backend() != &output_)
    throw UsageError(fmt::format("the tape is on {}, and output_device is {}", devices_.name_of(tape.backend()),
                                 devices_.name_of(output_device_)),
                     "make it with nn::Tape tape(model.output_backend())");
  const int axis = axis_of(x.shape(), dim_);
  const auto chunks = chunks_of(x.size(axis), static_cast<std::int64_t>(copies_.size()));
  // One device alone does what it would without us.
  if (chunks.size() == 1 && copies_.front()->backend == &output_)
    return module_.forward(tape, var != nullptr ? *var : tape.input(nn::to_device(output_, x, where)));

  prepare(chunks.size());
  Lease pass(*this);
  pass->axis = axis;
  pass->count = chunks.size();
  for (std::size_t i = 0; i < chunks.size(); ++i) pass->parts[i].in = chunks[i];
  scatter(tape, x, where, *pass);
  const bool differentiable = var != nullptr && var->needs_grad();
  on_devices(pass->count, [&](std::size_t i) {
    Pass::Part& part = pass->parts[i];
    if (i > 0) take_parameters(*copies_[i]);
    const nn::Tensor here = nn::to_device(*copies_[i]->backend, part.x, where);
    part.input = differentiable ? part.tape->differentiable_input(here) : part.tape->input(here);
    part.output = copies_[i]->module->forward(*part.tape, part.input);
  });
  for (std::size_t i = 0; i < pass->count; ++i) {
    moved(pass->parts[i].x.bytes(), where, *copies_[i]->backend);
    moved(std::exchange(copies_[i]->received, 0), *copies_.front()->backend, *copies_[i]->backend);
    pass->parts[i].x = nn::Tensor();
  }
  nn::Tensor value = gather(*pass);
  bool needs_grad = false, are_losses = true;
  for (std::size_t i = 0; i < pass->count; ++i) {
    needs_grad = needs_grad || pass->parts[i].output.needs_grad();
    are_losses = are_losses && pass->parts[i].output.is_loss();
  }
  if (needs_grad && pass->count > 1) add_up_later(tape, *pass);
  const nn::Tape::OpScope scope(tape, "gather");
  const nn::Var result =
      are_losses ? tape.make_loss(std::move(value), needs_grad) : tape.make_var(std::move(value), needs_grad);
  tape.record<Gather>(result, *this, std::move(pass), differentiable ? std::optional(*var) : std::nullopt);
  return result;
}

// The pieces lie ready on the input's device, from where each device's thread fetches its own.
void DataParallel::scatter(const nn::Tape& tape, const nn::Tensor& x, nn::Backend& where, Pass& pass) {
  for (std::size_t i = 0; i < pass.count; ++i) {
    Pass::Part& part = pass.parts[i];
    part.x = narrow(where, x, pass.axis, part.in);
    part.tape->set_recording(tape.recording());
    part.tape->set_activations(tape.activations());
  }
  share_dropout(tape, pass);
}

// What is dropped of a sample hangs on its place in the whole batch.
void DataParallel::share_dropout(const nn::Tape& tape, Pass& pass) {
  const nn::Tensor& whole = tape.dropout_state();
  nn::DropoutState state;
  if (whole.defined()) output_.download(whole, std::as_writable_bytes(std::span(&state, 1)));
  for (std::size_t i = 0; i < pass.count; ++i) {
    Pass::Part& part = pass.parts[i];
    if (!whole.defined()) {
      part.tape->set_dropout_state({});
      continue;
    }
    nn::Backend& backend = *copies_[i]->backend;
    if (!part.dropout_state.defined()) part.dropout_state = backend.empty({3}, DType::kI64);
    nn::DropoutState mine = state;
    mine.first_sample += part.in.begin;
    backend.write(std::as_bytes(std::span(&mine, 1)), part.dropout_state);
    part.tape->set_dropout_state(part.dropout_state);
  }
}

nn::Tensor DataParallel::gather(Pass& pass) {
  const nn::Tensor& first = pass.parts.front().output.value();
  if (pass.count == 1) {
    moved(first.bytes(), *copies_.front()->backend, output_);
    return nn::to_device(output_, first, *copies_.front()->backend);
  }
  pass.scalars = first.shape().size() == 0;
  nn::Shape shape = pass.scalars ? nn::Shape{1} : first.shape();
  pass.out_axis = pass.scalars ? 0 : axis_of(shape, dim_);
  std::int64_t total = 0;
  for (std::size_t i = 0; i < pass.count; ++i) {
    const nn::Tensor& value = pass.parts[i].output.value();
    nn::Shape other = pass.scalars && value.shape().size() == 0 ? nn::Shape{1} : value.shape();
    pass.parts[i].out = {total, pass.out_axis < other.size() ? other[pass.out_axis] : 0};
    total += pass.parts[i].out.count;
    if (other.size() == shape.size()) other[pass.out_axis] = shape[pass.out_axis];
    if (other != shape || value.dtype() != first.dtype())
      throw UsageError(fmt::format("the module returned {} {} on {} and {} {} on {}", name_of(first.dtype()),
                                   to_string(first.shape()), devices_.name_of(device_ids_.front()),
                                   name_of(value.dtype()), to_string(value.shape()), devices_.name_of(device_ids_[i])),
                       fmt::format("outputs are joined along dim {}: let them differ there alone", dim_));
  }
  shape[pass.out_axis] = total;
  const nn::Tensor whole = output_.empty(shape, first.dtype());
  for (std::size_t i = 0; i < pass.count; ++i) {
    const nn::Tensor& value = pass.parts[i].output.value();
    put(output_, whole, pass.out_axis, pass.parts[i].out, pass.scalars ? value.reshaped({1}) : value,
        *copies_[i]->backend);
    moved(value.bytes(), *copies_[i]->backend, output_);
  }
  return whole;
}

void DataParallel::run_backward(nn::Tape& tape, Pass& pass, nn::Var output, const nn::Var* x) {
  const nn::Tensor whole = tape.take_grad(output);
  for (std::size_t i = 0; i < pass.count; ++i) {
    Pass::Part& part = pass.parts[i];
    part.gradient = pass.count == 1 ? whole : narrow(output_, whole, pass.out_axis, part.out);
    if (pass.scalars) part.gradient = part.gradient.reshaped({});
    moved(part.gradient.bytes(), output_, *copies_[i]->backend);
  }
  try {
    on_devices(pass.count, [&](std::size_t i) {
      Pass::Part& part = pass.parts[i];
      part.tape->backward(part.output, nn::to_device(*copies_[i]->backend, part.gradient, output_));
      part.gradient = nn::Tensor();
    });
  } catch (...) {
    clear_grads();
    throw;
  }
  if (x != nullptr) gather_gradient(tape, pass, *x);
}

void DataParallel::gather_gradient(nn::Tape& tape, const Pass& pass, nn::Var x) {
  const nn::Tensor whole = output_.empty(x.shape(), x.value().dtype());
  output_.pointwise().fill(whole, 0.0f);
  for (std::size_t i = 0; i < pass.count; ++i) {
    const Pass::Part& part = pass.parts[i];
    const nn::Tensor& gradient = part.tape->grad(part.input);
    if (!gradient.defined()) continue;
    put(output_, whole, pass.axis, part.in, gradient, *copies_[i]->backend);
    moved(gradient.bytes(), *copies_[i]->backend, output_);
  }
  tape.contribute(x, whole);
}

// The nodes that add up come before Gather, so backward walks them after it, the last parameters first. As they
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
