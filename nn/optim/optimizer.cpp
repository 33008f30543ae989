#include "lockstep/nn/optim/optimizer.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "base/error.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "nn/ops/update_rules.h"
#include "nn/optim/orthogonal.h"

namespace lockstep::nn {

void check_parameters(const std::vector<NamedParameter>& parameters, const char* what) {
  std::set<const Parameter*> seen;
  for (const auto& [name, parameter] : parameters) {
    if (parameter == nullptr)
      throw UsageError(fmt::format("{} was given '{}', which is no parameter", what, name),
                       "give it what named_parameters() returns");
    if (!seen.insert(parameter).second)
      throw UsageError(fmt::format("{} was given {} twice: it would move twice in a step", what, name),
                       "give it each parameter once");
    const Backend& first = parameters.front().parameter->backend();
    if (&parameter->backend() != &first)
      throw UsageError(fmt::format("{} was given {} on {} and {} on {}{}", what, parameters.front().name,
                                   to_string(first.device()), name, to_string(parameter->backend().device()),
                                   parameter->backend().device() == first.device() ? ", of two backends" : ""),
                       "make one for the parameters of each backend");
  }
}

namespace {

// Before memory is taken for what is remembered of them.
std::vector<NamedParameter> checked(std::vector<NamedParameter> parameters) {
  check_parameters(parameters, "an optimizer");
  return parameters;
}

}  // namespace

Optimizer::Optimizer(std::vector<NamedParameter> parameters, UpdateMethod method,
                     const std::vector<ParameterGroup>& groups, OptimizerShare share)
    : parameters_(checked(std::move(parameters))),
      method_(std::move(method)),
      sliced_(!share.slices.empty()),
      share_(std::move(share)) {
  if (!sliced_)
    for (const auto& [name, parameter] : parameters_) share_.slices.push_back({.count = parameter->value().count()});
  check_slices();
  add_groups(1, method_.weight_decay);
  group_of_.assign(parameters_.size(), 0);
  for (const auto& group : groups) {
    const std::size_t place = add_groups(group.lr_factor, group.weight_decay.value_or(method_.weight_decay));
    for (const auto& pattern : group.patterns)
      for (const std::size_t i : find_parameters(parameters_, pattern, fmt::format("a group of '{}'", pattern)))
        if (group_of_[i] == 0) group_of_[i] = place;
  }
  for (const Group& group : groups_)
    LOCKSTEP_ASSERT(std::ssize(method_.moments) == moments_of(*group.rule), "{} names for {} moments",
                    method_.moments.size(), moments_of(*group.rule));
  if (method_.otherwise != nullptr) {
    check_usage(!sliced_, "slices of parameters for an optimizer that moves matrices as a whole",
                "give it all of each parameter");
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (!parameters_[i].parameter->is_matrix()) ++group_of_[i];
  }
  for (const std::string& name : method_.moments) {
    Moment& moment = moments_.emplace_back(Moment{.name = name, .values = {}});
    moment.values.reserve(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = *parameters_[i].parameter;
      moment.values.push_back(
          parameter.backend().zeros(sliced_ ? Shape{share_.slices[i].count} : parameter.value().shape()));
    }
  }
  if (parameters_.empty()) return;
  backend_ = &parameters_.front().parameter->backend();
  for (Group& group : groups_) group.control = backend_->empty({StepControl::kSize});
  for (const auto& [name, parameter] : parameters_) lifetimes_.push_back(parameter->lifetime());
  arrays_.reserve(parameters_.size());
  together_.reserve(parameters_.size());
  unprepared_.reserve(parameters_.size());
  parts_.reserve(parameters_.size());
  missed_.assign(parameters_.size(), 0);
  prepared_in_.assign(parameters_.size(), 0);
  std::int64_t blocks = 0;
  for (const auto& [name, parameter] : parameters_) {
    first_block_.push_back(blocks);
    blocks += norm_blocks(parameter->value().count());
  }
  needs_norms_ = std::ranges::any_of(groups_, [](const Group& group) { return has_norms(*group.rule); });
  if (method_.otherwise != nullptr) orthogonalizer_ = std::make_unique<Orthogonalizer>(parameters_);
  square_sums_ = backend_->empty({blocks}, DType::kF64);
  if (!needs_norms_) return;
  norm_sums_ = backend_->empty({2 * blocks}, DType::kF64);
  factors_ = backend_->empty({std::ssize(parameters_)});
}

void Optimizer::check_slices() const {
  check_usage(share_.slices.size() == parameters_.size(), "another number of slices than of parameters",
              "give a slice for each parameter, or none at all");
  for (std::size_t i = 0; i < share_.slices.size(); ++i) {
    const auto [begin, count] = share_.slices[i];
    const std::int64_t all = parameters_[i].parameter->value().count();
    const bool ends_a_block = begin + count == all || count % kNormBlock == 0;
    if (begin < 0 || count < 0 || begin > all - count || begin % kNormBlock != 0 || !ends_a_block)
      throw UsageError(fmt::format("elements [{}, {}) as the slice of {}, which has {}", begin, begin + count,
                                   parameters_[i].name, all),
                       fmt::format("give whole blocks of {} elements", kNormBlock));
  }
}

void Optimizer::add_group(const UpdateMethod& method, double lr_factor, double weight_decay) {
  groups_.push_back({.method = &method,
                     .lr_factor = lr_factor,
                     .weight_decay = weight_decay,
                     .rule = std::make_unique<UpdateRule>(method.rule(weight_decay)),
                     .control = {},
                     .rates = {}});
}

// The place of the first one, which of matrices is theirs.
std::size_t Optimizer::add_groups(double lr_factor, double weight_decay) {
  check_usage(weight_decay >= 0, "an optimizer with a negative weight decay");  // or one that is no number
  check_usage(lr_factor >= 0, "a group of parameters with a negative factor of the learning rate");
  const std::size_t place = groups_.size();
  add_group(method_, lr_factor, weight_decay);
  if (method_.otherwise != nullptr) add_group(*method_.otherwise, lr_factor, weight_decay);
  return place;
}

Optimizer::~Optimizer() = default;

void Optimizer::check_there(std::size_t index) const {
  if (!lifetimes_[index].alive()) [[unlikely]]
    throw UsageError(fmt::format("an optimizer's parameter {} is no longer there", parameters_[index].name),
                     "keep the module as long as its optimizer");
}

void Optimizer::zero_grad() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    check_there(i);
    parameters_[i].parameter->clear_grad();
  }
  // And what was noted of them: a step that a device could not record begins again.
  squares_zeroed_in_ = norms_zeroed_in_ = 0;
  summing_squares_ = false;
  std::ranges::fill(prepared_in_, std::int64_t{0});
}

