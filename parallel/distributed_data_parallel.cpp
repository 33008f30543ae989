#include "lockstep/parallel/distributed_data_parallel.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "comm/agree.h"
#include "lockstep/ddp/replicate.h"
#include "lockstep/parallel/data_parallel.h"
#include "parallel/shard_copy.h"  // what the constructor undoes where it throws
#include "parallel/sharded_parameters.h"

namespace lockstep::parallel {
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
  check_usage(is_size(options.first_bucket_mb) && is_size(options.bucket_mb.value_or(1.0)),
              "a bucket of no size that memory can have", "give MiB above 0");
  return backend;
}

ddp::BucketLimits limits_of(const Options& options, const comm::ProcessGroup& group) {
  constexpr double kMib = 1048576.0;
  const ddp::BucketLimits limits = {.first_bucket_bytes = static_cast<std::size_t>(options.first_bucket_mb * kMib),
                                    .bucket_bytes = options.bucket_mb
                                                        ? static_cast<std::size_t>(*options.bucket_mb * kMib)
                                                        : group.preferred_bucket_bytes()};
  return options.zero > 0 ? ShardedParameters::limits(limits, group.size()) : limits;
}

std::vector<nn::NamedParameter> parameters_that(const nn::Module& module, bool trained) {
  auto all = module.named_parameters();
  std::erase_if(all, [=](const auto& named) { return named.parameter->requires_grad() != trained; });
  return all;
}

ddp::NamedBytes bytes_of(const std::string& name, const nn::Tensor& tensor) {
  return {name, {static_cast<std::byte*>(tensor.raw()), tensor.bytes()}};
}

std::vector<ddp::NamedBytes> parameter_bytes(const nn::Module& module) {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& [name, parameter] : module.named_parameters()) pieces.push_back(bytes_of(name, parameter->value()));
  return pieces;
}

std::vector<ddp::NamedBytes> buffers_of(const nn::Module& module) {
  std::vector<ddp::NamedBytes> pieces;
  for (const auto& buffer : module.named_buffers()) pieces.push_back(bytes_of(buffer.name, *buffer.tensor));
  return pieces;
}

int synchronised_norms(nn::Module& module) {
  int count = 0;
  for (const auto& [name, child] : module.named_modules()) {
    const auto* const norm = dynamic_cast<const nn::BatchNorm*>(child);
    if (norm != nullptr && norm->synchronised()) ++count;
  }
  return count;
}

/// Whose parameters it trains: names in messages, checkpoints and bucket orders are the same with DataParallel and
/// without.
nn::Module& named_module(nn::Module& module) {
  auto* const several = dynamic_cast<DataParallel*>(&module);
  return several != nullptr ? several->module() : module;
}

// Everything that collectives depend on, before the first of them does. The reducer compares what it depends on.
void compare_modules(comm::ProcessGroup& group, nn::Module& module, const Options& options) {
  comm::Manifest manifest = manifest_of(module);
  const comm::Manifest how = {
      {"zero", fmt::to_string(options.zero)},
      {"broadcast_buffers", options.broadcast_buffers ? "true" : "false"},
      {"tune_bucket_mb", options.tune_bucket_mb ? "true" : "false"},
      {"gradient_as_bucket_view", options.gradient_as_bucket_view ? "true" : "false"},
      {"synchronised batch normalisations", fmt::to_string(synchronised_norms(module))},
  };
  manifest.insert(manifest.end(), how.begin(), how.end());
  comm::compare_manifests(group, manifest);
}

std::string described(const std::string& name, const nn::Tensor& tensor) {
  return fmt::format("{} {} {}", name, name_of(tensor.dtype()), nn::to_string(tensor.shape()));
}

