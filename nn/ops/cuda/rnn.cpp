#include "lockstep/nn/ops/rnn.h"

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cuda/runtime.h"
#include "base/error.h"
#include "nn/ops/cuda/cudnn_operands.h"
#include "nn/ops/cuda/cudnn_rnn.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/memory.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/own_kernels.h"
#include "nn/ops/cuda/plan_choices.h"

namespace lockstep::nn::cuda {
namespace {

// Note [Weight space]
// cuDNN wants a layer's parameters in one piece of memory, at places of its own choosing, and gives their gradients
// back in such a piece. Parameters lie where optimizer and reducer have them, and gradients belong into the arena, so
// they are copied: G · H · (I + H + 2) numbers once a step each way, where the layer multiplies each of them T times B
// times. In training they are copied at every forward pass, also of a step that is captured, whose parameters move
// between replays without anything on the host knowing; otherwise when their versions have changed. Where a layer has
// no biases, theirs are zeros.
struct WeightSpace {
  Tensor memory;
  std::array<std::uint64_t, 4> versions = {};
  DType dtype = DType::kF32;
};

// Note [Recurrent algorithms]
// The standard algorithm starts several kernels for each step, hundreds for a layer; persistent ones keep the weights
// on the multiprocessors and start a few. Which of them takes a shape, cuDNN says in part when it is asked and in part
// when it runs, and which is the fastest depends on all sizes. So where kernels are timed (Note [Autotuning]), the
// first pass of a shape that is trained tries all of them, forward and backward together, since both share a reserve
// space; in inference, whose shapes are many, it is the standard one. One that fails is left out. So is one whose bits
// differ the second time, unless that is allowed (Context::deterministic): cuDNN has no list of these.
//
// Persistent kernels need all their blocks on the GPU at once. A collective beside them may hold multiprocessors until
// the other ranks have begun theirs; they have, or they will without waiting for this kernel: gradients are ready on
// all ranks in one order.
class RnnTrial {
 public:
  RnnTrial(Context& context, cudnnHandle_t handle, const RnnProblem& problem)
      : context_(context),
        handle_(handle),
        problem_(problem),
        x_(numbers({problem.samples, problem.steps, problem.inputs})),
        dy_(numbers({problem.samples, problem.steps, problem.width})),
        y_(Tensor::empty(context.allocator, dy_.shape(), problem.dtype)),
        dx_(Tensor::empty(context.allocator, x_.shape(), problem.dtype)) {}

  /// Of both passes; infinity where it cannot be taken. found() says more.
  double seconds(const RnnAlgorithm& algorithm) {
    const auto note = [&](double seconds, const std::string& what) {
      found_ += fmt::format("{}{}: {}", found_.empty() ? "" : "; ", algorithm.name, what);
      return seconds;
    };
    constexpr double kNever = std::numeric_limits<double>::infinity();
    try {
      const auto plan = RnnPlan::make(handle_, problem_, context_.allocator, algorithm);
      if (!plan) return note(kNever, "cuDNN refuses it");
      weights_ = numbers({static_cast<std::int64_t>(plan->weight_bytes() / size_of(problem_.dtype))});
      gradients_ = bytes(plan->weight_bytes());
      workspace_ = bytes(plan->workspace_bytes());
      reserve_ = bytes(plan->reserve_bytes());
      if (context_.deterministic && results_of(*plan) != results_of(*plan)) return note(kNever, "other bits each time");
      const double seconds = seconds_of(context_, [&] { run(*plan); });
      return note(seconds, fmt::format("{:.0f} µs", 1e6 * seconds));
    } catch (const CudaError& error) {
      return note(kNever, error.what());
    }
  }
  /// "standard: 3120 µs; persistent: …", of all that were tried.
  const std::string& found() const { return found_; }

 private:
  Tensor bytes(std::size_t count) {
    return Tensor::empty(context_.allocator, {static_cast<std::int64_t>(count)}, DType::kU8);
  }
  // Between -1/8 and 1/8, no two neighbours alike.
  Tensor numbers(const Shape& shape) {
    std::vector<float> values(static_cast<std::size_t>(shape.count()));
    std::uint32_t state = 1;
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;  // Knuth's and Lewis' generator
      value = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-34f;
    }
    return upload_as(context_, values, problem_.dtype).reshaped(shape);
  }

  void run(const RnnPlan& plan) {
    const RnnArrays arrays = {.x = x_.raw(),
                              .y = y_.raw(),
                              .dy = dy_.raw(),
                              .dx = dx_.raw(),
                              .weights = weights_.raw(),
                              .workspace = workspace_.raw(),
                              .reserve = reserve_.raw()};
    plan.forward(handle_, arrays);
    plan.backward_data(handle_, arrays);
    check_cuda(cudaMemsetAsync(gradients_.raw(), 0, gradients_.bytes(), native(context_.stream)), "clearing gradients");
    plan.backward_weights(handle_, arrays, gradients_.raw());
  }

