#include "trainer/distributed.h"

#include <algorithm>

#include "base/text.h"
#include "comm/agree.h"
#include "trainer/config.h"

namespace lockstep::trainer {
namespace {

using Options = DistributedDataParallel::Options;

void check_id(int id, const char* what, Device device) {
  if (id == device.index) return;
  throw UsageError(fmt::format("{} is {}, and the module is on {}", what, id, to_string(device)),
                   fmt::format("give {}, or build the module on that device", device.index));
}

// The module's backend. What is wrong is said before anything collective happens.
nn::Backend& checked_backend(const nn::Module& module, const comm::ProcessGroup& group, const Options& options) {
  const auto parameters = module.named_parameters();
  check_usage(std::ranges::any_of(parameters, [](const auto& named) { return named.parameter->requires_grad(); }),
              "DistributedDataParallel of a module that has no parameters to train", "use the module as it is");
  nn::Backend& backend = parameters.front().parameter->backend();
  const auto check_place = [&](const std::string& name, const nn::Backend& other) {
    if (&other == &backend) return;
    throw UsageError(fmt::format("{} is on {}, and {} on {}", name, to_string(other.device()), parameters.front().name,
                                 to_string(backend.device())),
                     "build the whole module with one backend: that of this rank's device");
  };
  for (const auto& [name, parameter] : parameters) {
    check_place(name, parameter->backend());
    if (parameter->on_ready)
      throw UsageError(fmt::format("{} belongs to another DistributedDataParallel already", name),
                       "wrap a module once; end the other one before, if this is to take its place");
  }
  for (const auto& buffer : module.named_buffers()) check_place(buffer.name, *buffer.backend);
  if (backend.device() != group.device())
    throw UsageError(fmt::format("the module is on {}, and this rank's device is {}", to_string(backend.device()),
                                 to_string(group.device())),
                     "build the module with that device's backend, or sum over a group of the module's device");
  if (options.device_ids.size() > 1) {
    std::vector<std::string> ids;
    for (const int id : options.device_ids) ids.push_back(fmt::to_string(id));
    throw UsageError(fmt::format("device_ids names {} devices ({}), and a rank has one", ids.size(), join(ids, ", ")),
                     "give one, and start a process for each device; DataParallel has several in one process");
  }
  if (!options.device_ids.empty()) check_id(options.device_ids.front(), "device_ids", backend.device());
  if (options.output_device) check_id(*options.output_device, "output_device", backend.device());
  const auto is_size = [](double mib) { return mib > 0 && mib <= kMostBucketMib; };
  check_usage(is_size(options.first_bucket_mb) && is_size(options.bucket_cap_mb.value_or(1.0)),
              "a bucket of no size that memory can have", "give MiB above 0");
  return backend;
}

ddp::BucketLimits limits_of(const Options& options, const comm::ProcessGroup& group) {
  constexpr double kMib = 1048576.0;
  return {.first_bytes = static_cast<std::size_t>(options.first_bucket_mb * kMib),
          .bytes = options.bucket_cap_mb ? static_cast<std::size_t>(*options.bucket_cap_mb * kMib)
                                         : group.preferred_bucket_bytes()};
}

}  // namespace

DistributedDataParallel::DistributedDataParallel(nn::Module& module, comm::ProcessGroup& group, const Options& options)
    : module_(module) {
  nn::Backend* backend = nullptr;
  comm::run_collectively(group, [&] { backend = &checked_backend(module, group, options); });
  // A loop of one's own may move the parameters next, and reads no outcome of the step a step later.
  replica_.emplace(group, *backend, module, limits_of(options, group),
                   Replica::Options{.broadcast_buffers = options.broadcast_buffers,
                                    .find_unused = options.find_unused_parameters,
                                    .wait_for_unused = true});
  replica_->refuse_strays(true);
  register_borrowed("module", module);
}

// Collective: on a rank that runs no pass too.
void DistributedDataParallel::begin_pass() {
  replica_->check_intact();
  if (std::exchange(buffers_due_, false)) replica_->sync_buffers();
}

nn::Var DistributedDataParallel::forward(nn::Tape& tape, nn::Var x) {
  if (tape.recording() && tape.listener() != nullptr && tape.listener() != this)
    throw UsageError("two DistributedDataParallel modules in the passes of one tape, of which backward would sum one",
                     "wrap a module that has both, or give each a tape of its own");
  begin_pass();
  if (tape.recording()) {
    pass_syncs_ = buffers_due_ = no_syncs_ == 0;
    tape.set_listener(this);
  }
  return module_.forward(tape, x);
}

void DistributedDataParallel::contribute_nothing() {
  begin_pass();
  buffers_due_ = true;
  begin_gradients();
  replica_->begin_reduction(++step_);
  replica_->contribute_nothing();
  finish();
}

// Sums that the loop has not forgotten are added to, and must not be summed again.
void DistributedDataParallel::begin_gradients() {
  if (std::exchange(sums_held_, false)) replica_->keep_sums_once();
}

void DistributedDataParallel::backward_begins() {
  replica_->check_intact();
  replica_->refuse_strays(false);
  begin_gradients();
  if (!pass_syncs_) return;
  replica_->begin_reduction(++step_);
  replica_->mark_unused();
}

void DistributedDataParallel::node_walked() {
  if (replica_->reducing()) replica_->reducer().poll();
}

void DistributedDataParallel::backward_ended() {
  replica_->refuse_strays(true);
  replica_->reducing() ? finish() : replica_->mark_partial();
}

void DistributedDataParallel::finish() {
  replica_->finish([](auto) {});
  replica_->rebuild_buckets();  // here, where all ranks are: what they do until the next backward is the loop's affair
  sums_held_ = true;
}

}  // namespace lockstep::trainer
