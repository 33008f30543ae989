// Reverse-mode differentiation: operators record what they did, backward walks it in reverse.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <memory_resource>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn/autograd/parameter.h"
#include "nn/ops/backend.h"

namespace lockstep::nn {

class Tape;

/// A tensor on a tape. Copying is free; valid until the tape's next reset. Backward takes the values of what operators
/// computed away again, all but its root's: who wants to see one afterwards copies `value()` (a handle) before.
class Var {
 public:
  Var() = default;
  const Tensor& value() const { return state_->value; }
  const Shape& shape() const { return state_->value.shape(); }
  bool needs_grad() const { return state_->needs_grad; }
  /// For operators: the activation that this is the result of, where the device has put something aside of it
  /// (LinearKernels::aside_of), and that; kNone and undefined for most.
  Epilogue activation() const { return state_->activation; }
  const Tensor& aside() const { return state_->aside; }

 private:
  friend class Tape;
  struct State {
    Tensor value;
    Tensor grad;  // undefined until the first consumer's backward has run
    bool needs_grad = false;
    Epilogue activation = Epilogue::kNone;
    Tensor aside;
    Tensor grad_through;  // what consumers have contributed that have differentiated the activation themselves
  };
  explicit Var(State* state) : state_(state) {}
  State* state_ = nullptr;
};

/// What an operator is called in reports, and the parameter that tells in which layer it stands (nullptr: it has none).
struct OpLabel {
  const char* op = "";
  const Parameter* parameter = nullptr;
};

/// Is told when operators begin and end to compute, forward and backward; never nested. Must not throw.
class TapeObserver {
 public:
  virtual ~TapeObserver() = default;
  virtual void op_begins() = 0;
  virtual void op_ended(const OpLabel& label, bool backward) = 0;
};

/// Is told of one backward pass, on the thread that runs it.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  virtual void backward_begins() = 0;
  virtual void node_walked() = 0;
  /// All gradients of this pass have landed. Not called where it ends with an exception.
  virtual void backward_ended() = 0;
};

/// One recorded operation: holds what its backward needs. Lives in the tape's memory.
class Node {
 public:
  /// Those that it contributes to; nullptr: none.
  using Parameters = std::array<Parameter*, 4>;
  explicit Node(Var output, Parameters parameters = {}) : output_(output), parameters_(parameters) {}
  virtual ~Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Reads tape.grad(output()), contributes to inputs (tape.contribute) and parameters (Parameter::contribute). Where
  /// it has more to do when the parameters have got theirs, it says so (tape.parameters_done).
  virtual void backward(Tape& tape) = 0;

  Var output() const { return output_; }
  const Parameters& parameters() const { return parameters_; }

 private:
  friend class Tape;
  Var output_;
  Parameters parameters_;
  bool parameters_done_ = false;
  OpLabel label_;  // of the operator that recorded it
};

/// Records one forward pass. Keeps its memory between passes: a pass of the same length allocates nothing.
/// One thread uses it. The backend and all parameters used must outlive it or its next reset.
class Tape {
 public:
  explicit Tape(Backend& backend);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  Backend& backend() const { return backend_; }

  /// Whether operators record themselves (training) or only compute (evaluation).
  bool recording() const { return recording_; }
  void set_recording(bool wanted) { recording_ = wanted; }

  /// What operators compute in that have no activations to take it from (embedding): f32, or bf16 where the backend
  /// computes in it.
  DType activations() const { return activations_; }
  void set_activations(DType dtype) { activations_ = dtype; }

  /// DropoutState as (3) i64 on the device: whoever records passes sets its content before each, and leaves it alone
  /// until backward is through. Undefined at first: then there is no dropout.
  const Tensor& dropout_state() const { return dropout_state_; }
  void set_dropout_state(Tensor state) { dropout_state_ = std::move(state); }

  /// A constant: no gradient flows into it.
  Var input(Tensor value) { return make_var(std::move(value), false); }
  /// An input whose gradient is wanted (read it with grad() after backward).
  Var differentiable_input(Tensor value) { return make_var(std::move(value), true); }

  /// For operators: a result. It needs a gradient if wanted and the tape is recording.
  Var make_var(Tensor value, bool needs_grad);

