#include "lockstep/nn/autograd/tape.h"

#include <new>
#include <utility>

#include "base/error.h"
#include "lockstep/nn/autograd/vars.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn {
namespace {

constexpr std::size_t kFirstMemoryBytes = std::size_t{16} << 10;

// Ends a node's life when it goes out of scope, also by an exception.
struct NodeOwner {
  Node* node;
  ~NodeOwner() { node->~Node(); }
};

}  // namespace

void Var::make_contiguous() const { state_->value = state_->backend->contiguous(state_->value); }

void Var::refuse_expired() const {
  if (state_ == nullptr)
    throw UsageError("a Var that is no value of any tape",
                     "make it with Tape::input(), or from what an operator or a module returns");
  throw UsageError(
      "a Var of a pass that its tape has forgotten",
      "use it before Tape::reset() and before the tape ends, or copy its value(), which is a handle, before");
}

void Var::refuse_released() {
  throw UsageError("the value of a Var after backward, which releases the memory of all that it has walked",
                   "copy value() before Tape::backward(): the tensor is a handle and keeps the memory");
}

void Var::refuse_overwritten() {
  throw UsageError(
      "the value of a Var that its loss has overwritten with its gradient",
      "copy value() before the loss is computed: the tensor is a handle, and then the loss leaves it alone");
}

Tape::Tape(Backend& backend) : backend_(backend) { hold_memory(kFirstMemoryBytes); }

Tape::~Tape() { reset(); }

void Tape::hold_memory(std::size_t bytes) {
  std::vector<std::byte> memory(bytes);
  memory_.reset();
  held_memory_ = std::move(memory);
  memory_ = std::make_unique<std::pmr::monotonic_buffer_resource>(held_memory_.data(), held_memory_.size());
}

void* Tape::take_memory(std::size_t bytes) {
  bytes = (bytes + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) * alignof(std::max_align_t);
  used_bytes_ += bytes;
  return memory_->allocate(bytes, alignof(std::max_align_t));
}

void Tape::refuse_thread() {
  throw UsageError("a call from another thread than the one that has a pass on this tape",
                   "give each thread a tape of its own; Tape::reset() lets another thread begin a pass");
}

void Tape::check_user(const Node& node, const Parameter& parameter) const {
  if (parameter.pending_uses_ == 0 || parameter.owner_thread_ == owner_thread_) [[likely]]
    return;
  const OpLabel& label = node.label_;
  throw UsageError(fmt::format("{} uses parameters in which another thread has a pass", label.op),
                   "one thread at a time uses a module: let the other one's backward, or the reset of its tape, come "
                   "before, or build a module for each thread");
}

void Tape::set_activations(DType dtype) {
  if (!backend_.computes_in(dtype))
    throw UsageError(fmt::format("activations of {} on {}", name_of(dtype), to_string(backend_.device())),
                     "f32 is computed everywhere, bf16 on GPUs and on CPUs with AVX-512, f16 on GPUs alone");
  activations_ = dtype;
}

void Tape::set_loss_scale(Tensor scale) {
  if (scale.defined() && (scale.count() != 1 || scale.dtype() != DType::kF32))
    throw UsageError(fmt::format("losses scaled by {} {}", name_of(scale.dtype()), to_string(scale.shape())),
                     "give one number of f32, such as GradScaler::scale()");
  loss_scale_ = scale.defined() ? checked(std::move(scale)) : Tensor();
}

Var Tape::make_var(Tensor value, bool needs_grad) {
  check_thread();
  auto* state = new (take_memory(sizeof(Var::State))) Var::State;
  if (!value.is_contiguous()) state->backend = &backend_;
  state->value = std::move(value);
  state->needs_grad = needs_grad && recording_;
  vars_.push_back(state);
  return {state, lifetime_.ref()};
}

Var Tape::make_loss(Tensor value, bool needs_grad, bool counts) {
  const Var made = make_var(std::move(value), needs_grad);
  made.state_->is_loss = true;
  made.state_->counts = counts;
  return made;
}

Tensor Tape::checked(Tensor value) const {
  check_usage(value.defined() || value.count() == 0, "a tape was given a tensor that holds nothing",
              "give it one of Backend::from_host(), nn::tensor_of() or Backend::empty()");
  const auto place = value.device();
  if (place && *place != backend_.device())
    throw UsageError(
        fmt::format("a tensor on {} was given to a tape on {}", to_string(*place), to_string(backend_.device())),
        "move it with nn::to_device(), or make it with the tape's backend");
  return value;
}

void Tape::push(Node* node) {
  node->label_ = label_;
  try {
    for (const Parameter* parameter : node->parameters())
      if (parameter != nullptr) check_user(*node, *parameter);
    nodes_.push_back(node);
  } catch (...) {
    node->~Node();
    throw;
  }
  for (Parameter* parameter : node->parameters()) {
    if (parameter == nullptr) continue;
    ++parameter->pending_uses_;
    parameter->owner_thread_ = owner_thread_;
  }
}

