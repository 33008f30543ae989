#include "lockstep/torch/distributed_data_parallel.h"

#include "bindings/torch/replica.h"

namespace lockstep::torch {

using Base = DistributedDataParallelBase;

Base::DistributedDataParallelBase(std::shared_ptr<::torch::nn::Module> module, comm::ProcessGroup& group,
                                  const Options& options)
    : replica_(detail::Replica::make(std::move(module), group, options)) {}

Base::~DistributedDataParallelBase() = default;

comm::ProcessGroup& Base::group() const { return replica_->group(); }
const std::vector<::torch::Tensor>& Base::parameters() const { return replica_->gradients().parameters(); }
const std::vector<std::string>& Base::parameter_names() const { return replica_->gradients().names(); }
const ddp::Reducer& Base::reducer() const { return replica_->gradients().reducer(); }

std::shared_ptr<detail::Pass> Base::begin_pass() { return replica_->begin_pass(); }
void Base::end_pass(const std::shared_ptr<detail::Pass>& pass, const std::vector<::torch::Tensor*>& outputs) {
  replica_->end_pass(pass, outputs);
}
void Base::contribute_nothing() { replica_->contribute_nothing(); }

Base::NoSync::NoSync(DistributedDataParallelBase& ddp) : replica_(ddp.replica_) { ddp.replica_->hold_sync(1); }
Base::NoSync::~NoSync() {
  if (const auto replica = replica_.lock()) replica->hold_sync(-1);
}

::torch::Tensor Base::scalars() { return replica_->scalars(); }
::torch::Tensor Base::summed_scalars() const { return replica_->summed_scalars(); }

void Base::register_comm_hook(std::shared_ptr<ddp::CommHook> hook) {
  replica_->gradients().reducer().register_comm_hook(std::move(hook));
}

void Base::check() const { replica_->check(false); }
void Base::check_with_buffers() const { replica_->check(true); }
void Base::broadcast_buffers() { replica_->broadcast_buffers(); }
void Base::set_step(std::int64_t step) { replica_->set_step(step); }
std::vector<std::string> Base::bucket_order() const { return replica_->gradients().order(); }

}  // namespace lockstep::torch