  /// For operators: records a node if its output needs a gradient. NodeType's constructor takes (output, args…).
  template <class NodeType, class... Args>
  void record(Var output, Args&&... args) {
    static_assert(std::is_base_of_v<Node, NodeType>);
    if (!recording_ || !output.needs_grad()) return;
    static_assert(alignof(NodeType) <= alignof(std::max_align_t));
    push(new (take_memory(sizeof(NodeType))) NodeType(output, std::forward<Args>(args)...));
  }

  /// Adds `grad` (of v's shape) to v's gradient. Takes the tensor over when it is the first.
  void contribute(Var v, Tensor grad);
  /// The same with the gradient of what `v` is the activation of, which take_grad_through() is not to differentiate
  /// again.
  void contribute_through(Var v, Tensor grad);
  /// For operators: `v` is the result of `activation`, and this what the device has put aside of it.
  void set_aside(Var v, Epilogue activation, Tensor aside) {
    v.state_->activation = activation;
    v.state_->aside = std::move(aside);
  }
  /// v's gradient; undefined if nothing has flowed into it.
  const Tensor& grad(Var v) const { return v.state_->grad; }

  /// For a node's backward: its output's gradient, moved out of the tape, so that it can be changed in place when
  /// nobody else holds it.
  Tensor take_grad(Var v) { return std::exchange(v.state_->grad, Tensor()); }

  /// The same of what `v` is the result of `activation` of. GELU needs what was put aside of it.
  Tensor take_grad_through(Var v, Epilogue activation);

  /// For a node's backward: it will contribute no more to its parameters, which may thus be ready before it ends, and
  /// their collective travel while it goes on. They keep their values until backward() returns.
  void parameters_done(Node& node);

  /// Walks the tape from `root`, which must be the result of a loss (its gradient is taken as one: losses carry their
  /// own scale). Calls on_ready of each parameter when its last contribution has landed. Tensors are released as soon
  /// as nothing needs them. Once for each forward pass.
  void backward(Var root);
  /// The same from any value, with its gradient, of its shape: for passes that end elsewhere than in a loss.
  void backward(Var root, Tensor grad);

  /// For operators: lives while one computes its result, and names what it records. Operators do not call each other.
  class OpScope {
   public:
    OpScope(Tape& tape, const char* op, const Parameter* parameter = nullptr) : tape_(tape) {
      tape.label_ = {op, parameter};
      if (tape.observer_ != nullptr) tape.observer_->op_begins();
    }
    ~OpScope() {
      if (tape_.observer_ != nullptr) tape_.observer_->op_ended(tape_.label_, false);
      tape_.label_ = {};
    }
    OpScope(const OpScope&) = delete;
    OpScope& operator=(const OpScope&) = delete;

   private:
    Tape& tape_;
  };

  /// nullptr: none. It must outlive the tape or its next observer.
  void set_observer(TapeObserver* observer) { observer_ = observer; }

  /// Called after each node of backward: where collectives without a thread of their own go on.
  void set_node_hook(std::function<void()> hook) { node_hook_ = std::move(hook); }

  /// Of the next backward(), or until the next reset(), or another listener: it must live until then. nullptr: none.
  void set_listener(BackwardListener* listener) { listener_ = listener; }

  /// Forgets everything recorded, also after an exception half way through backward.
  void reset();

 private:
  void push(Node* node);
  void walk(Node& node);
  void walk_all(Var root);
  void* take_memory(std::size_t bytes);
  void hold_memory(std::size_t bytes);
  static void forget_uses(const Node& node);
  static void finish_uses(Node& node);
  void add_to_grad(Tensor& sum, Tensor grad);

  Backend& backend_;
  bool recording_ = true;
  DType activations_ = DType::kF32;
  Tensor dropout_state_;
  std::vector<std::byte> held_memory_;  // grows to what the longest pass has used
  std::unique_ptr<std::pmr::monotonic_buffer_resource> memory_;
  std::size_t used_bytes_ = 0;
  std::vector<Node*> nodes_;  // those that backward has not walked yet
  std::vector<Var::State*> vars_;
  std::function<void()> node_hook_;
  OpLabel label_;  // of the operator that computes
  TapeObserver* observer_ = nullptr;
  BackwardListener* listener_ = nullptr;
};

}  // namespace lockstep::nn
