#include "lockstep/parallel/data_parallel.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "lockstep/nn/ops/transfer.h"
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
    : owned_(std::move(owned)),
      module_(there(owned_, module)),
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
  register_borrowed("module", module_);  // the paths that errors name begin below it, as those of the other copies do
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

nn::Var DataParallel::forward(nn::Tape& tape, nn::Var x) { return forward_all(tape, x); }

nn::Vars DataParallel::forward(nn::Tape& tape, const nn::Tensor& x, nn::Backend& where) {
  return run({.tape = tape, .inputs = {&x, 1}, .where = where});
}

nn::Vars DataParallel::forward_all(nn::Tape& tape, const nn::Vars& inputs) {
  const auto values = values_of(tape, inputs);
  return run({.tape = tape, .inputs = values, .where = tape.backend(), .vars = &inputs});
}

nn::Loss DataParallel::forward_loss(nn::Tape& tape, const nn::Vars& inputs, const nn::Tensor& targets,
                                    const nn::LossFunction& loss, float scale) {
  const auto values = values_of(tape, inputs);
  const Call call{.tape = tape,
                  .inputs = values,
                  .where = tape.backend(),
                  .vars = &inputs,
                  .targets = targets.defined() ? &targets : nullptr};
  std::optional<Lease> lease = begin(call);
  if (!lease) return module_.forward_loss(tape, inputs, targets, loss, scale);
  Lease pass = *std::move(lease);
  pass->has_loss = true;
  run_replicas(call, *pass, [&](std::size_t i, const nn::Tensor& mine) {
    Pass::Part& part = pass->parts[i];
    part.loss = copies_[i]->module->forward_loss(*part.tape, part.inputs, mine, loss, scale).value;
    check_usage(part.loss.is_loss(), "a loss function returned a value that is no loss",
                "end it with nn::sum(), or another function that returns a Loss");
  });
  nn::Tensor totals = add_totals(*pass);
  const bool needs_grad = std::ranges::any_of(std::span(pass->parts).first(pass->count),
                                              [](const Pass::Part& part) { return part.loss.needs_grad(); });
  if (needs_grad && pass->count > 1) add_up_later(tape, *pass);
  const nn::Tape::OpScope scope(tape, "replicas");
  const nn::Var result = tape.make_loss(std::move(totals), needs_grad, pass->parts.front().loss.counts());
  tape.record<Replicas>(result, std::move(pass));
  return {result};
}

std::vector<nn::Tensor> DataParallel::values_of(const nn::Tape& tape, const nn::Vars& inputs) const {
  std::vector<nn::Tensor> values;
  for (const nn::Var x : inputs) {
    values.push_back(x.value());
    check_usage(tape.has(x), "DataParallel on a tape was given a value of another tape",
                "compute on the tape that the value is on, or give its tensor to Tape::input() as a constant");
  }
  return values;
}

// How many entries there are to be shared out.
std::int64_t DataParallel::extent_of(const Call& call) const {
  if (&call.tape.backend() != &output_)
    throw UsageError(fmt::format("the tape is on {}, and output_device is {}", devices_.name_of(call.tape.backend()),
                                 devices_.name_of(output_device_)),
                     "make it with nn::Tape tape(model.output_backend())");
  check_usage(!call.inputs.empty(), "DataParallel was given no input", "give it at least one, which it cuts");
  const auto extent = [&](const nn::Tensor& x) { return x.size(axis_of(x.shape(), dim_)); };
  const std::int64_t wanted = extent(call.inputs[0]);
  const auto check = [&](const nn::Tensor& x, const std::string& what) {
    if (extent(x) == wanted) return;
    throw UsageError(fmt::format("{} {}, which is {} entries along dim {}, and input 0 is {}", what,
                                 to_string(x.shape()), extent(x), dim_, to_string(call.inputs[0].shape())),
                     "all are cut along that dim together: give them the same extent there");
  };
  for (std::size_t k = 1; k < call.inputs.size(); ++k) check(call.inputs[k], fmt::format("input {} is", k));
  if (call.targets != nullptr) check(*call.targets, "the targets are");
  return wanted;
}

