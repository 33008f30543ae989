// Reverse-mode differentiation: operators record what they did, backward walks it in reverse.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <memory_resource>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "lockstep/base/misuse.h"
#include "lockstep/nn/autograd/parameter.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn {

class Recomputation;
class Tape;
class Vars;

/// A tensor on a tape. Copying is free; valid until the tape's next reset, or its end. Backward releases the values
/// that operators computed, except its root's: to see one afterwards, copy `value()` (a handle) before. Using one that
/// is no longer valid, or a value that is gone, is a UsageError. References that it returns are into the tape: they are
/// valid as long as it is, and are not checked.
class Var {
 public:
  Var() = default;
  /// Contiguous: replaces a value whose rows lie apart by a copy.
  const Tensor& value() const {
    const Tensor& known = rows();
    if (!known.is_contiguous()) [[unlikely]]
      make_contiguous();
    return known;
  }
  /// For operators: the value as it was made; its rows may lie apart (Note [Pitch]).
  const Tensor& rows() const {
    const Tensor& known = there();
    if (state_->overwritten) [[unlikely]]
      refuse_overwritten();
    return known;
  }
  const Shape& shape() const { return there().shape(); }
  DType dtype() const { return there().dtype(); }
  bool needs_grad() const { return state().needs_grad; }
  /// Whether backward has walked the operator that computed it: nothing more can flow through it.
  bool walked() const { return state().walked; }
  /// Whether Tape::backward() may start from it without a gradient: Tape::make_loss().
  bool is_loss() const { return state().is_loss; }
  /// Whether the second number of a loss is a count of correct predictions; NaN if not.
  bool counts() const { return state().counts; }
  /// For operators: the activation of which this is the result, and what the device has kept of its input
  /// (LinearKernels::saved_preactivation_of); kNone and undefined if it kept nothing.
  Epilogue activation() const { return state().activation; }
  const Tensor& saved_preactivation() const { return state().saved_preactivation; }

 private:
  friend class Tape;
  friend Vars recompute(Tape& tape, const Vars& inputs, std::function<Vars(Tape&, const Vars&)> segment);
  struct State {
    Tensor value;
    Tensor grad;         // undefined until the first consumer's backward has run
    Tensor second_grad;  // beside it, where the node adds the two itself
    bool keeps_grad_parts = false;
    bool needs_grad = false;
    bool walked = false;
    bool is_loss = false;
    bool counts = false;
    bool is_root = false;  // of the backward pass
    bool left_to_loss = false;
    bool overwritten = false;
    Epilogue activation = Epilogue::kNone;
    Tensor saved_preactivation;
    Backend* backend = nullptr;  // of a value with a pitch
    Tensor grad_through;         // what consumers have contributed that have differentiated the activation themselves
  };
  Var(State* state, Lifetime::Ref pass) : state_(state), pass_(pass) {}
  State& state() const {
    if (!pass_.alive()) [[unlikely]]
      refuse_expired();
    return *state_;
  }
  const Tensor& there() const {
    const State& known = state();
    if (known.walked && !known.value.defined()) [[unlikely]]
      refuse_released();
    return known.value;
  }
  void make_contiguous() const;
  [[noreturn]] void refuse_expired() const;
  [[noreturn]] static void refuse_released();
  [[noreturn]] static void refuse_overwritten();

  State* state_ = nullptr;
  Lifetime::Ref pass_;  // of the tape, until it forgets
};

/// An operator's name in reports, a text that is never released, and the parameter that identifies its layer (nullptr:
/// it has none).
struct OpLabel {
  const char* op = "";
  const Parameter* parameter = nullptr;
};

/// Is notified when operators begin and end to compute, forward and backward; never nested. Called on the thread of the
/// pass. Must not throw, and must not use the tape. An operator whose backward throws does not end.
class TapeObserver {
 public:
  virtual ~TapeObserver() = default;
  virtual void op_begins() = 0;
  virtual void op_ended(const OpLabel& label, bool backward) = 0;
};

