#include "lockstep/nn/layers/module.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <typeinfo>

#include "base/crash.h"
#include "base/error.h"
#include "base/splitmix.h"
#include "base/text.h"

namespace lockstep::nn {

std::vector<std::size_t> find_parameters(const std::vector<NamedParameter>& parameters, const std::string& pattern,
                                         const std::string& whose) {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (::fnmatch(pattern.c_str(), parameters[i].name.c_str(), 0) == 0) found.push_back(i);
  if (!found.empty()) return found;
  std::vector<std::string> names;
  for (const auto& parameter : parameters) names.push_back(parameter.name);
  const auto near = nearest(pattern, names);
  throw UsageError(fmt::format("{}: no parameter has such a name", whose),
                   near            ? fmt::format("did you mean '{}'? * stands for any characters", *near)
                   : names.empty() ? "there are no parameters"
                                   : fmt::format("names are such as {}; * stands for any characters", names.front()));
}

std::string Module::type_name() const {
  const std::string name = demangled(typeid(*this).name());
  const auto space = name.rfind("::");
  return space == std::string::npos ? name : name.substr(space + 2);
}

namespace {

/// One that names a module.
class NamedUsageError final : public UsageError {
 public:
  using UsageError::UsageError;
};

}  // namespace

std::string Module::path() const {
  std::string path = name_;
  for (const Module* above = parent_; above != nullptr && above->parent_ != nullptr; above = above->parent_)
    path = above->name_ + "." + path;
  return path;
}

void Module::become_parent_of(Module& child, const std::string& name) const {
  child.parent_ = this;
  child.name_ = name;
}

void Module::rethrow_named(const UsageError& error) const {
  if (parent_ == nullptr || dynamic_cast<const NamedUsageError*>(&error) != nullptr) throw;
  throw NamedUsageError(fmt::format("{}: {}", path(), error.what()), error.remedy(), error.where());
}

void Module::refuse_inputs(std::size_t given, std::size_t wanted) const {
  throw UsageError(
      fmt::format("{} takes {} input{}, and was given {}", type_name(), wanted, wanted == 1 ? "" : "s", given),
      wanted == 1 ? "call model(tape, x); a module of several inputs overrides forward_all()"
                  : "give them all: model(tape, {x, y})");
}

Var Module::forward(Tape& tape, Var x) {
  in_forward_ = true;
  const Vars outputs = forward_all(tape, x);
  in_forward_ = false;
  if (outputs.size() != 1)
    throw UsageError(fmt::format("{} returns {} values, and one is taken", type_name(), outputs.size()),
                     "call forward_all(tape, x), which returns all of them");
  return outputs;
}

Vars Module::forward_all(Tape& tape, const Vars& inputs) {
  if (in_forward_) {
    in_forward_ = false;
    throw UsageError(fmt::format("{} has no forward pass", type_name()),
                     "override forward(Tape&, Var), or forward_all(Tape&, const Vars&) for several inputs or outputs");
  }
  if (inputs.size() != 1) refuse_inputs(inputs.size(), 1);
  return forward(tape, inputs[0]);
}

Loss Module::forward_loss(Tape& tape, const Vars& inputs, const Tensor& targets, const LossFunction& loss,
                          float scale) {
  const Vars outputs = forward_all(tape, inputs);
  tape.leave_to_loss(outputs);
  return loss(tape, outputs, targets, scale);
}

template <class Visit>
void Module::walk(const std::string& prefix, const Visit& visit) const {
  visit(*this, prefix);
  for (const auto& [name, child] : children_) child->walk(prefix + name + ".", visit);
}

std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  std::vector<std::pair<std::string, Module*>> all = {{"", this}};
  for (const auto& [name, child] : children_)
    for (const auto& [below, module] : child->named_modules())
      all.emplace_back(below.empty() ? name : name + "." + below, module);
  return all;
}

std::vector<NamedParameter> Module::named_parameters() const {
  std::vector<NamedParameter> all;
  walk("", [&](const Module& module, const std::string& prefix) {
    for (const auto& [name, parameter] : module.parameters_) all.push_back({prefix + name, parameter.get()});
  });
  return all;
}

std::vector<NamedBuffer> Module::named_buffers() const {
  std::vector<NamedBuffer> all;
  walk("", [&](const Module& module, const std::string& prefix) {
    for (const auto& buffer : module.buffers_)
      all.push_back({prefix + buffer.name, buffer.tensor.get(), buffer.backend});
  });
  return all;
}