nn::Vars DataParallel::run(const Call& call) {
  std::optional<Lease> lease = begin(call);
  if (!lease) {
    if (call.vars != nullptr) return module_.forward_all(call.tape, *call.vars);
    nn::Vars here;
    for (const nn::Tensor& x : call.inputs) here.push_back(call.tape.input(nn::to_device(output_, x, call.where)));
    return module_.forward_all(call.tape, here);
  }
  Lease pass = *std::move(lease);
  run_replicas(call, *pass, [&](std::size_t i, const nn::Tensor&) {
    Pass::Part& part = pass->parts[i];
    part.outputs = copies_[i]->module->forward_all(*part.tape, part.inputs);
  });
  return put_together(call.tape, std::move(pass));
}

// The pieces lie ready on the input's device, from where each device's thread fetches its own. One device that is the
// caller's too does what it would without us: then there is no pass.
std::optional<DataParallel::Lease> DataParallel::begin(const Call& call) {
  const auto chunks = chunks_of(extent_of(call), static_cast<std::int64_t>(copies_.size()));
  if (chunks.size() == 1 && copies_.front()->backend == &output_) return std::nullopt;
  Lease lease(*this);
  Pass& pass = *lease;
  prepare(chunks.size());
  pass.count = chunks.size();
  if (call.vars != nullptr) pass.inputs = *call.vars;
  for (const nn::Tensor& x : call.inputs) pass.axes.push_back(axis_of(x.shape(), dim_));
  if (call.targets != nullptr) pass.axes.push_back(axis_of(call.targets->shape(), dim_));
  for (std::size_t i = 0; i < pass.count; ++i) {
    Pass::Part& part = pass.parts[i];
    part.in = chunks[i];
    for (std::size_t k = 0; k < pass.axes.size(); ++k) {
      const nn::Tensor& whole = k < call.inputs.size() ? call.inputs[k] : *call.targets;
      part.pieces.push_back(narrow(call.where, whole, pass.axes[k], part.in));
    }
    part.tape->set_recording(call.tape.recording());
    part.tape->set_activations(call.tape.activations());
  }
  share_dropout(call.tape, pass);
  return lease;
}

void DataParallel::run_replicas(const Call& call, Pass& pass,
                                FunctionRef<void(std::size_t, const nn::Tensor&)> forward) {
  on_devices(pass.count, [&](std::size_t i) {
    Pass::Part& part = pass.parts[i];
    nn::Backend& backend = *copies_[i]->backend;
    if (i > 0) take_parameters(*copies_[i]);
    for (std::size_t k = 0; k < call.inputs.size(); ++k) {
      const nn::Tensor here = nn::to_device(backend, part.pieces[k], call.where);
      const bool differentiable = call.vars != nullptr && (*call.vars)[k].needs_grad();
      part.inputs.push_back(differentiable ? part.tape->differentiable_input(here) : part.tape->input(here));
    }
    forward(i, call.targets != nullptr ? nn::to_device(backend, part.pieces.back(), call.where) : nn::Tensor());
  });
  for (std::size_t i = 0; i < pass.count; ++i) {
    for (const nn::Tensor& piece : pass.parts[i].pieces) moved(piece.bytes(), call.where, *copies_[i]->backend);
    moved(std::exchange(copies_[i]->received, 0), *copies_.front()->backend, *copies_[i]->backend);
    pass.parts[i].pieces.clear();
  }
}