/// Is notified of one backward pass, on the thread that runs it. What it throws comes out of Tape::backward(). It must
/// not use the tape.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  virtual void backward_begins() = 0;
  virtual void node_walked() = 0;
  /// All gradients of this pass have landed. Not called where it ends with an exception.
  virtual void backward_ended() = 0;

  /// Ends with it: for the tape that it listens to.
  Lifetime::Ref lifetime() const { return lifetime_.ref(); }

 private:
  Lifetime lifetime_;
};

/// One recorded operation: holds what its backward needs. Lives in the tape's memory, until backward has walked it or
/// the tape is reset. Keeps pointers to its parameters, and for tensors handles.
class Node {
 public:
  /// Those that it contributes to; nullptr: none.
  using Parameters = std::array<Parameter*, 4>;
  explicit Node(Var output, Parameters parameters = {}) : output_(output), parameters_(parameters) {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i] != nullptr) lifetimes_[i] = parameters_[i]->lifetime();
  }
  virtual ~Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Reads tape.grad(output()), contributes to inputs (tape.contribute) and parameters (Parameter::contribute). Where
  /// it has more to do when the parameters have got theirs, it says so (tape.parameters_done). The tape calls it only
  /// where all of parameters() are there. What it throws comes out of Tape::backward().
  virtual void backward(Tape& tape) = 0;

  /// Whether backward() reads its output's value.
  virtual bool reads_output() const { return true; }

  /// Whether backward() records operators, which the tape then walks next (Note [Recomputation]).
  virtual bool records() const { return false; }

  Var output() const { return output_; }
  const Parameters& parameters() const { return parameters_; }
  /// Those of what it records, too.
  virtual void each_parameter(FunctionRef<void(Parameter&)> visit) const {
    for (Parameter* parameter : parameters_)
      if (parameter != nullptr) visit(*parameter);
  }

 private:
  friend class Tape;
  bool is_there(std::size_t parameter) const { return lifetimes_[parameter].alive(); }

  Var output_;
  Parameters parameters_;
  std::array<Lifetime::Ref, std::tuple_size_v<Parameters>> lifetimes_;  // a module may end before the tape
  bool parameters_done_ = false;
  OpLabel label_;  // of the operator that recorded it
};

