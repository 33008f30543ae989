#include "parallel/sharded_parameters.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "base/error.h"
#include "lockstep/comm/agree.h"
#include "lockstep/parallel/bound_gradients.h"

namespace lockstep::parallel {
namespace {

template <class Bytes>
auto part_of(Bytes& whole, const nn::ParameterSlice& slice) {
  return std::span(whole).subspan(static_cast<std::size_t>(slice.begin) * sizeof(float),
                                  static_cast<std::size_t>(slice.count) * sizeof(float));
}

}  // namespace

ddp::BucketLimits ShardedParameters::limits(ddp::BucketLimits limits, int ranks) {
  limits.slot_alignment = static_cast<std::size_t>(nn::kNormBlock) * sizeof(float);
  limits.bucket_multiple = limits.slot_alignment * static_cast<std::size_t>(ranks);
  return limits;
}

ShardedParameters::ShardedParameters(comm::ProcessGroup& group, nn::Backend& backend,
                                     std::vector<nn::NamedParameter> parameters, const ddp::BucketPlan& plan)
    : group_(group),
      group_lifetime_(group.lifetime()),
      device_(backend.device()),
      backend_(backend),
      parameters_(std::move(parameters)),
      plan_(plan),
      gathers_(plan.buckets.size()),
      due_(plan.buckets.size(), false),
      under_way_(plan.buckets.size(), false),
      touched_(plan.buckets.size(), false) {
  const auto slots = slots_of(parameters_);
  std::size_t blocks = 0;
  for (int rank = 0; rank < group_.size(); ++rank) {
    auto& theirs = slices_.emplace_back();
    for (const auto& [begin, count] : ddp::slices_of_rank(plan_, slots, rank, group_.size()))
      theirs.push_back({.begin = static_cast<std::int64_t>(begin), .count = static_cast<std::int64_t>(count)});
  }
  for (const auto& slot : slots)
    blocks += static_cast<std::size_t>(nn::norm_blocks(static_cast<std::int64_t>(slot.count)));
  arena_ = group_.allocate(plan_.bytes);
  sums_ = group_.allocate(2 * blocks * sizeof(double));
  find_replicas();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    nn::Parameter& parameter = *parameters_[i].parameter;
    lifetimes_.push_back(parameter.lifetime());
    parameter.move_value(nn::Tensor::view_of(arena_->data() + plan_.slot_offset_bytes[i], parameter.value().shape()));
  }
  backend_.allocator().trim();  // of where they were
}

// Each rank begins with the one after it, so that they do not all write to the same one.
void ShardedParameters::find_replicas() {
  if (group_.device().kind != DeviceKind::kCpu) return;
  for (int i = 1; i < group_.size(); ++i) {
    const std::byte* const theirs = arena_->copy_of((group_.rank() + i) % group_.size());
    if (theirs == nullptr) return replicas_.clear();
    replicas_.push_back((theirs - arena_->data()) / static_cast<std::ptrdiff_t>(sizeof(float)));
  }
}

// No collective: after an error too. Then nobody waits for other ranks, which may have ended, nor for a GPU, whose
// collectives may never end (Note [Unwinding]).
void ShardedParameters::close() noexcept {
  if (arena_ == nullptr) return;
  const bool waits = group_lifetime_.alive() && std::uncaught_exceptions() == 0;
  try {
    for (std::size_t b = 0; b < under_way_.size() && waits; ++b) wait(b);
  } catch (...) {
    // The values are what they are.
  }
  for (std::size_t b = 0; b < under_way_.size(); ++b) expect(b, false);
  if (device_.kind != DeviceKind::kCpu && std::uncaught_exceptions() > 0) {
    static_cast<void>(arena_.release());  // where the parameters are, until the process ends
    return;
  }
  try {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (lifetimes_[i].alive())
        parameters_[i].parameter->move_value(backend_.empty_parameter(parameters_[i].parameter->value().shape()));
  } catch (...) {
    static_cast<void>(arena_.release());  // without memory for them, where they are
    return;
  }
  arena_.reset();
  sums_.reset();
}

void ShardedParameters::check_open() const {
  check_usage(group_lifetime_.alive(), "a step with an optimizer of slices whose group is gone",
              "keep the group as long as the optimizer");
  check_usage(arena_ != nullptr, "a step with an optimizer of slices whose DistributedDataParallel is gone",
              "keep the DistributedDataParallel as long as its optimizer");
}

nn::Tensor ShardedParameters::place_of_sum(const nn::Tensor& part, std::int64_t at) const {
  return nn::Tensor::view_of(sums_->data() + static_cast<std::size_t>(at) * sizeof(double), part.shape(), DType::kF64);
}

void ShardedParameters::begin_sum(std::span<const nn::Tensor> parts) {
  check_open();
  if (group_.size() == 1) return;
  std::int64_t count = 0;
  for (const nn::Tensor& part : parts) {
    backend_.pointwise().copy(part, place_of_sum(part, count));
    count += part.count();
  }
  sum_ = group_.all_reduce({.arena = sums_.get(), .count = static_cast<std::size_t>(count), .dtype = DType::kF64},
                           comm::ReduceOp::kSum);
}

void ShardedParameters::end_sum(std::span<const nn::Tensor> parts) {
  check_open();
  if (group_.size() == 1) return;
  sum_.wait(backend_.stream());
  std::int64_t count = 0;
  for (const nn::Tensor& part : parts) {
    backend_.pointwise().copy(place_of_sum(part, count), part);
    count += part.count();
  }
}

