#include "lockstep/nn/autograd/functions.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lockstep::nn {

// The tape walks nodes in the reverse order of recording. First comes a SegmentResult for each result, and keeps its
// gradient. Then the Recomputation records the segment again on top of the remaining nodes.
class Recomputation final : public Node {
 public:
  /// `reached`: a value that nobody reads, whose gradient says that one of the results has one.
  Recomputation(Var reached, Vars inputs, Segment segment, std::vector<Parameter*> parameters, std::size_t results)
      : Node(reached), inputs_(inputs), segment_(std::move(segment)), held_(std::move(parameters)), grads_(results) {
    for (Parameter* parameter : held_) {
      lifetimes_.push_back(parameter->lifetime());
      ++parameter->pending_uses_;
    }
  }
  ~Recomputation() override {
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (lifetimes_[i].alive() && --held_[i]->pending_uses_ == 0) held_[i]->touched_ = false;
  }

  bool records() const override { return true; }
  void each_parameter(FunctionRef<void(Parameter&)> visit) const override {
    for (Parameter* parameter : held_) visit(*parameter);
  }

  void backward(Tape& tape) override {
    for (const Lifetime::Ref& lifetime : lifetimes_)
      check_usage(lifetime.alive(), "backward comes to a segment whose parameters are no longer there",
                  "keep the module until backward is through");
    const Vars results = [&] {
      struct Again {
        bool& flag;
        bool before = std::exchange(flag, true);
        ~Again() { flag = before; }
      } again{tape.recomputing_};
      return segment_(tape, inputs_);
    }();
    check_usage(results.size() == grads_.size(),
                "a segment that returns another number of values when it is recomputed",
                "let it depend on its inputs alone");
    for (std::size_t i = 0; i < grads_.size(); ++i)
      if (grads_[i].defined()) tape.contribute(results[i], std::exchange(grads_[i], Tensor()));
    release();
  }

  void set_grad(std::size_t result, Tensor grad) { grads_[result] = std::move(grad); }

 private:
  // What was recorded again has uses of its own. All counts go down before the first call: on_ready may throw.
  void release() {
    const std::vector<Parameter*> held = std::exchange(held_, {});
    std::vector<Parameter*> ready;
    for (Parameter* parameter : held)
      if (--parameter->pending_uses_ == 0 && std::exchange(parameter->touched_, false)) ready.push_back(parameter);
    for (Parameter* parameter : ready)
      if (parameter->on_ready) parameter->on_ready();
  }

  Vars inputs_;
  Segment segment_;
  std::vector<Parameter*> held_;  // each of the segment's once, as a use that is pending
  std::vector<Lifetime::Ref> lifetimes_;
  std::vector<Tensor> grads_;  // of the results
};

namespace {

class SegmentResult final : public Node {
 public:
  SegmentResult(Var result, Var reached, Recomputation& of, std::size_t index)
      : Node(result), reached_(reached), of_(of), index_(index) {}
  bool records() const override { return true; }
  void backward(Tape& tape) override {
    Tensor grad = tape.take_grad(output());
    if (!tape.grad(reached_).defined()) tape.contribute(reached_, reached_.value());
    of_.set_grad(index_, std::move(grad));
  }

 private:
  Var reached_;
  Recomputation& of_;
  std::size_t index_;
};

}  // namespace

Vars recompute(Tape& tape, const Vars& inputs, Segment segment) {
  if (!tape.recording()) return segment(tape, inputs);
  const std::size_t first_node = tape.nodes_.size(), first_value = tape.vars_.size();
  const Vars results = segment(tape, inputs);
  const auto recorded = std::span(tape.nodes_).subspan(first_node);
  if (recorded.empty()) return results;
  std::vector<Parameter*> parameters;
  for (const Node* node : recorded)
    node->each_parameter([&](Parameter& parameter) { parameters.push_back(&parameter); });
  std::ranges::sort(parameters);
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());

  Vars kept;
  std::vector<Var> made;
  const Var reached = tape.make_var(tape.backend().empty({1}), true);
  for (const Var result : results) {
    const bool own = std::ranges::none_of(inputs, [&](Var input) { return input.state_ == result.state_; });
    made.push_back(own ? tape.make_var(result.rows(), result.needs_grad()) : result);
  }
  auto* const node = new (tape.take_memory(sizeof(Recomputation)))
      Recomputation(reached, inputs, std::move(segment), std::move(parameters), results.size());
  // The parameters are held: now what was recorded may go, and with it what it has kept.
  for (std::size_t i = tape.nodes_.size(); i > first_node; --i) {
    Tape::forget_uses(*tape.nodes_[i - 1]);
    tape.nodes_[i - 1]->~Node();
  }
  tape.nodes_.resize(first_node);
  for (std::size_t i = first_value; i < tape.vars_.size(); ++i) {
    Var::State& state = *tape.vars_[i];
    const bool stays =
        &state == reached.state_ || std::ranges::any_of(made, [&](Var one) { return one.state_ == &state; });
    if (stays) continue;
    state.value = state.saved_preactivation = Tensor();
    state.walked = true;
  }
  tape.nodes_.push_back(node);
  for (std::size_t i = 0; i < made.size(); ++i) {
    kept.push_back(made[i]);
    if (made[i].state_ != results[i].state_) tape.record<SegmentResult>(made[i], reached, *node, i);
  }
  return kept;
}

}  // namespace lockstep::nn