Tensor Tape::take_grad_through(Var v, Epilogue activation) {
  Tensor through = std::exchange(v.state_->grad_through, Tensor());
  Tensor dy = take_grad(v);
  if (!dy.defined()) return through;
  Tensor dx = dy.is_sole_owner() ? dy : backend_.empty(dy.shape(), dy.dtype());
  if (activation == Epilogue::kGelu)
    backend_.pointwise().unary_backward(UnaryOp::kGeluTanh, v.saved_preactivation(), {}, dy, dx);
  else
    backend_.pointwise().unary_backward(activation == Epilogue::kRelu6 ? UnaryOp::kRelu6 : UnaryOp::kRelu, {},
                                        v.value(), dy, dx);
  if (through.defined()) backend_.pointwise().add_to(through, 1.0f, dx);
  return dx;
}

void Tape::leave_to_loss(const Vars& outputs) {
  for (const Var output : outputs)
    if (has(output)) output.state_->left_to_loss = true;
}

Tensor Tape::take_value(Var v) {
  Var::State& state = v.state();
  // Operators come after those whose results they read: where it is the last one's, no other one reads it.
  const bool unread = !nodes_.empty() && nodes_.back()->output().state_ == &state && !nodes_.back()->reads_output();
  if (!state.left_to_loss || !unread || !state.value.is_sole_owner()) return {};
  state.overwritten = true;
  return state.value;
}

void Tape::join_grad_parts(Var v) const {
  Var::State& state = v.state();
  if (state.second_grad.defined()) add_to_grad(state.grad, std::exchange(state.second_grad, Tensor()));
}

const Tensor& Tape::grad(Var v) const {
  join_grad_parts(v);
  Tensor& known = v.state().grad;
  if (!known.is_contiguous()) known = backend_.contiguous(known);
  return known;
}

void Tape::contribute(Var v, Tensor grad) {
  if (!v.needs_grad()) return;
  LOCKSTEP_ASSERT(grad.shape() == v.shape(), "gradient {} for a value {}", to_string(grad.shape()),
                  to_string(v.shape()));
  Var::State& state = *v.state_;
  const bool second = state.keeps_grad_parts && state.grad.defined() && !state.second_grad.defined();
  if (second && grad.dtype() == state.grad.dtype() && grad.is_contiguous() && state.grad.is_contiguous())
    state.second_grad = std::move(grad);
  else
    add_to_grad(state.grad, std::move(grad));
}

void Tape::contribute_through(Var v, Tensor grad) {
  LOCKSTEP_ASSERT(grad.shape() == v.shape(), "gradient {} for a value {}", to_string(grad.shape()),
                  to_string(v.shape()));
  add_to_grad(v.state_->grad_through, std::move(grad));
}

void Tape::add_to_grad(Tensor& sum, Tensor grad) const {
  if (!sum.defined()) {
    sum = std::move(grad);
    return;
  }
  if (!sum.is_contiguous() || !grad.is_contiguous()) {
    sum = backend_.contiguous(sum);
    grad = backend_.contiguous(grad);
  }
  if (sum.is_sole_owner()) {
    backend_.pointwise().add_to(grad, 1.0f, sum);
    return;
  }
  // Another variable's gradient is the same memory: leave it alone.
  Tensor fresh = backend_.empty(sum.shape(), sum.dtype());
  backend_.pointwise().binary(BinaryOp::kAdd, sum, grad, fresh);
  sum = std::move(fresh);
}

void Tape::forget_uses(const Node& node) {
  if (node.parameters_done_) return;
  for (std::size_t i = 0; i < node.parameters().size(); ++i) {
    Parameter* const parameter = node.parameters()[i];
    if (node.is_there(i) && --parameter->pending_uses_ == 0) parameter->touched_ = false;
  }
}

// All counts go down before the first call: on_ready may throw.
void Tape::finish_uses(Node& node) {
  if (std::exchange(node.parameters_done_, true)) return;
  Node::Parameters ready = {};
  for (std::size_t i = 0; i < ready.size(); ++i) {
    Parameter* const parameter = node.parameters()[i];
    if (!node.is_there(i) || --parameter->pending_uses_ > 0) continue;
    if (std::exchange(parameter->touched_, false)) ready[i] = parameter;
  }
  for (Parameter* parameter : ready)
    if (parameter != nullptr && parameter->on_ready) parameter->on_ready();
}

void Tape::parameters_done(Node& node) {
  // What happens when they are ready is not the operator's work.
  if (observer_ != nullptr) observer_->op_ended(node.label_, true);
  finish_uses(node);
  if (observer_ != nullptr) observer_->op_begins();
}

void Tape::walk(Node& node) {
  for (std::size_t i = 0; i < node.parameters().size(); ++i)
    if (node.parameters()[i] != nullptr && !node.is_there(i)) [[unlikely]]
      throw UsageError(fmt::format("backward comes to {}, whose parameters are no longer there", node.label_.op),
                       "keep the module until backward is through");
  if (observer_ == nullptr || node.records()) return node.backward(*this);
  observer_->op_begins();
  node.backward(*this);
  observer_->op_ended(node.label_, true);
}