  std::vector<std::byte> results_of(const RnnPlan& plan) {
    run(plan);
    std::vector<std::byte> all;
    for (const Tensor* const one : {&y_, &dx_, &gradients_}) append_bytes(context_, *one, all);
    return all;
  }

  Context& context_;
  cudnnHandle_t handle_;
  RnnProblem problem_;
  Tensor x_, dy_, y_, dx_, weights_, gradients_, workspace_, reserve_;
  std::string found_;
};

class CudaRnn final : public RnnKernels {
 public:
  CudaRnn(Context& context, PointwiseKernels& pointwise)
      : context_(context), pointwise_(pointwise), operands_(context, pointwise) {}

  Tensor forward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                 const Tensor& y, const RnnState& to, bool keep) override {
    check(options, x, weights, y);
    if (x.size(0) == 0) return keep ? bytes(0) : Tensor();
    const bool lstm = options.cell == RnnCell::kLstm, ragged = options.lengths.defined();
    LOCKSTEP_ASSERT(!to.c.defined() || !ragged, "cells of sequences of different lengths");
    const OpProfileScope scope(context_, name_of(options.cell), {&x, &y, &from.h, &from.c, &to.h, &to.c},
                               flops_of(options, x, y));
    const Held& held = find(options.cell, x, y, keep);
    const DType dtype = held.dtype;
    const Tensor kept = keep ? bytes(held.plan.reserve_bytes()) : Tensor();
    const Tensor space = gather(held, weights, keep).memory;
    const Tensor workspace = bytes(held.plan.workspace_bytes());
    const Tensor given_x = operands_.readable(in_order(options, x), dtype), h_first = operands_.readable(from.h, dtype);
    const Tensor c_first = lstm ? operands_.readable(from.c, dtype) : Tensor(),
                 c_last = lstm ? operands_.writable(to.c, dtype) : Tensor();
    const Tensor made_y = is_moved(options) ? empty(y.shape(), dtype) : operands_.writable(y, dtype);
    const Tensor h_last = ragged ? Tensor() : operands_.writable(to.h, dtype);
    held.plan.forward(handle(), {.x = given_x.raw(),
                                 .y = made_y.raw(),
                                 .h_first = h_first.raw(),
                                 .c_first = c_first.raw(),
                                 .h_last = h_last.raw(),
                                 .c_last = c_last.raw(),
                                 .weights = space.raw(),
                                 .workspace = workspace.raw(),
                                 .reserve = kept.raw()});
    if (is_moved(options))
      hand_over_steps(options, made_y, y);
    else
      operands_.hand_over(made_y, y);
    if (ragged && to.h.defined()) {
      // Its own type's, which rounding leaves as it is: y has been rounded to it.
      const Tensor steps = in_order(options, y);
      take_last_steps(context_, steps, options.lengths, from.h, to.h);
    } else if (h_last.defined()) {
      operands_.hand_over(h_last, to.h);
    }
    if (c_last.defined()) operands_.hand_over(c_last, to.c);
    return kept;
  }