nn::Vars DataParallel::put_together(nn::Tape& tape, Lease lease) {
  Pass& pass = *lease;
  check_outputs(pass);
  const std::size_t count = pass.parts.front().outputs.size();
  pass.outputs.resize(count);
  std::vector<nn::Tensor> values;
  for (std::size_t o = 0; o < count; ++o) values.push_back(gather(pass, o));
  struct Kind {
    bool needs_grad = false, is_loss = true;
  };
  std::vector<Kind> kinds(count);
  for (std::size_t i = 0; i < pass.count; ++i)
    for (std::size_t o = 0; o < count; ++o) {
      kinds[o].needs_grad |= pass.parts[i].outputs[o].needs_grad();
      kinds[o].is_loss &= pass.parts[i].outputs[o].is_loss();
    }
  const bool any = std::ranges::any_of(kinds, &Kind::needs_grad);
  if (any && pass.count > 1) add_up_later(tape, pass);
  const nn::Tape::OpScope scope(tape, "gather");
  if (any) {
    pass.reached = tape.make_var(mark_, true);
    tape.record<Replicas>(pass.reached, std::move(lease));
  }
  nn::Vars results;
  for (std::size_t o = 0; o < count; ++o) {
    const auto [needs_grad, is_loss] = kinds[o];
    results.push_back(is_loss ? tape.make_loss(std::move(values[o]), needs_grad, pass.parts.front().outputs[o].counts())
                              : tape.make_var(std::move(values[o]), needs_grad));
    tape.record<Gather>(results[o], pass, o);
  }
  return results;
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

void DataParallel::check_outputs(const Pass& pass) const {
  const std::size_t wanted = pass.parts.front().outputs.size();
  for (std::size_t i = 1; i < pass.count; ++i)
    if (pass.parts[i].outputs.size() != wanted)
      throw UsageError(
          fmt::format("the module returned {} values on {} and {} on {}", wanted, devices_.name_of(device_ids_.front()),
                      pass.parts[i].outputs.size(), devices_.name_of(device_ids_[i])),
          "let it return as many on each device");
}

nn::Tensor DataParallel::gather(Pass& pass, std::size_t o) {
  Pass::Output& output = pass.outputs[o];
  const auto value_of = [&](std::size_t i) -> nn::Tensor { return pass.parts[i].outputs[o].value(); };
  const nn::Tensor first = value_of(0);
  if (pass.count == 1) {
    moved(first.bytes(), *copies_.front()->backend, output_);
    return nn::to_device(output_, first, *copies_.front()->backend);
  }
  output.scalars = first.shape().size() == 0;
  nn::Shape shape = output.scalars ? nn::Shape{1} : first.shape();
  output.axis = output.scalars ? 0 : axis_of(shape, dim_);
  std::int64_t total = 0;
  for (std::size_t i = 0; i < pass.count; ++i) {
    const nn::Tensor value = value_of(i);
    nn::Shape other = output.scalars && value.shape().size() == 0 ? nn::Shape{1} : value.shape();
    pass.parts[i].out.push_back({total, output.axis < other.size() ? other[output.axis] : 0});
    total += pass.parts[i].out[o].count;
    if (other.size() == shape.size()) other[output.axis] = shape[output.axis];
    if (other != shape || value.dtype() != first.dtype())
      throw UsageError(fmt::format("the module returned {} {} on {} and {} {} on {}", name_of(first.dtype()),
                                   to_string(first.shape()), devices_.name_of(device_ids_.front()),
                                   name_of(value.dtype()), to_string(value.shape()), devices_.name_of(device_ids_[i])),
                       fmt::format("outputs are joined along dim {}: let them differ there alone", dim_));
  }
  shape[output.axis] = total;
  const nn::Tensor whole = output_.empty(shape, first.dtype());
  for (std::size_t i = 0; i < pass.count; ++i) {
    const nn::Tensor value = value_of(i);
    put(output_, whole, output.axis, pass.parts[i].out[o], output.scalars ? value.reshaped({1}) : value,
        *copies_[i]->backend);
    moved(value.bytes(), *copies_[i]->backend, output_);
  }
  return whole;
}

// In the order of device_ids.
nn::Tensor DataParallel::add_totals(const Pass& pass) {
  nn::Tensor sum;
  for (std::size_t i = 0; i < pass.count; ++i) {
    const nn::Tensor& totals = pass.parts[i].loss.value();
    nn::Backend& backend = *copies_[i]->backend;
    if (i == 0) {
      sum = output_.empty(totals.shape());
      nn::copy_to(output_, sum, totals, backend);
    } else {
      // Before the kernels are asked for: who fetches from another GPU makes that the thread's.
      const nn::Tensor here = nn::to_device(output_, totals, backend);
      output_.pointwise().add_to(here, 1.0f, sum);
    }
    moved(totals.bytes(), backend, output_);
  }
  return sum;
}

}  // namespace lockstep::parallel