void Optimizer::step(const StepOptions& options) {
  check_usage(options.clip_norm >= 0, "an optimizer step that clips to a negative norm", "give 0 for no clipping");
  with_gradient_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    check_there(i);
    if (!parameters_[i].parameter->has_gradient()) continue;
    check_gradient(i);  // before anything has moved
    with_gradient_.push_back(i);
  }
  check_usage(!with_gradient_.empty(), "an optimizer's step where none of its parameters has a gradient",
              "before the step run zero_grad(), then Tape::backward() of a loss that depends on them");
  begin_step(options.lr, options.momentum);
  const bool clips = options.clip_norm > 0 || scaler_ != nullptr;
  if (clips) {
    if (!squares_.defined()) {
      nothing_ = backend_->zeros({1});
      squares_ = backend_->empty({1}, DType::kF64);
    }
    add_squares(with_gradient_);
    sum_squares(squares_);
  }
  if (scaler_ == nullptr) count_missed();
  std::ranges::stable_sort(with_gradient_, {}, [this](std::size_t i) { return missed_[i]; });
  for (auto from = with_gradient_.begin(); from != with_gradient_.end();) {
    const std::int64_t missed = missed_[*from];
    const auto to = std::find_if(from, with_gradient_.end(), [&](std::size_t i) { return missed_[i] != missed; });
    if (missed > 0 && scaler_ == nullptr) write_control(step_ - missed);
    if (clips) compute_control(nothing_, squares_, options.clip_norm, missed);
    update({from, to});
    from = to;
  }
  if (scaler_ != nullptr) {
    count_step();
    count_missed();
  }
  if (share_.exchange != nullptr) share_.exchange->finish();
}