void check_in_shards(nn::Module& module, const Options& options) {
  check_usage(!options.static_graph, "a static graph with shards",
              "leave static_graph out: find_unused_parameters looks for unused parameters of each shard");
  check_usage(options.gradient_as_bucket_view,
              "gradient_as_bucket_view off with shards, whose gradients are always views of the buckets",
              "leave gradient_as_bucket_view on");
  check_usage(synchronised_norms(module) == 0,
              "shards with synchronised batch normalisation, whose sums are over ranks", "leave one of the two out");
  check_usage(dynamic_cast<const DataParallel*>(&module) == nullptr, "shards of a module that is a DataParallel",
              "wrap the module itself: a rank may compute several shards");
  check_usage(options.shards_at_once >= 1, "no shard at a time", "give shards_at_once of 1 or more");
  check_usage(options.broadcast_buffers, "shards where each rank keeps buffers of its own",
              "leave broadcast_buffers on: they are averaged over the shards");
}

void check_zero(const nn::Module& module, const Options& options) {
  if (options.zero < 0 || options.zero > 1)
    throw UsageError(fmt::format("zero {}, where gradients and parameters would be sharded too", options.zero),
                     "give 1, which shards updates and the optimizers' state, or 0");
  check_usage(options.zero == 0 || dynamic_cast<const DataParallel*>(&module) == nullptr,
              "zero with a module that is a DataParallel", "wrap the module itself, in a process for each device");
}

// What a reducer adds with, where it cannot by itself.
using Arithmetic = std::function<void(std::byte*, const std::byte*, std::size_t, DType)>;

Arithmetic on_device(nn::Backend& backend, bool adds) {
  return [&backend, adds](std::byte* to, const std::byte* from, std::size_t count, DType dtype) {
    const nn::Shape shape{static_cast<std::int64_t>(count)};
    const nn::Tensor y = nn::Tensor::view_of(to, shape, dtype);
    const nn::Tensor x = nn::Tensor::view_of(const_cast<std::byte*>(from), shape, dtype);
    adds ? backend.pointwise().add_to(x, 1.0f, y) : backend.pointwise().copy(x, y);
  };
}

Arithmetic adder(nn::Backend& backend) { return on_device(backend, true); }
Arithmetic copier(nn::Backend& backend) { return on_device(backend, false); }

}  // namespace

// Differences are reported in the order of the keys: parameters before buffers ("state").
std::vector<std::pair<std::string, std::string>> manifest_of(const nn::Module& module) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  comm::Manifest manifest = {
      {"number of parameters", fmt::to_string(parameters.size())},
      {"number of buffers", fmt::to_string(buffers.size())},
  };
  for (std::size_t i = 0; i < parameters.size(); ++i)
    manifest.emplace_back(fmt::format("parameter {}", i),
                          fmt::format("{}{}", described(parameters[i].name, parameters[i].parameter->value()),
                                      parameters[i].parameter->requires_grad() ? "" : ", not trained"));
  for (std::size_t i = 0; i < buffers.size(); ++i)
    manifest.emplace_back(fmt::format("state {}", i), described(buffers[i].name, *buffers[i].tensor));
  return manifest;
}

