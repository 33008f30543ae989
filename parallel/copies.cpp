// A DataParallel's devices: what they have of the module, and how work gets to them.
#include <utility>

#include "base/error.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/parallel/data_parallel.h"
#include "parallel/pass.h"

namespace lockstep::parallel {
namespace {

/// What a device has thrown, with the device in it.
[[noreturn]] void rethrow_from(const std::exception_ptr& error, const std::string& where) {
  const auto at = [&](const Error& e) { return fmt::format("{}: {}", where, e.what()); };
  try {
    std::rethrow_exception(error);
  } catch (const UsageError& e) {
    throw UsageError(at(e), e.remedy(), e.where());
  } catch (const OutOfMemoryError& e) {
    throw OutOfMemoryError(at(e), e.remedy(), e.where());
  } catch (const DeviceError& e) {
    throw DeviceError(at(e), e.remedy(), e.where());
  } catch (const Error& e) {
    throw Error(e.code(), at(e), e.remedy(), e.where());
  }
}

}  // namespace

// What the copies must not fetch while the first one computes, and so changes its buffers, is brought to them before.
void DataParallel::prepare(std::size_t count) {
  if (module_.fused() && !std::exchange(fused_, true)) {
    // It has other parameters now, and so will they.
    parameters_ = module_.named_parameters();
    buffers_ = module_.named_buffers();
    for (std::size_t i = 1; i < copies_.size(); ++i)
      if (copies_[i]->built != nullptr) list_state(*copies_[i], *copies_[i]->built);
  }
  nn::Backend& first = *copies_.front()->backend;
  for (std::size_t i = 0; i < count; ++i) {
    Copy& copy = *copies_[i];
    if (copy.backend != &output_ && copy.thread == nullptr) copy.thread = std::make_unique<DeviceThread>(*copy.backend);
    if (i == 0) continue;
    if (copy.built == nullptr) build(copy);
    copy.module->take_modes(module_);
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      nn::copy_to(*copy.backend, *copy.buffers[b].tensor, *buffers_[b].tensor, first);
      moved(buffers_[b].tensor->bytes(), first, *copy.backend);
    }
  }
}

void DataParallel::build(Copy& copy) const {
  nn::Generator generator = nn::Generator::zeros();
  nn::Context context{*copy.backend, generator};
  auto built = module_.factory()(context);
  check_usage(built != nullptr, "the factory of a module builds nothing", "let it return the module");
  list_state(copy, *built);
  copy.module = built.get();
  copy.built = std::move(built);
}

void DataParallel::list_state(Copy& copy, nn::Module& built) const {
  built.take_modes(module_);
  copy.parameters = built.named_parameters();
  copy.buffers = built.named_buffers();
  copy.versions.assign(copy.parameters.size(), 0);
  try {
    compare(copy);
  } catch (...) {
    copy.parameters.clear();
    copy.buffers.clear();
    copy.module = nullptr;
    copy.built.reset();  // so that the next call builds it again, or refuses it again
    throw;
  }
}

void DataParallel::compare(const Copy& copy) const {
  const auto refuse = [&](const std::string& what) {
    throw UsageError(fmt::format("the factory of {} builds another module: {}", module_.type_name(), what),
                     "let it build the same parameters and buffers each time, in the context that it is given");
  };
  const auto differ = [&](const std::string& name, const nn::Tensor& a, const std::string& other, const nn::Tensor& b,
                          const nn::Backend& backend) {
    if (name != other) refuse(fmt::format("{} where {} is expected", other, name));
    if (a.shape() != b.shape() || a.dtype() != b.dtype())
      refuse(fmt::format("{} is {} and not {}", name, to_string(b.shape()), to_string(a.shape())));
    if (&backend != copy.backend)
      refuse(fmt::format("{} is on {} and not on {}", name, devices_.name_of(backend), devices_.name_of(copy.use.id)));
  };
  if (copy.parameters.size() != parameters_.size() || copy.buffers.size() != buffers_.size())
    refuse(fmt::format("{} parameters and {} buffers where {} and {} are expected", copy.parameters.size(),
                       copy.buffers.size(), parameters_.size(), buffers_.size()));
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    differ(parameters_[i].name, parameters_[i].parameter->value(), copy.parameters[i].name,
           copy.parameters[i].parameter->value(), copy.parameters[i].parameter->backend());
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    differ(buffers_[i].name, *buffers_[i].tensor, copy.buffers[i].name, *copy.buffers[i].tensor,
           *copy.buffers[i].backend);
}

// On the copy's thread.
void DataParallel::take_parameters(Copy& copy) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const nn::Parameter& from = *parameters_[i].parameter;
    nn::Parameter& to = *copy.parameters[i].parameter;
    to.set_requires_grad(from.requires_grad());
    if (copy.versions[i] == from.version()) continue;
    nn::copy_to(*copy.backend, to.value(), from.value(), from.backend());
    to.changed();
    copy.versions[i] = from.version();
    copy.received += from.value().bytes();
  }
}

void DataParallel::on_devices(std::size_t count, FunctionRef<void(std::size_t)> work) {
  for (std::size_t i = 0; i < count; ++i)
    if (copies_[i]->thread != nullptr) copies_[i]->thread->start(work, i);
  std::vector<std::exception_ptr> errors(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (copies_[i]->thread != nullptr) continue;
    try {
      work(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  }
  for (std::size_t i = 0; i < count; ++i)
    if (copies_[i]->thread != nullptr) errors[i] = copies_[i]->thread->finish();
  for (std::size_t i = 0; i < count; ++i)
    if (errors[i] != nullptr)
      rethrow_from(errors[i], fmt::format("replica {} of {} on {}", i, count, devices_.name_of(device_ids_[i])));
}

DeviceUse& DataParallel::use_of(const nn::Backend& backend) {
  for (const auto& copy : copies_)
    if (copy->backend == &backend) return copy->use;
  return &backend == &output_ ? output_use_ : elsewhere_;
}

void DataParallel::moved(std::uint64_t bytes, const nn::Backend& from, const nn::Backend& to) {
  if (&from == &to) return;
  use_of(from).bytes_out += bytes;
  use_of(to).bytes_in += bytes;
}

std::vector<DeviceUse> DataParallel::use() {
  std::vector<DeviceUse> all;
  const auto mine = cpu_time_of_this_thread() - caller_began_;
  bool output_among = false;
  for (const auto& copy : copies_) {
    all.push_back(copy->use);
    output_among = output_among || copy->backend == &output_;
    if (copy->backend == &output_) all.back().cpu_time = mine;
    if (copy->thread != nullptr) all.back().cpu_time = copy->thread->cpu_time();
  }
  if (output_among) return all;
  all.push_back(output_use_);
  all.back().cpu_time = mine;
  return all;
}

}  // namespace lockstep::parallel
