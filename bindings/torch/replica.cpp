#include "bindings/torch/replica.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::torch::detail {
namespace {

namespace autograd = ::torch::autograd;
using Options = Replica::Options;

constexpr double kMostBucketMib = 1 << 20;  // 1 TiB

// What is wrong is said before anything collective happens.
void check_arguments(const ::torch::nn::Module* module, const comm::ProcessGroup& group, const Options& options) {
  check_usage(module != nullptr, "DistributedDataParallel of a null pointer", "give it a module");
  const auto parameters = parameters_of(*module);
  check_usage(std::ranges::any_of(parameters, [](const auto& named) { return named.tensor.requires_grad(); }),
              "DistributedDataParallel of a module that has no parameters to train", "use the module as it is");
  const ::torch::Device device = device_of(group);
  const auto check_place = [&](const NamedTensor& named) {
    if (named.tensor.device() == device && named.tensor.layout() == ::torch::kStrided) return;
    throw UsageError(named.name + " is " + (named.tensor.layout() == ::torch::kStrided ? "" : "sparse, ") + "on " +
                         named.tensor.device().str() + ", and the group's memory on " + device.str(),
                     "have the module there, in dense tensors; groups on a GPU are those of comm::make_device_group()");
  };
  for (const auto& named : parameters) {
    check_place(named);
    if (!named.tensor.requires_grad()) continue;
    if (!summed_in(named.tensor.scalar_type()))
      throw UsageError("the gradient of " + named.name + " is " + name_of(named.tensor.scalar_type()),
                       "gradients are summed in f32, f64, bf16 and f16: have the parameter in one of them");
    if (GradientSlots::is_hooked(named.tensor))
      throw UsageError(named.name + " belongs to another DistributedDataParallel already",
                       "wrap a module once; end the other one before, if this is to take its place");
  }
  for (const auto& named : buffers_of(*module)) check_place(named);
  const auto is_size = [](double mib) { return mib > 0 && mib <= kMostBucketMib; };
  check_usage(is_size(options.first_bucket_mb) && is_size(options.bucket_cap_mb.value_or(1.0)),
              "a bucket of no size that memory can have", "give MiB above 0");
}

ddp::BucketLimits limits_of(const Options& options, const comm::ProcessGroup& group) {
  constexpr double kMib = 1048576.0;
  return {.first_bucket_bytes = static_cast<std::size_t>(options.first_bucket_mb * kMib),
          .bucket_bytes = options.bucket_cap_mb ? static_cast<std::size_t>(*options.bucket_cap_mb * kMib)
                                                : group.preferred_bucket_bytes()};
}

/// The nodes that the backward which runs is limited to, as by autograd::grad(); nothing: to none.
const auto* chosen_nodes() {
  const auto* const chosen = autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && !chosen->empty() ? chosen : nullptr;
}

/// Called when backward comes to the node, with whatever gradients, also none.
class PassHook final : public autograd::FunctionPreHook {
 public:
  PassHook(std::weak_ptr<Replica> replica, std::shared_ptr<Pass> pass)
      : replica_(std::move(replica)), pass_(std::move(pass)) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (const auto replica = replica_.lock())
      replica->reached(*pass_);
    else if (pass_->syncs && chosen_nodes() == nullptr)
      throw UsageError(
          "backward of a pass whose DistributedDataParallel is no longer there: nobody would sum its gradients",
          "keep it until backward has ended");
    return gradients;
  }

 private:
  std::weak_ptr<Replica> replica_;
  std::shared_ptr<Pass> pass_;
};

/// Copies of tensors that depend on no parameter, which require a gradient nevertheless: backward through them is
/// possible, and comes to a node.
struct RequireGradient : autograd::Function<RequireGradient> {
  static ::torch::Tensor forward(autograd::AutogradContext* /*context*/, const ::torch::Tensor& value,
                                 const ::torch::Tensor& /*requires_grad*/) {
    return value.clone();
  }
  static autograd::variable_list backward(autograd::AutogradContext* /*context*/,
                                          autograd::variable_list /*gradients*/) {
    return {::torch::Tensor(), ::torch::Tensor()};
  }
};

}  // namespace

std::shared_ptr<Replica> Replica::make(std::shared_ptr<::torch::nn::Module> module, comm::ProcessGroup& group,
                                       const Options& options) {
  comm::run_collectively(group, [&] { check_arguments(module.get(), group, options); });
  const std::shared_ptr<Replica> replica(new Replica(std::move(module), group, options));
  replica->gradients_->install_hooks(replica);
  return replica;
}