std::vector<NamedMoment> Optimizer::moments() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) check_there(i);
  std::vector<NamedMoment> all;
  for (const Moment& moment : moments_)
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      all.push_back(
          {fmt::format("{}.{}", parameters_[i].name, moment.name), parameters_[i].parameter, moment.values[i]});
  return all;
}

void Optimizer::begin_step(double lr, std::optional<double> momentum) {
  check_usage(lr >= 0, "an optimizer step with a negative learning rate");  // or one that is no number
  check_usage(!momentum || takes_momentum(), "a step's momentum for an optimizer without one, or with a constant one",
              "leave it out, or take SGD with momentum, Adam or AdamW");
  check_usage(!momentum || (*momentum >= 0 && *momentum < 1), "an optimizer step with a momentum outside [0, 1)");
  check_usage(scaler_ == nullptr || scaler_lifetime_.alive(), "a step of an optimizer whose GradScaler is gone",
              "keep the GradScaler as long as its optimizer, or set_scaler(nullptr)");
  ++step_;
  if (backend_ == nullptr) return;
  lr_ = lr;
  momentum_ = momentum;
  scaler_ != nullptr ? write_rates() : write_control(step_);
}

std::int64_t Optimizer::steps() const {
  if (!applied_.defined()) return step_;
  std::int64_t applied = 0;
  backend_->download(applied_, std::as_writable_bytes(std::span(&applied, 1)));
  return applied;
}

void Optimizer::set_steps(std::int64_t steps) {
  step_ = steps;
  squares_zeroed_in_ = norms_zeroed_in_ = decided_in_ = 0;
  std::ranges::fill(prepared_in_, std::int64_t{0});
  if (applied_.defined()) backend_->upload(std::as_bytes(std::span(&steps, 1)), applied_);
}

void Optimizer::set_scaler(GradScaler* scaler) {
  check_usage(scaler == nullptr || backend_ == nullptr || &scaler->backend() == backend_,
              "an optimizer was given a GradScaler of another backend", "make it with the parameters' backend");
  const std::int64_t done = steps();
  scaler_ = scaler;
  scaler_lifetime_ = scaler != nullptr ? scaler->lifetime() : Lifetime::Ref();
  applied_ = {};
  if (scaler != nullptr && backend_ != nullptr) {
    applied_ = backend_->empty({1}, DType::kI64);
    for (Group& group : groups_) group.rates = backend_->empty({StepControl::kRates}, DType::kF64);
  }
  set_steps(done);
}

std::array<double, StepControl::kRates> Optimizer::rates_of(const Group& group) const {
  return group.method->rates(group.lr_factor * lr_, group.weight_decay,
                             momentum_.value_or(group.method->momentum.value_or(0)));
}

void Optimizer::write_rates() {
  for (const Group& group : groups_) {
    const auto rates = rates_of(group);
    backend_->write(std::as_bytes(std::span(rates)), group.rates);
  }
}

void Optimizer::compute_control(const Tensor& loss, const Tensor& squares, double clip_norm, std::int64_t missed) {
  decided_in_ = step_;
  for (const Group& group : groups_)
    if (scaler_ == nullptr)
      backend_->optim().compute_update_scale(loss, squares, clip_norm, group.control);
    else
      backend_->optim().compute_scaled_update({.loss = loss,
                                               .squares = squares,
                                               .clip_norm = clip_norm,
                                               .steps = applied_,
                                               .missed = missed,
                                               .rates = group.rates,
                                               .corrections = group.method->corrections},
                                              scaler_->numbers(), group.control);
}

void Optimizer::count_step() { backend_->optim().count_step(groups_.front().control, applied_); }

// Of a step that was skipped nobody has missed anything: whether it was, the device knows, which is waited for where
// somebody would have.
void Optimizer::count_missed() {
  if (with_gradient_.size() == parameters_.size()) return;
  if (scaler_ != nullptr) {
    std::array<float, StepControl::kSize> control{};
    backend_->download(groups_.front().control, std::as_writable_bytes(std::span(control)));
    if (control[StepControl::kApply] == 0.0f) return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!parameters_[i].parameter->has_gradient()) ++missed_[i];
}