void Module::train(bool training) {
  check_usage(!training || !fused_, "training a model that has been fused for evaluation", "build it anew");
  training_ = training;
  for (const auto& [name, child] : children_) child->train(training);
}

void Module::fuse() {
  train(false);
  if (fused_) return;
  fused_ = true;
  fuse_children();
  for (const auto& [name, child] : children_) child->fuse();
}

void Module::take_modes(const Module& like) {
  if (like.fused_) {
    fuse();
    return;
  }
  if (children_.size() != like.children_.size())
    throw UsageError(fmt::format("a {} with {} children takes the modes of one with {}", type_name(), children_.size(),
                                 like.children_.size()),
                     "build both by one factory");
  training_ = like.training_;
  recomputed_ = like.recomputed_;
  for (std::size_t i = 0; i < children_.size(); ++i) children_[i].second->take_modes(*like.children_[i].second);
}

std::unique_ptr<Module> build_from(Context& context, Module::Factory factory) {
  check_usage(factory != nullptr, "a module of no factory", "give a function that builds it");
  auto made = factory(context);
  check_usage(made != nullptr, "the factory of a module builds nothing", "let it return the module");
  made->set_factory(std::move(factory));
  return made;
}

// Saved files, checkpoints and ranks know parameters by their names, joined by dots. A name may have dots of its own
// ("h.0"), so one that begins with another's name and a dot may come to the same.
void Module::check_name(const std::string& name, const char* what) const {
  if (name.empty() || name.starts_with('.') || name.ends_with('.'))
    throw UsageError(fmt::format("a {} of {} is registered as '{}'", what, type_name(), name),
                     "give it a name; dots come between names");
  const auto check = [&](const std::string& other) {
    if (name != other && !name.starts_with(other + ".") && !other.starts_with(name + ".")) return;
    throw UsageError(
        fmt::format("a {} of {} is registered as '{}', where there is '{}' already", what, type_name(), name, other),
        "give each parameter, buffer and child of a module a name of its own");
  };
  for (const auto& parameter : parameters_) check(parameter.first);
  for (const auto& child : children_) check(child.first);
  for (const auto& buffer : buffers_) check(buffer.name);
}

void Module::check_child(const std::string& name, const Module* child) const {
  check_name(name, "child");
  if (child == nullptr || child == this)
    throw UsageError(fmt::format("the child '{}' of {} is {}", name, type_name(),
                                 child == nullptr ? "nothing" : "the module itself"),
                     "register a module that is another one");
}

Parameter& Module::register_parameter(std::string name, std::unique_ptr<Parameter> parameter) {
  check_name(name, "parameter");
  if (parameter == nullptr)
    throw UsageError(fmt::format("the parameter '{}' of {} is nothing", name, type_name()), "make it before");
  Parameter& reference = *parameter;
  parameters_.emplace_back(std::move(name), std::move(parameter));
  return reference;
}

Tensor& Module::register_buffer(std::string name, Backend& backend, Tensor tensor) {
  check_name(name, "buffer");
  buffers_.push_back({std::move(name), &backend, std::make_unique<Tensor>(std::move(tensor))});
  return *buffers_.back().tensor;
}

std::string to_string(const Module& module) {
  std::string text = module.type_name() + "(" + module.details();
  for (const auto& [name, child] : module.children_) {
    text += "\n  (" + name + "): ";
    for (const char c : to_string(*child)) {
      text += c;
      if (c == '\n') text += "  ";
    }
  }
  return text + (module.children_.empty() ? ")" : "\n)");
}

double Generator::unit(std::uint64_t key) {
  return static_cast<double>(SplitMix64::word(key, next_++) >> 11) * 0x1.0p-53;
}

void Generator::uniform(std::span<float> values, double low, double high) {
  if (!draws_) {
    std::ranges::fill(values, 0.0f);
    return;
  }
  const std::uint64_t key = mix64(seed_);
  for (float& value : values) value = static_cast<float>(low + (high - low) * unit(key));
}

void Generator::normal(std::span<float> values, double mean, double deviation) {
  if (!draws_) {
    std::ranges::fill(values, 0.0f);
    return;
  }
  const std::uint64_t key = mix64(seed_);
  for (float& value : values) {
    const double radius = std::sqrt(-2.0 * std::log1p(-unit(key)));
    value = static_cast<float>(mean + deviation * radius * std::cos(2.0 * std::numbers::pi * unit(key)));
  }
}

}  // namespace lockstep::nn