Replica::Replica(std::shared_ptr<::torch::nn::Module> module, comm::ProcessGroup& group, const Options& options)
    : module_(std::move(module)),
      group_(group),
      group_lifetime_(group.lifetime()),
      stream_(group),
      options_(options),
      all_(parameters_of(*module_)) {
  const auto buffers = buffers_of(*module_);
  comm::Manifest manifest = manifest_of(all_, buffers);
  manifest.emplace_back("average_gradients", options.average_gradients ? "true" : "false");
  manifest.emplace_back("broadcast_buffers", options.broadcast_buffers ? "true" : "false");
  comm::compare_manifests(group, manifest);
  std::vector<NamedTensor> trained;
  for (const auto& named : all_) {
    forms_.push_back({named.tensor.scalar_type(), named.tensor.sizes().vec(), described(named)});
    trained_.push_back(named.tensor.requires_grad());
    if (trained_.back()) trained.push_back(named);
  }
  gradients_.emplace(group, std::move(trained), limits_of(options, group),
                     GradientSlots::Options{.reducer = {.find_unused = options.find_unused_parameters,
                                                        // Nobody calls finish() who could look at the count later.
                                                        .wait_for_unused = group.device().kind != DeviceKind::kCpu},
                                            .scale = options.average_gradients ? 1.0 / group.size() : 1.0,
                                            .as_views = options.gradient_as_bucket_view});
  TensorBytes(all_).broadcast(group);
  TensorBytes(buffers).broadcast(group);
  if (options.broadcast_buffers) buffers_.emplace(*module_, group);
}

void Replica::check_group() const {
  check_usage(group_lifetime_.alive(), "DistributedDataParallel over a group that is gone",
              "keep the group as long as what sums over it");
}

void Replica::check_intact() const {
  check_group();
  check_usage(walk_ != Walk::kSumming,
              "a pass begins in the middle of a backward that sums, or after one that an error has ended",
              "call forward() before backward(), and end the process after an error");
  check_parameters();
}

void Replica::check_parameters() const {
  const auto now = parameters_of(*module_);
  constexpr const char* kAnew = "change a module before it is wrapped, or make a new DistributedDataParallel";
  for (std::size_t i = 0; i < std::max(now.size(), all_.size()); ++i) {
    if (i >= now.size() || (i < all_.size() && now.size() < all_.size() && now[i].name != all_[i].name))
      throw UsageError(all_[i].name + " is no longer in the module, and was when DistributedDataParallel was made",
                       kAnew);
    if (i >= all_.size() || now[i].name != all_[i].name || !now[i].tensor.is_same(all_[i].tensor))
      throw UsageError(
          now[i].name +
              " was not in the module when DistributedDataParallel was made: its gradient would not be summed",
          kAnew);
    const auto& [type, sizes, text] = forms_[i];
    if (now[i].tensor.scalar_type() != type || now[i].tensor.sizes() != sizes)
      throw UsageError(described(now[i]) + " was " + text + " when DistributedDataParallel was made", kAnew);
    if (now[i].tensor.requires_grad() == trained_[i]) continue;
    throw UsageError(
        now[i].name + (trained_[i] ? " is not trained now, and was when DistributedDataParallel was made"
                                   : " is trained now, and was not when DistributedDataParallel was made: its "
                                     "gradient would not be summed"),
        "call set_requires_grad() before, or make a new DistributedDataParallel");
  }
}

// Collective where buffers are due: on a rank that runs no pass too.
std::shared_ptr<Pass> Replica::begin_pass() {
  check_intact();
  walk_ = Walk::kNone;  // of a backward of this rank alone that an error has ended
  gradients_->apply_order();
  if (std::exchange(buffers_due_, false) && buffers_) {
    const auto order = stream_.order();
    group_.set_step(step_ + 1);
    buffers_->broadcast();
  }
  if (!::torch::GradMode::is_enabled()) return nullptr;
  last_pass_ = std::make_shared<Pass>(Pass{.syncs = no_syncs_ == 0});
  return last_pass_;
}

void Replica::end_pass(const std::shared_ptr<Pass>& pass, const std::vector<::torch::Tensor*>& outputs) {
  if (pass == nullptr) return;
  if (pass->syncs && std::ranges::none_of(outputs, [](const auto* output) { return output->requires_grad(); })) {
    const auto one = ::torch::zeros({}, ::torch::requires_grad());
    for (auto* const output : outputs)
      if (output->is_floating_point()) *output = RequireGradient::apply(*output, one);
  }
  std::vector<const autograd::Node*> hooked;
  for (auto* const output : outputs) {
    if (!output->requires_grad()) continue;
    if (output->is_leaf()) *output = output->view_as(*output);
    auto* const node = output->grad_fn().get();
    if (std::ranges::find(hooked, node) != hooked.end()) continue;
    hooked.push_back(node);
    node->add_pre_hook(std::make_unique<PassHook>(weak_from_this(), pass));
  }
}

// Whether the backward that runs adds to gradients of ours: not where torch::autograd::grad() computes some.
bool Replica::accumulates() const {
  const auto* const chosen = chosen_nodes();
  if (chosen == nullptr) return true;
  return std::ranges::any_of(gradients_->parameters(), [&](const auto& parameter) {
    const auto node = autograd::impl::try_get_grad_accumulator(parameter);
    if (node == nullptr) return false;
    const auto found = chosen->find(node.get());
    return found != chosen->end() && found->second.needed_;
  });
}

void Replica::reached(Pass& pass) {
  if (!accumulates()) return;
  begin_walk(pass);
}