void Optimizer::write_control(std::int64_t step) {
  for (const Group& group : groups_) {
    std::array<float, StepControl::kSize> control{};
    const auto rates = rates_of(group);
    for (std::size_t i = 0; i < rates.size(); ++i)
      control[i] = static_cast<float>(
          rates[i] / divisor_of(group.method->corrections.of[i], rates.data(), static_cast<double>(step)));
    control[StepControl::kGradientScale] = 1.0f;
    control[StepControl::kApply] = 1.0f;
    backend_->write(std::as_bytes(std::span(control)), group.control);
  }
}

void Optimizer::check_gradient(std::size_t index) const {
  const auto& [name, parameter] = parameters_[index];
  if (parameter->is_partial()) [[unlikely]]
    throw UsageError(fmt::format("a step with the gradient of {} that is this rank's alone", name),
                     "end no_sync() before the last forward and backward of a step, which then sums over the ranks");
  if (parameter->is_sliced() && !sliced_) [[unlikely]]
    throw UsageError(fmt::format("a step with the gradient of {}, of which this rank has the sums of a slice", name),
                     "make the optimizer with the DistributedDataParallel's share()");
}

Parameter& Optimizer::parameter(std::size_t index) const {
  if (index >= parameters_.size()) [[unlikely]]
    throw UsageError(fmt::format("update of parameter {} of {}", index, parameters_.size()),
                     "give places in the list that the optimizer was made with");
  check_there(index);
  const auto& [name, parameter] = parameters_[index];
  if (step_ == 0) [[unlikely]]
    throw UsageError(fmt::format("update of {} before the first step", name), "call begin_step() before");
  if (!parameter->gradient().defined()) [[unlikely]]
    throw UsageError(fmt::format("update of {}, which has no gradient", name), "run Tape::backward() before");
  check_gradient(index);
  return *parameter;
}

// Of those that this optimizer has any elements of. `sums` has `per_block` numbers of each block of all parameters;
// nullptr: none are wanted.
std::span<const UpdateArrays> Optimizer::arrays_of(std::span<const std::size_t> indices, double* sums,
                                                   std::int64_t per_block) {
  arrays_.clear();
  for (const std::size_t index : indices) {
    Parameter& p = parameter(index);
    const auto [begin, count] = share_.slices[index];
    if (count == 0) continue;
    UpdateArrays& arrays = arrays_.emplace_back(
        UpdateArrays{.count = count, .gradient = p.gradient().f32() + begin, .parameter = p.value().f32() + begin});
    if (const HalfCopy copy = p.copy()) arrays.copy = copy + begin;
    if (moments_.size() > 0) arrays.first = moments_[0].values[index].f32();
    if (moments_.size() > 1) arrays.second = moments_[1].values[index].f32();
    if (sums != nullptr) arrays.sums = sums + per_block * (first_block_[index] + begin / kNormBlock);
  }
  return arrays_;
}

// Of the same ones as arrays_of(), the sums of all their blocks.
std::span<const UpdateArrays> Optimizer::whole_sums_of(std::span<const std::size_t> indices) {
  arrays_.clear();
  for (const std::size_t index : indices)
    if (share_.slices[index].count > 0)
      arrays_.push_back({.count = parameters_[index].parameter->value().count(),
                         .sums = norm_sums_.data<double>() + 2 * first_block_[index]});
  return arrays_;
}

// Blocks that nobody adds to in a step count for nothing.
void Optimizer::zero_once(const Tensor& sums, std::int64_t& zeroed_in) const {
  if (std::exchange(zeroed_in, step_) != step_)
    backend_->pointwise().fill(Tensor::view_of(sums.raw(), {2 * sums.count()}), 0.0f);  // f64s of zero bits
}

void Optimizer::add_squares(std::span<const std::size_t> indices) {
  if (indices.empty()) return;
  zero_once(square_sums_, squares_zeroed_in_);
  backend_->optim().squares(arrays_of(indices, square_sums_.data<double>(), 1));
}

void Optimizer::begin_sum_squares() {
  if (backend_ == nullptr || std::exchange(summing_squares_, true)) return;
  zero_once(square_sums_, squares_zeroed_in_);
  if (share_.exchange != nullptr) share_.exchange->begin_sum({&square_sums_, 1});
}

void Optimizer::sum_squares(const Tensor& squares) {
  if (backend_ == nullptr) return;
  begin_sum_squares();
  summing_squares_ = false;
  if (share_.exchange != nullptr) share_.exchange->end_sum({&square_sums_, 1});
  backend_->optim().add_up(square_sums_, squares);
}

