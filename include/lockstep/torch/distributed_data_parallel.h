// DistributedDataParallel for LibTorch, PyTorch's C++ frontend.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/torch/tensors_of.h"

namespace lockstep::torch {

struct DistributedDataParallelOptions {
  /// After backward each gradient is the sum over the ranks divided by their number, as in PyTorch, in place of the
  /// sum: Note [Sums].
  bool average_gradients = false;
  /// Before the first pass, and the first pass after each backward that sums, rank 0's buffers (running statistics)
  /// become everyone's: a collective.
  bool broadcast_buffers = true;
  /// A pass may leave out parameters, on some ranks or on all. Parameters that no rank has used keep their grad(), and
  /// optimizers skip an undefined one. Without this option, backward() throws a UsageError on every rank and names
  /// them.
  bool find_unused_parameters = false;
  /// After backward grad() is the reducer's memory, in place of a copy: faster, and less memory. The next backward
  /// writes there, so a gradient that is to be kept is cloned. The memory stays as long as a tensor refers to it, also
  /// after the DistributedDataParallel and the group. bf16 and f16 are copied nevertheless.
  bool gradient_as_bucket_view = false;
  /// MiB; default: ProcessGroup::preferred_bucket_bytes().
  std::optional<double> bucket_cap_mb = std::nullopt;
  double first_bucket_mb = 1.0;
};

namespace detail {

class Replica;  // bindings/torch/replica.h

/// A pass of forward() on its way to its outputs: what a walk backwards from them starts.
struct Pass {
  bool syncs = true;    // not begun under a NoSync
  bool walked = false;  // backwards
};

}  // namespace detail

/// All of a DistributedDataParallel but its module's type.
class DistributedDataParallelBase {
 public:
  using Options = DistributedDataParallelOptions;

  ~DistributedDataParallelBase();
  DistributedDataParallelBase(const DistributedDataParallelBase&) = delete;
  DistributedDataParallelBase& operator=(const DistributedDataParallelBase&) = delete;

  comm::ProcessGroup& group() const;
  /// Those that are trained, each once, however many names it has: for the optimizer.
  const std::vector<::torch::Tensor>& parameters() const;
  /// Theirs.
  const std::vector<std::string>& parameter_names() const;
  const ddp::Reducer& reducer() const;

  /// In place of a step's forward and backward, on a rank that has no samples in it, or none for its last part.
  void contribute_nothing();

  /// While one lives, passes begun by forward() only add to this rank's gradients: of a global batch in several parts,
  /// all but the last. Several may live at once, and end in any order, also after the DistributedDataParallel.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(DistributedDataParallelBase& ddp);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::weak_ptr<detail::Replica> replica_;
  };
  NoSync no_sync() { return NoSync(*this); }

  /// (kScalars) f32 on the CPU, wherever the module is, of zeros at first: numbers of this rank, a loss or a count,
  /// that are summed over the ranks along with the gradients. What it holds when a backward that sums begins is sent;
  /// it keeps its content. Each call returns a handle of the same memory, without the graph of what was written there.
  static constexpr std::int64_t kScalars = ddp::Reducer::kTailFloats;
  ::torch::Tensor scalars();
  /// A copy of their sums in the last step; zeros before it.
  ::torch::Tensor summed_scalars() const;

  /// Collective, before the first step, once: `hook` carries the buckets, in place of an allreduce. It is this one's
  /// alone. Throws UsageError for nullptr, a second one, parameters in f64, and what CommHook::check() refuses;
  /// OutOfStepError where ranks name different ones.
  void register_comm_hook(std::shared_ptr<ddp::CommHook> hook);

  /// Collective: throws OutOfStepError unless all ranks' parameters are bitwise equal: now and then, and before they
  /// are saved.
  void check() const;
  /// The same of the buffers too, for where broadcast_buffers() has made them equal.
  void check_with_buffers() const;
  /// Collective: rank 0's buffers become everyone's now; before they are used or saved.
  void broadcast_buffers();

  /// The loop's own number of the next step, the same on all ranks. Messages name it, and ranks compare it: so a rank
  /// that leaves out a step is found, and its gradients do not go into sums of other steps. Without this call steps are
  /// counted here, and a difference between the ranks' loops shows only at their end.
  void set_step(std::int64_t step);

  /// The order of buckets, by parameters' names: the order in which gradients became ready in the first step; empty
  /// before it.
  std::vector<std::string> bucket_order() const;

 protected:
  DistributedDataParallelBase(std::shared_ptr<::torch::nn::Module> module, comm::ProcessGroup& group,
                              const Options& options);
  /// Before the module's forward(). Nothing where no graph is recorded.
  std::shared_ptr<detail::Pass> begin_pass();
  /// A walk backwards from any of `outputs` begins the step. They may be replaced by others of the same values.
  void end_pass(const std::shared_ptr<detail::Pass>& pass, const std::vector<::torch::Tensor*>& outputs);

 private:
  std::shared_ptr<detail::Replica> replica_;
};