/// Records one forward pass. Keeps its memory between passes: a pass of the same length allocates nothing. The backend
/// must outlive it or its next reset. So must the parameters used, or backward is a UsageError. So must the memory of
/// views that it is given, whose content stays as it is until then: the tape keeps a handle of each tensor.
///
/// Note [One thread]
/// One thread at a time uses a tape: from the first value of a pass until reset(), after which it may be another one's.
/// The same holds for the parameters of a module: from when a pass that is recorded uses them until backward has walked
/// it or its tape is reset. A call from another thread in between is a UsageError. What several threads do at the same
/// moment is found as a rule, not always. reset() and the end of a tape are not checked: nobody uses it meanwhile.
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

  /// What operators compute in that have no activations to take it from (embedding): f32 at first. Throws UsageError
  /// for a type that the backend does not compute in.
  DType activations() const { return activations_; }
  void set_activations(DType dtype);

  /// (1) f32 on the device, by which losses multiply their gradients, beside their own scale: GradScaler::scale(). It
  /// is read when a loss is computed, and for sum() when backward comes to it, and stays until the next call. Undefined
  /// at first: 1. A gradient that backward() is given is taken as it is. Throws UsageError for another type or size, or
  /// another device's.
  const Tensor& loss_scale() const { return loss_scale_; }
  void set_loss_scale(Tensor scale);

  /// DropoutState as (3) i64 on the device: whoever records passes sets its content before each, and leaves it alone
  /// until backward is through. Undefined at first: then dropout() is a UsageError.
  const Tensor& dropout_state() const { return dropout_state_; }
  void set_dropout_state(Tensor state) { dropout_state_ = std::move(state); }

  /// A constant: no gradient flows into it. Throws UsageError for a tensor that holds nothing, or another device's,
  /// which a view does not show.
  Var input(Tensor value) { return make_var(checked(std::move(value)), false); }
  /// An input whose gradient is wanted (read it with grad() after backward).
  Var differentiable_input(Tensor value) { return make_var(checked(std::move(value)), true); }

  /// For operators: a result. It needs a gradient if wanted and the tape is recording.
  Var make_var(Tensor value, bool needs_grad);
  /// The same for an operator that backward may start from: its node asks for no gradient of its own. `counts`: it
  /// counts correct predictions (Loss).
  Var make_loss(Tensor value, bool needs_grad, bool counts = true);

  /// Whether what is recorded now has been computed before in this pass (Note [Recomputation]): operators compute the
  /// same, and leave statistics alone.
  bool recomputing() const { return recomputing_; }

  /// Whether it is of this tape, and since its last reset.
  bool has(Var v) const { return v.pass_ == lifetime_.ref(); }

  /// For operators: records a node if its output needs a gradient. NodeType's constructor takes (output, args…).
  template <class NodeType, class... Args>
  void record(Var output, Args&&... args) {
    static_assert(std::is_base_of_v<Node, NodeType>);
    if (!recording_ || !output.needs_grad()) return;
    static_assert(alignof(NodeType) <= alignof(std::max_align_t));
    push(new (take_memory(sizeof(NodeType))) NodeType(output, std::forward<Args>(args)...));
  }

  /// Only the next loss reads these values: Module::forward_loss() declares that for outputs that only the loss gets.
  void leave_to_loss(const Vars& outputs);
  /// For a loss: v's value, to be overwritten by its gradient, where it was left to the loss and no operator of this
  /// pass reads it in its backward; undefined otherwise, and where somebody holds a handle of it. From then on reading
  /// it is a UsageError.
  Tensor take_value(Var v);

  /// Adds `grad` (of v's shape, else InternalError) to v's gradient. Takes the tensor over when it is the first: memory
  /// that nobody else holds is changed then; that of others, and of views, is not.
  void contribute(Var v, Tensor grad);
  /// The same with the gradient of what `v` is the activation of, which take_grad_through() is not to differentiate
  /// again.
  void contribute_through(Var v, Tensor grad);
  /// For operators: `v` is the result of `activation`, and this what the device has kept of its input.
  void save_preactivation(Var v, Epilogue activation, Tensor saved_preactivation) {
    v.state_->activation = activation;
    v.state_->saved_preactivation = std::move(saved_preactivation);
  }
  /// v's gradient, contiguous; undefined if nothing has flowed into it.
  const Tensor& grad(Var v) const;

  /// For a node's backward: v's gradient so far, which may be added to in place; undefined: contribute() is to be
  /// called.
  Tensor grad_in_place(Var v) const {
    const Tensor& known = v.state().grad;
    return known.is_contiguous() && known.is_sole_owner() ? known : Tensor();
  }

  /// For a node's backward: its output's gradient, moved out of the tape, so that it can be changed in place when
  /// nobody else holds it.
  Tensor take_grad(Var v) {
    join_grad_parts(v);
    return std::exchange(v.state().grad, Tensor());
  }

  /// For operators whose backward adds two gradients in passing: what flows into `v` may be kept in two parts, of one
  /// type and contiguous.
  void keep_grad_parts(Var v) { v.state().keeps_grad_parts = true; }
  /// take_grad() of such a value; the second part may be undefined.
  std::pair<Tensor, Tensor> take_grad_parts(Var v) {
    return {std::exchange(v.state().grad, Tensor()), std::exchange(v.state().second_grad, Tensor())};
  }

  /// The same of what `v` is the result of `activation` of. GELU needs what was kept of its input.
  Tensor take_grad_through(Var v, Epilogue activation);

  /// For a node's backward: it will contribute no more to its parameters. These may thus be ready before it ends, and
  /// their collective overlaps with its remainder. They keep their values until backward() returns.
  void parameters_done(Node& node);

  /// Walks the tape from `root`, which must be the result of a loss, or a sum of such (its gradient is taken as one:
  /// losses carry their own scale). Calls on_ready of each parameter when its last contribution has landed. Tensors are
  /// released as soon as nothing needs them. Once for each forward pass. Throws UsageError for any other root, for a
  /// value that depends on no parameter, and if a parameter or the listener is gone. Errors of operators and callbacks
  /// pass through. After an error, call reset(); gradients may lack contributions.
  void backward(Var root);
  /// The same from any value, with its gradient, of its shape and type: for passes that end elsewhere than in a loss.
  /// `grad` is never written to while somebody else holds it.
  void backward(Var root, Tensor grad);
  /// The same from several values, each with its gradient; one whose gradient is undefined has none.
  void backward(std::span<const Var> roots, std::span<const Tensor> grads);

  /// For operators: lives while one computes its result, and names what it records. Operators do not call each other.
  /// Nodes keep `op`: a string literal.
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

  /// Calls `visit` with each result that is recorded and that backward has not walked, in the order of the pass: for
  /// whoever looks at a pass. `visit` must not use the tape.
  void each_recorded(FunctionRef<void(const OpLabel& label, Var result)> visit) const {
    for (const Node* node : nodes_) visit(node->label_, node->output());
  }

  /// nullptr: none. It must outlive the tape or its next observer.
  void set_observer(TapeObserver* observer) { observer_ = observer; }

  /// Called after each node of backward: where collectives without a thread of their own make progress. Kept until the
  /// next call; empty: none. What it throws comes out of backward(). It must not use the tape.
  void set_node_hook(std::function<void()> hook) { node_hook_ = std::move(hook); }

  /// Of the next backward(), or until the next reset(), or another listener: it must live until then, or that backward
  /// is a UsageError. nullptr: none.
  void set_listener(BackwardListener* listener) {
    listener_ = listener;
    listener_lifetime_ = listener != nullptr ? listener->lifetime() : Lifetime::Ref();
  }
  /// The listener of the next backward(); nullptr where there is none, or none any more.
  const BackwardListener* listener() const { return listener_lifetime_.alive() ? listener_ : nullptr; }

  /// Forgets everything recorded, also after an exception half way through backward. Not within backward. Scale,
  /// dropout state, hook and observer stay.
  void reset();

  /// Expires at the next reset(), and with the tape.
  Lifetime::Ref pass() const { return lifetime_.ref(); }

 private:
  friend class Recomputation;
  friend Vars recompute(Tape& tape, const Vars& inputs, std::function<Vars(Tape&, const Vars&)> segment);

  Tensor checked(Tensor value) const;
  void check_root(Var root) const;
  void push(Node* node);
  void walk(Node& node);
  void walk_all();
  void check_start(Var root, const Tensor& grad) const;
  void start_from(Var root, Tensor grad);
  void check_thread() {
    const ThreadId here = this_thread();
    if (owner_thread_ == here) [[likely]]
      return;
    if (owner_thread_ != nullptr) refuse_thread();
    owner_thread_ = here;
  }
  [[noreturn]] static void refuse_thread();
  void check_user(const Node& node, const Parameter& parameter) const;
  void* take_memory(std::size_t bytes);
  void hold_memory(std::size_t bytes);
  static void forget_uses(const Node& node);
  static void finish_uses(Node& node);
  void join_grad_parts(Var v) const;
  void add_to_grad(Tensor& sum, Tensor grad) const;

  Backend& backend_;
  bool recording_ = true;
  DType activations_ = DType::kF32;
  Tensor dropout_state_, loss_scale_;
  std::vector<std::byte> held_memory_;  // grows to what the longest pass has used
  std::unique_ptr<std::pmr::monotonic_buffer_resource> memory_;
  std::size_t used_bytes_ = 0;
  std::vector<Node*> nodes_;  // those that backward has not walked yet
  std::vector<Var::State*> vars_;
  std::function<void()> node_hook_;
  OpLabel label_;  // of the operator that computes
  TapeObserver* observer_ = nullptr;
  BackwardListener* listener_ = nullptr;
  Lifetime::Ref listener_lifetime_;
  ThreadId owner_thread_ = nullptr;  // of the pass; nullptr: there is none
  bool recomputing_ = false;
  bool walking_ = false;  // or left in the middle by an error
  Lifetime lifetime_;     // of the pass
};

}  // namespace lockstep::nn