void Optimizer::compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm) {
  if (backend_ == nullptr) return;
  check_usage(scaler_ == nullptr || squares.defined(), "a step with a GradScaler without the sum of its squares",
              "give compute_update_scale() what sum_squares() has found");
  compute_control(loss, squares, clip_norm, 0);
  if (scaler_ != nullptr) count_step();
}

std::span<const std::size_t> Optimizer::of_group(std::size_t group, std::span<const std::size_t> indices) {
  if (groups_.size() == 1) return indices;
  together_.clear();
  std::ranges::copy_if(indices, std::back_inserter(together_), [&](std::size_t i) {
    return group == (i < group_of_.size() ? group_of_[i] : 0);  // parameter() complains of others
  });
  return together_;
}

void Optimizer::prepare(std::span<const std::size_t> indices) {
  if (!needs_norms_ || indices.empty()) return;
  zero_once(norm_sums_, norms_zeroed_in_);
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (has_norms(*groups_[g].rule))
      if (const auto all = arrays_of(of_group(g, indices), norm_sums_.data<double>(), 2); !all.empty())
        backend_->optim().prepare(*groups_[g].rule, groups_[g].control, all);
  for (const std::size_t index : indices) prepared_in_[index] = step_;
}

// Those that nobody has prepared in this step, whose norms are then those of whole parameters.
void Optimizer::prepare_rest(std::span<const std::size_t> indices) {
  for (const std::size_t index : indices) parameter(index);  // complains of those that there are not
  unprepared_.clear();
  std::ranges::copy_if(indices, std::back_inserter(unprepared_),
                       [&](std::size_t i) { return prepared_in_[i] != step_; });
  prepare(unprepared_);
  if (share_.exchange == nullptr || unprepared_.empty()) return;
  parts_.clear();
  for (const std::size_t index : unprepared_) {
    const std::int64_t blocks = norm_blocks(parameters_[index].parameter->value().count());
    parts_.push_back(norm_sums_.slice(2 * first_block_[index], 2 * (first_block_[index] + blocks)));
  }
  share_.exchange->sum(parts_);
}

// The second moments of these parameters, whose factors are there.
void Optimizer::orthogonalize(const Group& group, std::span<const std::size_t> indices) {
  arrays_.clear();
  for (const std::size_t index : indices) {
    const Tensor& direction = moments_[1].values[index];
    if (direction.count() == 0) continue;
    arrays_.push_back({.count = direction.count(), .gradient = direction.f32(), .parameter = direction.f32()});
  }
  if (arrays_.empty()) return;
  backend_->optim().update(ScaleRule(), group.control, arrays_, factors_);
  for (const std::size_t index : indices) orthogonalizer_->run(moments_[1].values[index], group.control);
}

void Optimizer::update(std::span<const std::size_t> indices) {
  check_usage(scaler_ == nullptr || decided_in_ == step_,
              "an update by gradients of scaled losses before it is known whether they are finite",
              "call add_squares() of all gradients, sum_squares() and compute_update_scale() before, or step()");
  if (share_.exchange != nullptr) share_.exchange->before_update(indices);
  const auto replicas = share_.exchange != nullptr ? share_.exchange->replicas() : std::span<const std::ptrdiff_t>();
  if (needs_norms_) prepare_rest(indices);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto own = of_group(g, indices);
    const UpdateRule& rule = *groups_[g].rule;
    if (has_norms(rule))
      if (const auto whole = whole_sums_of(own); !whole.empty())
        backend_->optim().compute_factors(rule, whole, factors_);
    if (orthogonalizer_ != nullptr && groups_[g].method == &method_) orthogonalize(groups_[g], own);
    if (const auto all = arrays_of(own, nullptr, 0); !all.empty())
      backend_->optim().update(rule, groups_[g].control, all, needs_norms_ ? factors_ : Tensor(), replicas);
  }
  // Of slices, the copy has what they have; the rest of the parameter comes later.
  for (const std::size_t index : indices)
    sliced_ ? parameters_[index].parameter->changed() : parameters_[index].parameter->changed_with_copy();
  if (share_.exchange != nullptr) share_.exchange->after_update(indices);
}

}  // namespace lockstep::nn