/// A module of LibTorch whose gradients are summed over the ranks of a group while backward computes them. A loop over
/// it:
///
///   auto net = std::make_shared<Net>();
///   lockstep::torch::DistributedDataParallel ddp(net, *group);
///   torch::optim::SGD optimizer(ddp.parameters(), 0.01);
///   for (…) {
///     optimizer.zero_grad();  // here, or anywhere before backward
///     auto loss = torch::nll_loss(ddp(x), labels, {}, torch::Reduction::Sum) / all_ranks_samples;
///     loss.backward();  // collectives start while it runs; after it, gradients are the sums
///     optimizer.step();
///   }
///
/// Note [Sums]
/// Gradients are summed, where PyTorch's DistributedDataParallel averages. A loss that is divided by the samples of all
/// ranks gives the global batch's gradient, however many samples each rank has. For a loss that is a mean over this
/// rank's samples, average_gradients gives what PyTorch gives: the mean of the ranks' means.
///
/// Note [What arms a step]
/// A step begins when backward comes to one of forward()'s outputs, before any parameter has its gradient, and ends in
/// a callback of the engine at the end of that backward(). So a rank on which no parameter gets a gradient takes part
/// too: it says which it lacks, and no other rank waits for it. For a pass whose outputs depend on no parameter,
/// forward() gives outputs back that require a gradient nevertheless. If backward comes to a parameter first (a loss
/// that uses what forward() has left in a member), that begins the step. torch::autograd::grad() accumulates nothing
/// and begins nothing. Backward of outputs that forward() has returned once is a step; the second one is a UsageError.
///
/// Gradients are copied into the reducer's buckets by a hook after their accumulation, and the sums back: grad() may be
/// undefined (zero_grad()), replaced or shared with a graph. f32 is summed in f32, f64 in f64; bf16 and f16 in f32, and
/// rounded once at the end, which is more exact than sums in their own type. Other types, sparse gradients and
/// gradients that are to be differentiated again (create_graph) are refused.
///
/// Note [LibTorch on a GPU]
/// The module is where the group's memory is: on the CPU, or all of it on the GPU of a group of
/// comm::make_device_group(). Its producer is the stream that is current when this is made:
///   const auto group = comm::make_device_group(*control, {.device = 0, .producer =
///   {at::cuda::getCurrentCUDAStream()}});
/// In backward, collectives and copies come after whatever streams backward uses; at its end the host waits for the
/// GPU, to learn of gradients that are missing and of ranks that have ended.
///
/// It shares ownership of the module. A pass that is not recorded (NoGradGuard) computes and nothing else, but for
/// buffers (see broadcast_buffers); to evaluate on some of the ranks alone, call module(). A pass through the module
/// itself that is recorded and walked backwards is a UsageError, out of backward(): its gradients would be summed by
/// nobody. The group must outlive its last step; where it does not, that is a UsageError, as is a backward when the
/// DistributedDataParallel of its pass is gone. Several may share a group, but not a parameter. One thread at a time
/// uses it, also for backward(), in which the collectives are issued.
///
/// An error out of a backward that has begun to sum leaves collectives under way: end the process then (run_main).
template <class Module>
class DistributedDataParallel final : public DistributedDataParallelBase {
  static_assert(std::derived_from<Module, ::torch::nn::Module>);

 public:
  /// Collective: checks the arguments on all ranks, compares modules and options, and rank 0's parameters and buffers
  /// become everyone's. Throws UsageError for a module without parameters to train, for one that is wrapped already or
  /// not wholly on the group's device, and for gradients of a type that is not summed; OutOfStepError, naming the
  /// difference and the ranks, if ranks differ; PeerError on the others.
  DistributedDataParallel(std::shared_ptr<Module> module, comm::ProcessGroup& group, const Options& options = {})
      : DistributedDataParallelBase(module, group, options), module_(std::move(module)) {}
  DistributedDataParallel(const ::torch::nn::ModuleHolder<Module>& module, comm::ProcessGroup& group,
                          const Options& options = {})
      : DistributedDataParallel(module.ptr(), group, options) {}
  /// A module of the stack may end while gradients of it are summed: give std::make_shared<Module>(…).
  DistributedDataParallel(Module& module, comm::ProcessGroup& group,
                          const Options& options = {}) requires std::derived_from<Module, ::torch::nn::Module>
  = delete;

  Module& module() const { return *module_; }

  /// The module's own, with the same arguments and result.
  template <class... Args>
  auto forward(Args&&... args) {
    return run([&](Module& module) { return module.forward(std::forward<Args>(args)...); });
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }
  /// A pass by another function than forward(): ddp.run([&](Net& net) { return net.encode(x); }). It is called once,
  /// before this returns; what it throws passes, and the next pass may begin.
  template <std::invocable<Module&> Function>
  auto run(Function&& function) {
    const auto pass = begin_pass();
    auto result = std::forward<Function>(function)(*module_);
    std::vector<::torch::Tensor*> outputs;
    for_each_tensor(result, [&](::torch::Tensor& tensor) { outputs.push_back(&tensor); });
    end_pass(pass, outputs);
    return result;
  }

 private:
  std::shared_ptr<Module> module_;
};

}  // namespace lockstep::torch