void Tape::check_root(Var root) const {
  check_usage(!walking_, "backward on a tape whose last backward ended with an error",
              "call Tape::reset(), and record another forward pass");
  check_usage(has(root) || root.state_ == nullptr || !root.pass_.alive(), "backward from a value of another tape",
              "call it on the tape that the forward pass was given");
  check_usage(!root.walked(), "backward from a value that it has walked already",
              "record another forward pass; for two losses of one pass, walk the sum of both");
  check_usage(root.needs_grad(), "backward from a value that depends on no parameter",
              "compute it from the model's output while the tape is recording");
}

void Tape::backward(Var root) {
  check_root(root);
  if (!root.is_loss())
    throw UsageError(fmt::format("backward from {}, which is no loss", to_string(root.shape())),
                     "end the pass with nn::cross_entropy() or nn::squared_error(), or give backward the gradient too");
  check_thread();
  root.state_->grad = root.state_->value;  // only marks it as reached: losses do not read it
  root.state_->is_root = true;
  walk_all();
}

void Tape::check_start(Var root, const Tensor& grad) const {
  check_root(root);
  if (!grad.defined() || grad.shape() != root.shape() || grad.dtype() != root.dtype())
    throw UsageError(
        fmt::format("backward from {} {} with a gradient of {} {}", name_of(root.dtype()), to_string(root.shape()),
                    grad.defined() ? name_of(grad.dtype()) : "nothing,", to_string(grad.shape())),
        "give it one of the value's shape and type");
  static_cast<void>(checked(grad));
}

void Tape::start_from(Var root, Tensor grad) {
  contribute(root, std::move(grad));
  root.state_->is_root = true;
}

void Tape::backward(Var root, Tensor grad) {
  check_thread();
  check_start(root, grad);
  start_from(root, std::move(grad));
  walk_all();
}

void Tape::backward(std::span<const Var> roots, std::span<const Tensor> grads) {
  check_thread();
  if (roots.size() != grads.size())
    throw UsageError(fmt::format("backward from {} values with {} gradients", roots.size(), grads.size()),
                     "give each value one; an undefined tensor where there is none");
  const auto given = [&](std::size_t i) { return grads[i].defined(); };
  bool any = false;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    if (!given(i)) continue;
    check_start(roots[i], grads[i]);
    any = true;
  }
  check_usage(any, "backward from no value", "give at least one, with its gradient");
  for (std::size_t i = 0; i < roots.size(); ++i)
    if (given(i)) start_from(roots[i], grads[i]);
  walk_all();
}

void Tape::walk_all() {
  check_usage(listener_ == nullptr || listener_lifetime_.alive(),
              "backward of a pass whose DistributedDataParallel is no longer there",
              "keep it until backward is through");
  BackwardListener* const listener = std::exchange(listener_, nullptr);
  walking_ = true;
  if (listener != nullptr) listener->backward_begins();
  while (!nodes_.empty()) {
    const auto place = static_cast<std::ptrdiff_t>(nodes_.size()) - 1;
    Node& node = *nodes_.back();
    Var::State& output = *node.output().state_;
    // If it throws, the node is still the tape's.
    if (output.grad.defined() || output.grad_through.defined()) walk(node);
    nodes_.erase(nodes_.begin() + place);  // what it has recorded comes next
    const NodeOwner owner{&node};
    output.grad = Tensor();
    output.second_grad = Tensor();
    output.grad_through = Tensor();
    output.saved_preactivation = Tensor();
    output.walked = true;
    if (!output.is_root) output.value = Tensor();  // all that read it have been walked
    finish_uses(node);
    if (node_hook_) node_hook_();
    if (listener != nullptr) listener->node_walked();
  }
  if (listener != nullptr) listener->backward_ended();
  walking_ = false;
}

void Tape::reset() {
  listener_ = nullptr;
  walking_ = recomputing_ = false;
  owner_thread_ = nullptr;
  lifetime_.renew();
  for (Node* node : nodes_) {
    forget_uses(*node);
    node->~Node();
  }
  nodes_.clear();
  for (auto* state : vars_) state->~State();
  vars_.clear();
  if (used_bytes_ > held_memory_.size()) {
    try {
      hold_memory(used_bytes_);
    } catch (const std::bad_alloc&) {
      memory_->release();  // the next pass asks for it a piece at a time
    }
  } else {
    memory_->release();
  }
  used_bytes_ = 0;
}

void Vars::refuse_number(std::size_t i) const {
  throw UsageError(fmt::format("value {} of {}", i, size()), "count from 0, and give or return as many as are used");
}

void Vars::refuse_count(std::size_t wanted) const {
  throw UsageError(fmt::format("{} value{} where {} {} expected", size(), size() == 1 ? "" : "s", wanted,
                               wanted == 1 ? "is" : "are"),
                   "take as many as there are: as<2>(), [0], or a loss that takes nn::Vars");
}

}  // namespace lockstep::nn