void ShardedParameters::gather(std::size_t bucket) {
  const ddp::Bucket& whole = plan_.buckets[bucket];
  gathers_[bucket] = writes_directly() ? written_
                                       : group_.all_gather({.arena = arena_.get(),
                                                            .offset_bytes = whole.offset_bytes,
                                                            .count = whole.bytes / sizeof(float),
                                                            .dtype = DType::kF32});
  due_[bucket] = false;
  under_way_[bucket] = true;
}

void ShardedParameters::wait(std::size_t bucket) {
  if (!under_way_[bucket]) return;
  gathers_[bucket].wait(backend_.stream());
  under_way_[bucket] = false;
  expect(bucket, false);
}

void ShardedParameters::expect(std::size_t bucket, bool expected) {
  for (const std::size_t slot : plan_.buckets[bucket].slots) {
    if (!lifetimes_[slot].alive()) continue;
    nn::Parameter& parameter = *parameters_[slot].parameter;
    expected ? parameter.expect_value(*this, bucket) : parameter.end_expectation();
  }
}

void ShardedParameters::mark(std::span<const std::size_t> indices) {
  touched_.assign(touched_.size(), false);
  for (const std::size_t index : indices)
    if (index < parameters_.size()) touched_[plan_.slot_bucket[index]] = true;
}

void ShardedParameters::before_update(std::span<const std::size_t> indices) {
  check_open();
  mark(indices);
  for (std::size_t b = 0; b < touched_.size(); ++b)
    if (touched_[b]) wait(b);
  if (may_write_ || !writes_directly() || std::ranges::find(touched_, true) == touched_.end()) return;
  group_.barrier().wait_host();
  may_write_ = true;
}

void ShardedParameters::after_update(std::span<const std::size_t> indices) {
  if (group_.size() == 1) return;
  mark(indices);
  for (std::size_t b = 0; b < touched_.size(); ++b) {
    if (!touched_[b]) continue;
    due_[b] = true;
    if (group_.device().kind == DeviceKind::kCpu) continue;
    gather(b);
    wait(b);
  }
}

void ShardedParameters::start_gathers() {
  if (std::ranges::find(due_, true) == due_.end()) return;
  if (writes_directly()) written_ = group_.barrier();
  may_write_ = false;
  for (std::size_t b = due_.size(); b-- > 0;)
    if (due_[b]) {
      gather(b);
      expect(b, true);
    }
}

void ShardedParameters::finish() {
  start_gathers();
  for (std::size_t b = 0; b < under_way_.size(); ++b) wait(b);
}

void ShardedParameters::check_optimizer(const nn::Optimizer& optimizer) const {
  check_open();
  bool same = optimizer.parameters().size() == parameters_.size() && optimizer.is_sliced();
  for (std::size_t i = 0; same && i < parameters_.size(); ++i)
    same = optimizer.parameters()[i].parameter == parameters_[i].parameter &&
           optimizer.slices()[i].begin == slices()[i].begin && optimizer.slices()[i].count == slices()[i].count;
  check_usage(same, "the moments of an optimizer of other parameters or slices than the DistributedDataParallel's",
              "make it of parameters() and share()");
}

std::vector<std::vector<std::byte>> ShardedParameters::gather_moments(const nn::Optimizer& optimizer, int root) {
  check_optimizer(optimizer);
  std::vector<std::vector<std::byte>> all;
  const auto moments = optimizer.moments();
  for (std::size_t m = 0; m < moments.size(); ++m) {
    const std::size_t index = m % parameters_.size();
    std::vector<std::byte> mine(moments[m].value.bytes());
    if (!mine.empty()) backend_.download(moments[m].value, mine);
    if (group_.rank() != root) {
      if (!mine.empty()) group_.isend(mine.data(), mine.size(), DType::kU8, root).wait();
      continue;
    }
    auto& whole = all.emplace_back(parameters_[index].parameter->value().bytes());
    for (int rank = 0; rank < group_.size(); ++rank) {
      const auto part = part_of(whole, slices_[static_cast<std::size_t>(rank)][index]);
      if (part.empty()) continue;
      if (rank == root)
        std::memcpy(part.data(), mine.data(), mine.size());
      else
        group_.irecv(part.data(), part.size(), DType::kU8, rank).wait();
    }
  }
  return all;
}

void ShardedParameters::scatter_moments(const nn::Optimizer& optimizer,
                                        const std::vector<std::vector<std::byte>>& whole, int root) {
  check_optimizer(optimizer);
  const auto moments = optimizer.moments();
  comm::run_collectively(group_, [&] {
    if (group_.rank() != root) return;
    check_usage(whole.size() == moments.size(), "another number of moments than the optimizer has",
                "give those that gather_moments() returned");
    for (std::size_t m = 0; m < whole.size(); ++m) {
      const nn::Parameter& parameter = *parameters_[m % parameters_.size()].parameter;
      check_usage(whole[m].size() == parameter.value().bytes(), "a moment of another size than its parameter",
                  "give those that gather_moments() returned");
    }
  });
  for (std::size_t m = 0; m < moments.size(); ++m) {
    const std::size_t index = m % parameters_.size();
    std::vector<std::byte> mine(moments[m].value.bytes());
    if (group_.rank() == root) {
      for (int rank = 0; rank < group_.size(); ++rank) {
        const auto part = part_of(whole[m], slices_[static_cast<std::size_t>(rank)][index]);
        if (part.empty()) continue;
        if (rank == root)
          std::memcpy(mine.data(), part.data(), part.size());
        else
          group_.isend(part.data(), part.size(), DType::kU8, rank).wait();
      }
    } else if (!mine.empty()) {
      group_.irecv(mine.data(), mine.size(), DType::kU8, root).wait();
    }
    if (!mine.empty()) backend_.upload(mine, moments[m].value);
  }
}

}  // namespace lockstep::parallel