void Replica::begin_walk(Pass& pass) {
  check_group();
  if (!pass.syncs) {
    pass.walked = true;
    if (walk_ != Walk::kNone) return;
    keep_sums_once();
    walk_ = Walk::kLocal;
    autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
      if (const auto replica = weak.lock(); replica && replica->walk_ == Walk::kLocal) replica->walk_ = Walk::kNone;
    });
    return;
  }
  if (walk_ == Walk::kSumming) {
    pass.walked = true;
    return;
  }
  check_usage(!pass.walked, "a second backward of one pass, whose gradients are summed already",
              "add up the losses and call backward() once, or run all passes but the last one under no_sync()");
  keep_sums_once();
  begin_step_of_backward(pass);
}

// The loss uses more of the pass than its outputs.
void Replica::begin_without_output(std::size_t slot) {
  if (last_pass_ == nullptr || last_pass_->walked) refuse_stray(slot);
  if (!last_pass_->syncs) return;
  check_group();
  // It has been added to already, and which part of it is a sum cannot be said.
  const auto& parameters = gradients_->parameters();
  const auto has_gradient = [](const auto& parameter) { return parameter.grad().defined(); };
  const bool cleared = parameters.size() > 1 && std::ranges::count_if(parameters, has_gradient) == 1;
  if (sums_held_ && !cleared && !options_.average_gradients && group_.size() > 1)
    throw UsageError("backward has come to " + gradients_->names()[slot] +
                         " before an output of forward(), and gradients of an earlier step may be in it",
                     "call zero_grad(), which sets gradients to none, or have forward() return all that the loss uses");
  sums_held_ = false;
  begin_step_of_backward(*last_pass_);
}

void Replica::begin_step() {
  const auto order = stream_.order();
  gradients_->reducer().begin_step(++step_);
  if (scalars_.defined()) tail().copy_(scalars_);
  walk_ = Walk::kSumming;
}

/// Where the reducer sums scalars().
::torch::Tensor Replica::tail() const {
  return ::torch::from_blob(gradients_->reducer().tail().data(), {DistributedDataParallelBase::kScalars},
                            ::torch::dtype(::torch::kFloat32).device(device_of(group_)));
}

void Replica::begin_step_of_backward(Pass& pass) {
  pass.walked = true;
  begin_step();
  autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto replica = weak.lock()) replica->finish();
  });
}

// Sums that the loop has not cleared are added to, and must not be summed again: rank 0 keeps them. Averages are the
// average of themselves.
void Replica::keep_sums_once() {
  if (!std::exchange(sums_held_, false) || options_.average_gradients || group_.rank() == 0) return;
  const ::torch::NoGradGuard guard;
  for (const auto& parameter : gradients_->parameters())
    if (parameter.grad().defined()) parameter.mutable_grad().zero_();
}

void Replica::accumulated(std::size_t slot) {
  if (walk_ == Walk::kNone && no_syncs_ == 0) begin_without_output(slot);
  if (walk_ != Walk::kSumming || !gradients_->parameters()[slot].grad().defined()) return;
  const auto order = stream_.order();
  gradients_->send(slot);
  gradients_->reducer().poll();
}

void Replica::refuse_stray(std::size_t slot) const {
  throw UsageError(
      gradients_->names()[slot] +
          " got a gradient in a pass that DistributedDataParallel knows nothing of: it would not be summed "
          "over the ranks",
      "call the DistributedDataParallel and not the module in it (ddp(x), not net->forward(x)); for "
      "gradients of this rank alone, do so while no_sync() is there");
}

void Replica::finish() {
  const auto order = stream_.order();
  gradients_->finish();
  // On a GPU that waits for it: where nobody has asked for scalars, nobody does.
  if (group_.device().kind == DeviceKind::kCpu || scalars_.defined())
    std::memcpy(summed_scalars_.data(), tail().cpu().data_ptr(), sizeof summed_scalars_);
  walk_ = Walk::kNone;
  sums_held_ = buffers_due_ = true;
}

void Replica::contribute_nothing() {
  const ::torch::NoGradGuard guard;
  begin_pass();
  keep_sums_once();
  begin_step();
  if (!gradients_->any_held()) gradients_->reducer().contribute_nothing();
  finish();
}

::torch::Tensor Replica::scalars() {
  if (!scalars_.defined()) scalars_ = ::torch::zeros({DistributedDataParallelBase::kScalars}, ::torch::kFloat32);
  return scalars_.detach();  // a loss that is written there brings its graph along: into this tensor, not into ours
}

::torch::Tensor Replica::summed_scalars() const {
  return ::torch::tensor(::torch::ArrayRef<float>(summed_scalars_.data(), summed_scalars_.size()), ::torch::kFloat32);
}

void Replica::check(bool buffers) const {
  check_intact();
  auto tensors = all_;
  if (buffers) std::ranges::move(buffers_of(*module_), std::back_inserter(tensors));
  TensorBytes(tensors).check(group_);
}

void Replica::broadcast_buffers() {
  check_intact();
  TensorBytes(buffers_of(*module_)).broadcast(group_);
}

}  // namespace lockstep::torch::detail