// Where batch normalisations sum in the middle of backward, gradients that are absent on some ranks would have buckets
// start at other places among those sums: they start late then.
DistributedDataParallel::DistributedDataParallel(nn::Module& module, comm::ProcessGroup& group, const Options& options)
    : module_(module),
      group_(group),
      module_lifetime_(module.lifetime()),
      group_lifetime_(group.lifetime()),
      tree_(options.tree),
      defers_unused_check_(options.defer_unused_check && !options.find_unused_parameters &&
                           group.device().kind != DeviceKind::kCpu) {
  comm::run_collectively(group, [&] {
    backend_ = &checked_backend(module, group, options);
    if (tree_ != nullptr) check_in_shards(module, options);
    check_zero(module, options);
    check_usage(!options.tune_bucket_mb || !options.bucket_mb, "tune_bucket_mb beside a bucket_mb",
                "give one of the two");
    check_usage(!options.tune_bucket_mb || options.zero == 0,
                "tune_bucket_mb with zero, where parameters lie in the buckets and cannot move",
                "give bucket_mb, or leave both out");
  });
  nn::Module& named = named_module(module);
  compare_modules(group, named, options);
  frozen_ = parameters_that(named, false);
  if (tree_ != nullptr) list_statistics();
  gradients_.emplace(group, *backend_, parameters_that(named, true), limits_of(options, group),
                     ddp::Reducer::Options{.find_unused = options.find_unused_parameters,
                                           .static_graph = options.static_graph,
                                           .start_late = (options.find_unused_parameters || options.static_graph) &&
                                                         synchronised_norms(named) > 0,
                                           .wait_for_unused = !defers_unused_check_,
                                           .tree = tree_,
                                           .shards_at_once = static_cast<std::size_t>(options.shards_at_once),
                                           .more_tail_floats = statistics_floats_,
                                           .add = adder(*backend_),
                                           .copy = copier(*backend_)},
                     options.gradient_as_bucket_view);
  if (options.zero > 0) {
    gradients_->keep_order();
    sharded_ = std::make_shared<ShardedParameters>(group, *backend_, parameters(), reducer().plan());
    if (tree_ == nullptr) gradients_->reducer().register_comm_hook(std::make_shared<ddp::ReduceScatterHook>());
  }
  if (options.tune_bucket_mb) gradients_->tune_bucket_bytes();
  broadcast_state();
  if (options.broadcast_buffers) share_buffers();
  if (tree_ != nullptr) comm::run_collectively(group, [&] { make_shard_copies(options); });
  gradients_->refuse_strays(true);
  register_borrowed("module", module);
}

void DistributedDataParallel::share_buffers() {
  auto buffers = module_.named_buffers();
  if (tree_ != nullptr)
    std::erase_if(buffers, [](const auto& buffer) { return buffer.tensor->dtype() == DType::kF32; });
  if (group_.size() == 1 || buffers.empty()) return;
  std::size_t bytes = 0;
  for (const auto& buffer : buffers) bytes += comm::align_up(buffer.tensor->bytes());
  buffer_arena_ = group_.allocate(bytes);
  std::size_t at = 0;
  for (const auto& buffer : buffers) {
    nn::Tensor& mine = *buffer.tensor;
    buffers_.push_back({&mine, nn::Tensor::view_of(buffer_arena_->data() + at, mine.shape(), mine.dtype())});
    at += comm::align_up(mine.bytes());
  }
}

void DistributedDataParallel::sync_buffers() {
  if (buffer_arena_ == nullptr) return;
  const int root = buffers_root();
  nn::PointwiseKernels& kernels = backend_->pointwise();
  group_.set_step(step_ + 1);
  if (group_.rank() == root)
    for (const auto& [mine, sent] : buffers_) kernels.copy(*mine, sent);
  group_.broadcast({.arena = buffer_arena_.get(), .count = buffer_arena_->bytes(), .dtype = DType::kU8}, root)
      .wait(backend_->stream());
  if (group_.rank() != root)
    for (const auto& [mine, sent] : buffers_) kernels.copy(sent, *mine);
}

void DistributedDataParallel::check_intact() const {
  check_usage(module_lifetime_.alive(), "DistributedDataParallel of a module that is gone",
              "keep the module as long as what wraps it");
  check_usage(group_lifetime_.alive(), "DistributedDataParallel over a group that is gone",
              "keep the group (the session) as long as what sums over it");
  for (const auto& [name, parameter] : frozen_)
    if (parameter->requires_grad())
      throw UsageError(fmt::format("{} is trained now, and was not when DistributedDataParallel was made: its gradient "
                                   "would not be summed",
                                   name),
                       "call set_requires_grad(true) before, or make a new DistributedDataParallel");
}

const nn::Tensor& DistributedDataParallel::scalars() {
  if (!scalars_.defined()) {
    scalars_ = backend_->empty({kScalars});
    backend_->pointwise().fill(scalars_, 0.0f);
  }
  return scalars_;
}

nn::Tensor DistributedDataParallel::summed_scalars() const {
  return nn::Tensor::view_of(reducer().tail().data(), {kScalars});
}

nn::Tensor DistributedDataParallel::unused_count() const {
  return nn::Tensor::view_of(reducer().unused_count().data(), {1});
}

