// Steps in shards: DistributedDataParallel::run_shards().
#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/scope.h"
#include "parallel/shard_copy.h"
#include "parallel/sharded_parameters.h"

namespace lockstep::parallel {

DistributedDataParallel::~DistributedDataParallel() {
  if (sharded_ != nullptr) sharded_->close();
}

void DistributedDataParallel::list_statistics() {
  module_buffers_ = module_.named_buffers();
  for (std::size_t i = 0; i < module_buffers_.size(); ++i) {
    const nn::Tensor& value = *module_buffers_[i].tensor;
    Statistic statistic{.buffer = i, .before = backend_->empty(value.shape(), value.dtype())};
    if (value.dtype() == DType::kF32) {
      statistic.place = static_cast<std::size_t>(kScalars) + statistics_floats_;
      statistics_floats_ += static_cast<std::size_t>(value.count());
    }
    statistics_.push_back(std::move(statistic));
  }
}

std::unique_ptr<nn::Module> DistributedDataParallel::copy_of_module(nn::Backend& backend) const {
  check_usage(module_.factory() != nullptr, "a copy of a module that nobody knows how to build again",
              "build it by nn::build()");
  nn::Generator generator = nn::Generator::zeros();
  nn::Context context{backend, generator};
  auto copy = module_.factory()(context);
  check_usage(copy != nullptr, "the factory of a module builds nothing", "let it return the module");
  const auto all = module_.named_parameters();
  const auto theirs = copy->named_parameters();
  for (std::size_t p = 0; p < std::min(all.size(), theirs.size()); ++p)
    theirs[p].parameter->set_requires_grad(all[p].parameter->requires_grad());
  check_usage(manifest_of(*copy) == manifest_of(module_), "the factory of a module builds another one",
              "let it build the same parameters and buffers each time");
  for (std::size_t p = 0; p < all.size(); ++p) theirs[p].parameter->share_value(*all[p].parameter);
  return copy;
}

void DistributedDataParallel::make_shard_copies(const Options& options) {
  if (options.shards_at_once == 1) return;
  check_usage(backend_->device().kind == DeviceKind::kCpu, "several shards at a time on a device that is not the CPU",
              "leave shards_at_once out: a GPU computes one after the other");
  check_usage(options.shard_backend != nullptr, "several shards at a time, and nothing to compute them with",
              "give Options::shard_backend");
  for (int i = 1; i < options.shards_at_once; ++i) {
    auto copy = std::make_unique<ShardCopy>();
    copy->backend = options.shard_backend();
    check_usage(copy->backend != nullptr && copy->backend->device().kind == DeviceKind::kCpu,
                "a shard's backend that is none of the CPU's", "let shard_backend make one: nn::make_cpu_backend()");
    copy->module = copy_of_module(*copy->backend);
    auto theirs = copy->module->named_parameters();
    std::erase_if(theirs, [](const auto& named) { return !named.parameter->requires_grad(); });
    copy->parameters = theirs;
    copy->versions.assign(theirs.size(), 0);
    copy->buffers = copy->module->named_buffers();
    copy->tape = std::make_unique<nn::Tape>(*copy->backend);
    copy->thread = std::make_unique<DeviceThread>(*copy->backend);
    gradients_->add_copy(std::move(theirs));
    shard_copies_.push_back(std::move(copy));
  }
}

void DistributedDataParallel::check_cleared(const char* what) const {
  const bool cleared =
      std::ranges::none_of(parameters(), [](const auto& named) { return named.parameter->has_gradient(); });
  check_usage(cleared, what, "call zero_grad() before each step");
}

void DistributedDataParallel::set_tree(const comm::ReductionTree& tree) {
  check_intact();
  check_usage(tree_ != nullptr && !in_shards_, "set_tree() within a step, or where ranks are summed",
              "give Options::tree, and call it between steps");
  check_cleared("set_tree() while gradients of the last step are there");
  gradients_->set_tree(tree);
  tree_ = &tree;
}

void DistributedDataParallel::hash_shards(bool wanted) {
  check_usage(tree_ != nullptr && backend_->device().kind == DeviceKind::kCpu,
              "hash_shards() without Options::tree, or on a device that is not the CPU", "leave it out");
  hashes_shards_ = wanted;
}

void DistributedDataParallel::begin_sharded_step() {
  begin_pass();
  check_cleared("a step in shards begins while gradients of the last one are there");
  check_usage(no_syncs_ == 0, "no_sync() where shards are summed along a tree",
              "leave it out: run_shards() sums after a rank's last shard");
  sums_held_ = false;
  shard_hashes_.assign(tree_->run_of(group_.rank()).count, 0);
  gradients_->apply_layout();
  gradients_->begin_reduction(++step_);
  for (const Statistic& statistic : statistics_)
    backend_->pointwise().copy(*module_buffers_[statistic.buffer].tensor, statistic.before);
  for (const auto& copy : shard_copies_) {
    copy->module->take_modes(module_);
    for (std::size_t p = 0; p < copy->parameters.size(); ++p) {
      const std::uint64_t version = parameters()[p].parameter->version();
      if (std::exchange(copy->versions[p], version) != version) copy->parameters[p].parameter->changed();
    }
  }
}

void DistributedDataParallel::run_shards(nn::Tape& tape, std::int64_t all_samples,
                                         FunctionRef<std::int64_t(std::uint32_t)> samples_of,
                                         FunctionRef<nn::Var(const ShardPass&)> loss) {
  check_usage(tree_ != nullptr, "a step in shards where ranks are summed", "give Options::tree");
  check_usage(!in_shards_, "a step in shards within another one", "call run_shards() once for each step");
  check_usage(all_samples >= 1, "a step of no samples", "give the samples of all shards together");
  begin_sharded_step();
  {
    in_shards_ = true;
    const OnExit leave([this] { in_shards_ = false; });
    do {
      run_turn(tape, samples_of, loss);
    } while (!gradients_->is_last_turn());
  }
  finish_sharded_step(all_samples);
}

// The turn's first shard is this thread's, and gradients start on their way as its backward makes them.
void DistributedDataParallel::run_turn(nn::Tape& tape, FunctionRef<std::int64_t(std::uint32_t)> samples_of,
                                       FunctionRef<nn::Var(const ShardPass&)> loss) {
  const comm::TreeNode shards = gradients_->begin_turn();
  const std::uint32_t first = tree_->run_of(group_.rank()).first;
  if (shards.first == first && scalars_.defined())
    backend_->pointwise().copy(scalars_, nn::Tensor::view_of(gradients_->reducer().tail().data(), {kScalars}));
  if (hashes_shards_) gradients_->set_hashes(std::span(shard_hashes_).subspan(shards.first - first, shards.count));
  // Before a thread computes: what throws here leaves none running.
  samples_of_turn_.clear();
  for (std::size_t i = 0; i < shards.count; ++i)
    samples_of_turn_.push_back(samples_of(shards.first + static_cast<std::uint32_t>(i)));
  const auto samples = [&](std::size_t i) { return samples_of_turn_[i]; };
  for (std::size_t i = 0; i < shards.count; ++i)
    if (samples(i) == 0) gradients_->skip_shard(i);
  for (std::size_t i = shards.count; i > 0; --i)
    if (samples(i - 1) > 0) counted_by_ = i - 1;
  gradients_->begin_passes();
  const auto run = [&](std::size_t i) {
    nn::Tape& own = i == 0 ? tape : *shard_copies_[i - 1]->tape;
    run_shard(own, shards.first + static_cast<std::uint32_t>(i), i, samples(i), loss);
  };
  const FunctionRef<void(std::size_t)> work(run);
  shard_errors_.assign(shards.count, nullptr);
  for (std::size_t i = 1; i < shards.count; ++i)
    if (samples(i) > 0) shard_copies_[i - 1]->thread->start(work, i);
  if (samples(0) > 0) {
    try {
      run(0);
    } catch (...) {
      shard_errors_[0] = std::current_exception();
    }
  }
  for (std::size_t i = 1; i < shards.count; ++i)
    if (samples(i) > 0) shard_errors_[i] = shard_copies_[i - 1]->thread->finish();
  for (const auto& error : shard_errors_)
    if (error != nullptr) std::rethrow_exception(error);
  gradients_->end_turn();
}

// On the thread of that number.
void DistributedDataParallel::run_shard(nn::Tape& tape, std::uint32_t shard, std::size_t number, std::int64_t samples,
                                        FunctionRef<nn::Var(const ShardPass&)> loss) {
  ShardCopy* const copy = number == 0 ? nullptr : shard_copies_[number - 1].get();
  nn::Backend& backend = copy == nullptr ? *backend_ : *copy->backend;
  const auto& buffers = copy == nullptr ? module_buffers_ : copy->buffers;
  for (const Statistic& statistic : statistics_)
    backend.pointwise().copy(statistic.before, *buffers[statistic.buffer].tensor);
  auto* const tail = reinterpret_cast<float*>(gradients_->reducer().tail(number).data());
  const nn::Tensor scalars = nn::Tensor::view_of(tail, {kScalars});
  tape.reset();
  nn::Module& module = copy == nullptr ? static_cast<nn::Module&>(*this) : *copy->module;
  const nn::Var value = loss({.shard = shard, .tape = tape, .module = module, .backend = backend, .scalars = scalars});
  for (const Statistic& statistic : statistics_) {
    const nn::Tensor& made = *buffers[statistic.buffer].tensor;
    if (statistic.place == 0) continue;
    backend.pointwise().add_to(made, static_cast<float>(samples),
                               nn::Tensor::view_of(tail + statistic.place, made.shape()));
  }
  tape.backward(value);
  tape.reset();
}

void DistributedDataParallel::finish_sharded_step(std::int64_t all_samples) {
  finish();
  nn::PointwiseKernels& kernels = backend_->pointwise();
  auto* const sums = reinterpret_cast<float*>(gradients_->reducer().tail().data());
  for (const Statistic& statistic : statistics_) {
    const nn::Tensor& mine = *module_buffers_[statistic.buffer].tensor;
    if (statistic.place == 0) continue;
    kernels.fill(mine, 0.0f);
    kernels.add_to(nn::Tensor::view_of(sums + statistic.place, mine.shape()), 1.0f / static_cast<float>(all_samples),
                   mine);
  }
  // Those that count steps have counted this one wherever there were samples.
  for (const Statistic& statistic : statistics_) {
    if (statistic.place > 0 || counted_by_ == 0) continue;
    kernels.copy(*shard_copies_[counted_by_ - 1]->buffers[statistic.buffer].tensor,
                 *module_buffers_[statistic.buffer].tensor);
  }
  sync_buffers();
}

// Of all shards the last one has samples whenever any has (sampler::slice_of()).
int DistributedDataParallel::buffers_root() const { return tree_ == nullptr ? 0 : tree_->order().back(); }

}  // namespace lockstep::parallel
