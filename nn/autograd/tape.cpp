#include "nn/autograd/tape.h"

#include <utility>

namespace lockstep::nn {
namespace {

constexpr std::size_t kFirstMemoryBytes = std::size_t{64} << 10;  // hundreds of nodes before the heap is asked

}  // namespace

Tape::Tape(Backend& backend)
    : backend_(backend),
      first_memory_(kFirstMemoryBytes),
      memory_(std::make_unique<std::pmr::monotonic_buffer_resource>(first_memory_.data(), first_memory_.size())) {}

Tape::~Tape() { reset(); }

Var Tape::make_var(Tensor value, bool needs_grad) {
  void* memory = memory_->allocate(sizeof(Var::State), alignof(Var::State));
  auto* state = new (memory) Var::State{std::move(value), {}, needs_grad};
  vars_.push_back(state);
  return Var(state);
}

void Tape::push(Node* node) {
  nodes_.push_back(node);
  for (Parameter* parameter : node->parameters())
    if (parameter != nullptr) ++parameter->pending_uses_;
}

void Tape::contribute(Var v, Tensor grad) {
  if (!v.needs_grad()) return;
  Tensor& sum = v.state_->grad;
  LOCKSTEP_ASSERT(grad.shape() == v.shape(), "gradient {} for a value {}", to_string(grad.shape()),
                  to_string(v.shape()));
  if (!sum.defined()) {
    sum = std::move(grad);
    return;
  }
  if (sum.is_sole_owner()) {
    backend_.pointwise().add_to(grad, 1.0f, sum);
    return;
  }
  // Another variable's gradient is the same memory: leave it alone.
  Tensor fresh = backend_.empty(sum.shape());
  backend_.pointwise().add(sum, grad, fresh);
  sum = std::move(fresh);
}

void Tape::finish_uses(Node& node) {
  for (Parameter* parameter : node.parameters()) {
    if (parameter == nullptr) continue;
    if (--parameter->pending_uses_ == 0 && parameter->has_gradient_ && parameter->on_ready) parameter->on_ready();
  }
}

void Tape::backward(Var root) {
  check_usage(root.needs_grad(), "backward from a value that depends on no parameter",
              "compute it from the model's output while the tape is recording");
  root.state_->grad = root.state_->value;  // only marks it as reached: losses do not read it
  for (auto i = nodes_.size(); i-- > 0;) {
    Node* node = std::exchange(nodes_[i], nullptr);
    const bool reached = grad(node->output()).defined();
    if (reached) node->backward(*this);
    node->output().state_->grad = Tensor();
    finish_uses(*node);
    node->~Node();
    if (node_hook_) node_hook_();
  }
  nodes_.clear();
}

void Tape::reset() {
  for (Node* node : nodes_) {
    if (node == nullptr) continue;
    for (Parameter* parameter : node->parameters())
      if (parameter != nullptr) --parameter->pending_uses_;
    node->~Node();
  }
  nodes_.clear();
  for (auto* state : vars_) state->~State();
  vars_.clear();
  memory_->release();
}

}  // namespace lockstep::nn