nn::OptimizerShare DistributedDataParallel::share() const {
  if (sharded_ == nullptr) return {};
  return {.slices = sharded_->slices(), .exchange = sharded_};
}

const std::vector<nn::ParameterSlice>& DistributedDataParallel::slices_of(int rank) const {
  check_usage(sharded_ != nullptr, "slices of parameters where every rank updates all", "give Options::zero");
  if (rank < 0 || rank >= group_.size())
    throw UsageError(fmt::format("the slices of rank {} of a group of {}", rank, group_.size()),
                     "name a rank below ProcessGroup::size()");
  return sharded_->slices_of(rank);
}

void DistributedDataParallel::start_gathering_parameters() const {
  check_intact();
  if (sharded_ != nullptr) sharded_->start_gathers();
}

void DistributedDataParallel::wait_for_parameters() const {
  check_intact();
  if (sharded_ != nullptr) sharded_->finish();
}

std::vector<std::vector<std::byte>> DistributedDataParallel::gather_moments(const nn::Optimizer& optimizer,
                                                                            int root) const {
  check_intact();
  check_usage(sharded_ != nullptr, "moments are gathered where every rank has all of them", "give Options::zero");
  return sharded_->gather_moments(optimizer, root);
}

void DistributedDataParallel::scatter_moments(nn::Optimizer& optimizer,
                                              const std::vector<std::vector<std::byte>>& whole, int root) const {
  check_intact();
  check_usage(sharded_ != nullptr, "moments are scattered where every rank has all of them", "give Options::zero");
  sharded_->scatter_moments(optimizer, whole, root);
}

std::vector<std::string> DistributedDataParallel::bucket_order() const {
  return sharded_ == nullptr ? gradients_->order() : std::vector<std::string>();
}

void DistributedDataParallel::set_bucket_order(const std::vector<std::string>& names) {
  if (sharded_ == nullptr) gradients_->set_order(names);
}

void DistributedDataParallel::set_bucket_choice(std::size_t bytes) {
  check_usage(bytes > 0 && gradients_->tunes_bucket_bytes(),
              "a choice of the size of buckets where none is to be made, or of size 0", "give Options::tune_bucket_mb");
  gradients_->set_bucket_bytes(bytes);
}

void DistributedDataParallel::register_comm_hook(std::shared_ptr<ddp::CommHook> hook) {
  check_intact();
  comm::run_collectively(group_, [&] {
    check_usage(sharded_ == nullptr, "a communication hook with zero, whose buckets are reduce-scattered",
                "leave the hook or zero out");
  });
  gradients_->reducer().register_comm_hook(std::move(hook));
}

void DistributedDataParallel::check() const {
  wait_for_parameters();
  ddp::check_replicas(group_, parameter_bytes(module_));
}

void DistributedDataParallel::check_with_buffers() const {
  wait_for_parameters();
  auto pieces = parameter_bytes(module_);
  for (auto& buffer : buffers_of(module_)) pieces.push_back(std::move(buffer));
  ddp::check_replicas(group_, pieces);
}

void DistributedDataParallel::broadcast_buffers() {
  check_intact();
  if (tree_ == nullptr) ddp::broadcast_state(group_, buffers_of(module_), 0);  // with a tree they are equal
}

void DistributedDataParallel::broadcast_state() {
  check_intact();
  nn::Module& named = named_module(module_);
  wait_for_parameters();
  ddp::broadcast_state(group_, parameter_bytes(named), 0);
  ddp::broadcast_state(group_, buffers_of(module_), 0);
  for (const auto& [name, parameter] : named.named_parameters()) parameter->changed();
}

// Collective: on a rank that runs no pass too.
void DistributedDataParallel::begin_pass() {
  check_usage(!pass_.alive() || owner_thread_ == this_thread(),
              "a call of a DistributedDataParallel from another thread than the one that has a pass under way",
              "let one thread use it: another one may begin when backward has returned, or the tape of the pass is "
              "reset");
  check_intact();
  start_gathering_parameters();
  if (tree_ != nullptr) return wait_for_parameters();  // copies of the module have the same memory
  if (std::exchange(buffers_due_, false)) sync_buffers();
}