  void backward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                const Tensor& y, const Tensor& kept, const Tensor& dy, const RnnGradients& gradients, const Tensor& dx,
                FunctionRef<void()> gradients_done) override {
    check(options, x, weights, y);
    if (x.size(0) == 0) {
      clear(gradients);
      return gradients_done();
    }
    const OpProfileScope scope(context_, "a recurrent layer's backward", {&x, &y, &dy, &dx},
                               2.0 * flops_of(options, x, y));
    const Held& held = find(options.cell, x, y, true);
    const DType dtype = held.dtype;
    const Tensor space = gather(held, weights, false).memory;
    const Tensor workspace = bytes(held.plan.workspace_bytes());
    const Tensor given_x = operands_.readable(in_order(options, x), dtype),
                 given_y = operands_.readable(in_order(options, y), dtype);
    const Tensor given_dy = operands_.readable(in_order(options, dy), dtype),
                 h_first = operands_.readable(from.h, dtype);
    const Tensor c_first = options.cell == RnnCell::kLstm ? operands_.readable(from.c, dtype) : Tensor();
    // What backward_weights() needs comes with it, so it is computed where nobody wants it, too.
    const Tensor made_dx = dx.defined() && !is_moved(options) ? operands_.writable(dx, dtype) : empty(x.shape(), dtype);
    const RnnArrays arrays = {.x = given_x.raw(),
                              .y = given_y.raw(),
                              .h_first = h_first.raw(),
                              .c_first = c_first.raw(),
                              .dy = given_dy.raw(),
                              .dx = made_dx.raw(),
                              .weights = space.raw(),
                              .workspace = workspace.raw(),
                              .reserve = kept.raw()};
    held.plan.backward_data(handle(), arrays);
    if (gradients.w_ih.defined() || gradients.w_hh.defined() || gradients.b_ih.defined() || gradients.b_hh.defined()) {
      // cuDNN adds to what is there.
      const Tensor made = bytes(held.plan.weight_bytes());
      check_cuda(cudaMemsetAsync(made.raw(), 0, made.bytes(), native(context_.stream)), "clearing gradients");
      held.plan.backward_weights(handle(), arrays, made.raw());
      scatter(held, made, gradients);
    }
    gradients_done();
    if (!dx.defined()) return;
    if (is_moved(options))
      hand_over_steps(options, made_dx, dx);
    else
      operands_.hand_over(made_dx, dx);
  }

  // cuDNN has c after the last step alone, which is padding of a shorter sequence.
  bool hands_out_cells_of_lengths() const override { return false; }

 private:
  struct Held {
    RnnPlan plan;
    DType dtype;  // that cuDNN computes in: f32 also for bf16, where it does not know that
    std::size_t algorithm = 0;
  };

  static std::array<const Tensor*, 4> all_of(const RnnWeights& weights) {
    return {&weights.w_ih, &weights.w_hh, &weights.b_ih, &weights.b_hh};
  }
  static std::array<const Tensor*, 4> all_of(const RnnGradients& gradients) {
    return {&gradients.w_ih, &gradients.w_hh, &gradients.b_ih, &gradients.b_hh};
  }

  static double flops_of(const RnnOptions& options, const Tensor& x, const Tensor& y) {
    return 2.0 * static_cast<double>(gates_of(options.cell) * y.count() * (x.size(2) + y.size(2)));
  }

  static void check(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const Tensor& y) {
    const std::int64_t inputs = x.size(2), width = y.size(2), gates = gates_of(options.cell) * width;
    LOCKSTEP_ASSERT(weights.w_ih.shape() == Shape({gates, inputs}) && weights.w_hh.shape() == Shape({gates, width}) &&
                        y.size(0) == x.size(0) && y.size(1) == x.size(1),
                    "{} and {} of {} and {}", to_string(weights.w_ih.shape()), to_string(weights.w_hh.shape()),
                    to_string(x.shape()), to_string(y.shape()));
    for (const Tensor* const weight : all_of(weights))
      LOCKSTEP_ASSERT((!weight->defined() || weight->dtype() == x.dtype()) && y.dtype() == x.dtype(), "{} and {}",
                      name_of(weight->dtype()), name_of(x.dtype()));
  }

  Tensor empty(const Shape& shape, DType dtype) { return Tensor::empty(context_.allocator, shape, dtype); }
  Tensor bytes(std::size_t count) { return empty({static_cast<std::int64_t>(count)}, DType::kU8); }

  // Whether cuDNN, which knows sequences of one length in one direction, gets the steps elsewhere than they are
  // (rnn_steps.h).
  static bool is_moved(const RnnOptions& options) { return options.reverse || options.lengths.defined(); }
  // The steps of `tensor` in the order in which cuDNN takes them.
  Tensor in_order(const RnnOptions& options, const Tensor& tensor) {
    if (!is_moved(options)) return tensor;
    const Tensor made = empty(tensor.shape(), tensor.dtype());
    take_steps(context_, tensor, options.lengths, options.reverse, made);
    return made;
  }
  // And back.
  void hand_over_steps(const RnnOptions& options, const Tensor& made, const Tensor& to) {
    const Tensor converted = made.dtype() == to.dtype() ? made : empty(made.shape(), to.dtype());
    operands_.hand_over(made, converted);
    take_steps(context_, converted, options.lengths, options.reverse, to);
  }

  cudnnHandle_t handle() {
    if (!handle_) {
      handle_.emplace(make_cudnn_rnn_handle(context_.stream));
      ++context_.primitives_created;
    }
    return handle_->get();
  }

  const Held& find(RnnCell cell, const Tensor& x, const Tensor& y, bool training) {
    RnnProblem problem = {.cell = cell,
                          .dtype = x.dtype(),
                          .tf32 = context_.tf32,
                          .training = training,
                          .samples = x.size(0),
                          .steps = x.size(1),
                          .inputs = x.size(2),
                          .width = y.size(2)};
    const PlanKey key = problem.key();
    const auto at = plans_.find(key);
    if (at != plans_.end()) return at->second;
    auto made = RnnPlan::make(handle(), problem, context_.allocator);
    const std::string operation = fmt::format("{}, {}", name_of(cell), name_of(problem.dtype));
    if (made) {
      context_.engines.use(operation, "cuDNN");
    } else {
      context_.engines.fall_back(operation, "cuDNN in f32", "this version of cuDNN has none in bf16");
      problem.dtype = DType::kF32;
      made = RnnPlan::make(handle(), problem, context_.allocator);
    }
    LOCKSTEP_ASSERT(made.has_value(), "{}", problem.describe());
    std::string tried;
    std::size_t algorithm = choose_algorithm(problem, tried);
    if (algorithm > 0) {
      auto chosen = RnnPlan::make(handle(), problem, context_.allocator, kRnnAlgorithms[algorithm]);
      if (chosen)
        made = std::move(chosen);
      else  // noted for another GPU of this name
        algorithm = 0;
    }
    if (!tried.empty())
      context_.engines.use(operation, fmt::format("cuDNN {} ({})", kRnnAlgorithms[algorithm].name, tried));
    ++context_.primitives_created;
    return plans_.emplace(key, Held{std::move(*made), problem.dtype, algorithm}).first->second;
  }

  std::size_t choose_algorithm(const RnnProblem& problem, std::string& tried) {
    if (context_.choices == nullptr || !problem.training) return 0;
    std::vector<std::string> names;
    for (const RnnAlgorithm& algorithm : kRnnAlgorithms) names.emplace_back(algorithm.name);
    std::optional<RnnTrial> trial;
    const std::string text = fmt::format("cuDNN {}: {}{}{}", cudnn_rnn().version(), problem.describe(),
                                         problem.tf32 ? ", tf32" : "", context_.deterministic ? "" : ", any order");
    const std::size_t chosen = choose_kernel(context_, text, names, [&](std::size_t i) {
      if (!trial) trial.emplace(context_, handle(), problem);
      return trial->seconds(kRnnAlgorithms[i]);
    });
    if (trial) tried = trial->found();
    return chosen;
  }

  static Tensor piece_of(const Tensor& space, const WeightPiece& piece, DType dtype) {
    return Tensor::view_of(static_cast<std::byte*>(space.raw()) + piece.offset, {piece.count}, dtype);
  }
  static Tensor piece_of(const Tensor& whole, const WeightPiece& piece) {
    return whole.reshaped({whole.count()}).slice(piece.first, piece.first + piece.count);
  }

  const WeightSpace& gather(const Held& held, const RnnWeights& weights, bool always) {
    PlanKey key{};
    key[0] = reinterpret_cast<std::intptr_t>(weights.w_hh.raw());
    key[1] = weights.w_ih.size(1);
    key[2] = weights.w_hh.size(1);
    key[3] = weights.w_hh.size(0);
    key[4] = weights.b_ih.defined() ? 1 : 0;
    key[5] = static_cast<std::int64_t>(held.dtype);
    key[6] = static_cast<std::int64_t>(held.algorithm);
    WeightSpace& space = spaces_[key];
    if (!space.memory.defined()) {
      space.memory = bytes(held.plan.weight_bytes());
      // What lies between the parameters is read, and may be multiplied by 0: it must be numbers.
      check_cuda(cudaMemsetAsync(space.memory.raw(), 0, space.memory.bytes(), native(context_.stream)),
                 "clearing weights");
      always = true;
    }
    LOCKSTEP_ASSERT(space.memory.bytes() == held.plan.weight_bytes(), "a weight space of {} bytes for {}",
                    space.memory.bytes(), held.plan.weight_bytes());
    if (!always && space.versions == weights.versions) return space;
    for (const WeightPiece& piece : held.plan.pieces())
      if (const Tensor& from = *all_of(weights)[piece.parameter]; from.defined())
        pointwise_.cast(piece_of(from, piece), piece_of(space.memory, piece, held.dtype));
    space.versions = weights.versions;
    return space;
  }

  void scatter(const Held& held, const Tensor& space, const RnnGradients& gradients) {
    for (const WeightPiece& piece : held.plan.pieces()) {
      const Tensor& to = *all_of(gradients)[piece.parameter];
      if (!to.defined()) continue;
      const Tensor made = piece_of(space, piece, held.dtype);
      if (gradients.accumulate[piece.parameter])
        pointwise_.add_to(made, 1.0f, piece_of(to, piece));
      else
        pointwise_.cast(made, piece_of(to, piece));
    }
  }

  void clear(const RnnGradients& gradients) {
    for (std::size_t i = 0; i < 4; ++i)
      if (const Tensor& to = *all_of(gradients)[i]; to.defined() && !gradients.accumulate[i]) pointwise_.fill(to, 0.0f);
  }

  Context& context_;
  PointwiseKernels& pointwise_;
  CudnnOperands operands_;
  std::optional<CudnnOwner<cudnnHandle_t>> handle_;
  PlanMap<Held> plans_;
  PlanMap<WeightSpace> spaces_;
};

}  // namespace

std::unique_ptr<RnnKernels> make_rnn_kernels(Context& context, PointwiseKernels& pointwise) {
  return std::make_unique<CudaRnn>(context, pointwise);
}

}  // namespace lockstep::nn::cuda