void DistributedDataParallel::begin_pass(nn::Tape& tape) {
  if (tape.recording() && tape.listener() != nullptr && tape.listener() != this)
    throw UsageError("two DistributedDataParallel modules in the passes of one tape: backward would sum only one",
                     "wrap a module that has both, or give each a tape of its own");
  begin_pass();
  if (tape.recording()) {
    check_usage(tree_ == nullptr || in_shards_, "a pass outside of run_shards() where shards are summed along a tree",
                "let run_shards() call it, for each shard");
    pass_syncs_ = buffers_due_ = no_syncs_ == 0;
    tape.set_listener(this);
    pass_ = tape.pass();
    owner_thread_ = this_thread();
  }
}

nn::Var DistributedDataParallel::forward(nn::Tape& tape, nn::Var x) {
  begin_pass(tape);
  return module_.forward(tape, x);
}

nn::Vars DistributedDataParallel::forward_all(nn::Tape& tape, const nn::Vars& inputs) {
  begin_pass(tape);
  return module_.forward_all(tape, inputs);
}

nn::Loss DistributedDataParallel::forward_loss(nn::Tape& tape, const nn::Vars& inputs, const nn::Tensor& targets,
                                               const nn::LossFunction& loss, float scale) {
  begin_pass(tape);
  return module_.forward_loss(tape, inputs, targets, loss, scale);
}

void DistributedDataParallel::contribute_nothing() {
  check_usage(tree_ == nullptr, "contribute_nothing() in a step in shards",
              "call run_shards(), which knows what to do where a shard has no samples");
  begin_pass();
  buffers_due_ = true;
  begin_gradients();
  begin_reduction();
  gradients_->contribute_held();
  finish();
}

DistributedDataParallel::JoinedStep DistributedDataParallel::join(std::int64_t own_samples) {
  check_intact();
  const auto all = group_.all_gather_numbers(own_samples);
  JoinedStep step;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] < 0)
      throw UsageError(fmt::format("rank {} has {} samples in a step, which is fewer than none", rank, all[rank]),
                       "let ranks that have none left say 0");
    step.samples += all[rank];
    step.ranks += all[rank] > 0 ? 1 : 0;
  }
  return step;
}

// Sums that the loop has not cleared are added to, and must not be summed again.
void DistributedDataParallel::begin_gradients() {
  gradients_->apply_layout();
  if (!std::exchange(sums_held_, false)) return;
  check_usage(sharded_ == nullptr ||
                  std::ranges::none_of(parameters(), [](const auto& named) { return named.parameter->has_gradient(); }),
              "a backward pass that adds to the gradients of the last step, of which each rank has a slice",
              "call zero_grad() before each step");
  gradients_->keep_sums_once();
}

void DistributedDataParallel::begin_reduction() {
  gradients_->begin_reduction(++step_);
  if (scalars_.defined()) backend_->pointwise().copy(scalars_, summed_scalars());
}

void DistributedDataParallel::backward_begins() {
  check_intact();
  gradients_->refuse_strays(false);
  if (tree_ != nullptr) return gradients_->mark_unused();
  begin_gradients();
  if (!pass_syncs_) return;
  begin_reduction();
  gradients_->mark_unused();
}

void DistributedDataParallel::node_walked() {
  if (!gradients_->reducing()) return;
  if (tree_ != nullptr) gradients_->reduce_ready();
  gradients_->reducer().poll();
}

void DistributedDataParallel::backward_ended() {
  pass_ = {};
  gradients_->refuse_strays(true);
  if (tree_ != nullptr) return;
  gradients_->reducing() ? finish() : gradients_->mark_partial();
}

void DistributedDataParallel::finish() {
  gradients_->finish([this](std::span<const std::size_t> slots) {
    if (sharded_ != nullptr)
      for (const std::size_t slot : slots) parameters()[slot].parameter->mark_sliced();
    if (on_bucket_) on_bucket_(slots);
  });
  sums_held_ = true;
}

}  // namespace lockstep::parallel
