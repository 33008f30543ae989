#include "lockstep/nn/ops/conv.h"

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "nn/ops/cuda/cudnn.h"
#include "nn/ops/cuda/cudnn_operands.h"
#include "nn/ops/cuda/epilogue_probes.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/own_kernels.h"
#include "nn/ops/cuda/plan_choices.h"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn::cuda {
namespace {

using What = ConvProblem::What;

class CudaConv final : public ConvKernels {
 public:
  CudaConv(Context& context, PointwiseKernels& pointwise, LinearKernels& linear)
      : context_(context), pointwise_(pointwise), linear_(linear), operands_(context, pointwise) {}

  void forward(const Tensor& x, const Tensor& w, std::uint64_t, const Tensor& b, const Window& window,
               Epilogue epilogue, const Tensor& y) override {
    const OpProfileScope scope(context_, "convolution", {&x, &w, &b, &y}, flops_of(y, w));
    if (y.count() == 0) return;
    ConvProblem problem = problem_of(What::kForward, x, w, y, window);
    problem.relu = epilogue == Epilogue::kRelu;
    if (b.defined()) {
      LOCKSTEP_ASSERT(b.dtype() == x.dtype(), "{} and {}", name_of(b.dtype()), name_of(x.dtype()));
      problem.bias = true;
    }
    const Tensor given_x = operands_.readable(x), given_w = operands_.readable(w), given_b = operands_.readable(b);
    const Tensor made = operands_.writable(y, y.dtype());
    const ConvArrays arrays = {given_x.raw(), given_w.raw(), made.raw(), given_b.raw()};
    const Held& held = find(plans_, problem.key(), [&] { return make_forward(problem, made, arrays); });
    run(held.plan, arrays);
    if (held.bias_apart) add_to_rows(context_, given_b, made);
    if (held.relu_apart) pointwise_.unary(UnaryOp::kRelu, made, made);
    operands_.hand_over(made, y);
  }

  void backward_input(const Tensor& dy, const Tensor& w, std::uint64_t, const Window& window,
                      const Tensor& dx) override {
    const OpProfileScope scope(context_, "convolution's backward to its input", {&dy, &w, &dx}, flops_of(dy, w));
    if (dx.count() == 0) return;
    const ConvProblem problem = problem_of(What::kBackwardInput, dx, w, dy, window);
    const Tensor given_w = operands_.readable(w), given_dy = operands_.readable(dy);
    const Tensor made = operands_.writable(dx, dx.dtype());
    const ConvArrays arrays = {made.raw(), given_w.raw(), given_dy.raw()};
    run(find(plans_, problem.key(), [&] { return Held{plan(problem, arrays)}; }).plan, arrays);
    operands_.hand_over(made, dx);
  }

  // Note [Weight gradients of cuDNN]
  // They overwrite, and have the type of the activations: so those of bf16 go to a piece of memory first and are added
  // up, or copied, from there, and those of f32 where they are to be added to something, or misaligned.
  void backward_weight(const Tensor& x, const Tensor& dy, const Window& window, bool accumulate_w, const Tensor& dw,
                       bool accumulate_b, const Tensor& db) override {
    const OpProfileScope scope(context_, "convolution's backward to its weight", {&x, &dy, &dw, &db}, flops_of(dy, dw));
    if (dy.count() == 0) {
      if (!accumulate_w) pointwise_.fill(dw, 0.0f);
      if (db.defined() && !accumulate_b) pointwise_.fill(db, 0.0f);
      return;
    }
    const Tensor made =
        accumulate_w ? Tensor::empty(context_.allocator, dw.shape(), x.dtype()) : operands_.writable(dw, x.dtype());
    const Gradients call = {problem_of(What::kBackwardWeight, x, made, dy, window),
                            operands_.readable(x),
                            operands_.readable(dy),
                            made,
                            accumulate_w,
                            dw,
                            accumulate_b,
                            db};
    PlanKey key = call.problem.key();
    key.back() = db.defined() ? 1 : 0;
    run(find(gradient_plans_, key, [&] { return make_gradients(call); }), call);
  }

 private:
  struct Held {
    ConvPlan plan;
    bool bias_apart = false, relu_apart = false;  // in kernels of ours after it
  };

  // Of a convolution whose result, or its gradient, is `y`, with a weight like `w`.
  static double flops_of(const Tensor& y, const Tensor& w) {
    return 2.0 * static_cast<double>(y.count()) * static_cast<double>(w.count()) / static_cast<double>(w.size(0));
  }

  // A call of backward_weight(). cuDNN writes `made`.
  struct Gradients {
    ConvProblem problem;
    Tensor x, dy, made;
    bool accumulate_w;
    Tensor dw;
    bool accumulate_b;
    Tensor db;

    ConvArrays arrays() const { return {x.raw(), made.raw(), dy.raw()}; }
  };
  // Without a plan of cuDNN's it is a kernel of ours (Note [Few channels]).
  using GradientsPlan = std::optional<ConvPlan>;

  // Of a kernel that is preferred to cuDNN's favourite.
  static constexpr std::size_t kMostWorkspaceBytes = std::size_t{1} << 30;

  ConvProblem problem_of(What what, const Tensor& x, const Tensor& w, const Tensor& y, const Window& window) const {
    LOCKSTEP_ASSERT(x.dtype() == y.dtype() && w.dtype() == y.dtype(), "{}, {} and {}", name_of(x.dtype()),
                    name_of(w.dtype()), name_of(y.dtype()));
    const std::int64_t groups = groups_of(x.shape(), w.shape());
    LOCKSTEP_ASSERT(x.size(3) == groups * w.size(3) && y.size(3) == w.size(0) && w.size(0) % groups == 0,
                    "input {}, weight {}, output {}", to_string(x.shape()), to_string(w.shape()), to_string(y.shape()));
    ConvProblem problem;
    problem.what = what;
    problem.dtype = x.dtype();
    problem.x = x.shape();
    problem.w = w.shape();
    problem.y = y.shape();
    problem.window = window;
    problem.tf32 = context_.tf32;
    return problem;
  }

  ConvPlan plan(const ConvProblem& problem, const ConvArrays& arrays) {
    if (!cudnn_) {
      cudnn_.emplace(context_.stream);
      ++context_.primitives_created;
    }
    std::optional<ConvPlan> made;
    if (context_.choices != nullptr) made = fastest(problem, arrays);
    if (!made) made = cudnn_->plan(problem);
    ++context_.primitives_created;
    return std::move(*made);
  }

  // See Note [Autotuning]. What the kernels write is overwritten by the convolution itself. Nothing where the kernel
  // that is noted cannot be built.
  std::optional<ConvPlan> fastest(const ConvProblem& problem, const ConvArrays& arrays) {
    ConvKernelList kernels = cudnn_->kernels(problem, PlanChoices::kCandidates);
    if (kernels.names().empty()) return std::nullopt;
    const std::string key = fmt::format("cuDNN {}: convolution{}", Cudnn::version(), text_of(problem));
    const auto seconds = [&](std::size_t kernel) {
      constexpr double kNever = std::numeric_limits<double>::infinity();
      try {
        const ConvPlan timed = kernels.build(kernel);
        if (timed.workspace_bytes() > kMostWorkspaceBytes) return kNever;
        return seconds_of(context_, [&] { run(timed, arrays); });
      } catch (const OutOfMemoryError&) {
        return kNever;
      } catch (const CudaError&) {  // this GPU does not take it
        return kNever;
      }
    };
    const std::size_t best = choose_kernel(context_, key, kernels.names(), seconds);
    try {
      return kernels.build(best);
    } catch (const CudaError&) {
      return std::nullopt;
    }
  }

  void run(const GradientsPlan& made, const Gradients& call) {
    if (!made)
      return few_channel_gradients(context_, call.problem, call.x, call.dy, call.accumulate_w, call.dw,
                                   call.accumulate_b, call.db);
    run(*made, call.arrays());
    if (call.accumulate_w)
      pointwise_.add_to(call.made, 1.0f, call.dw);
    else
      operands_.hand_over(call.made, call.dw);
    if (!call.db.defined()) return;
    const std::int64_t channels = call.dy.size(3);
    linear_.backward_bias(call.dy.reshaped({call.dy.count() / channels, channels}), call.accumulate_b, call.db);
  }

  // Our kernel takes the time of reading dy once for each pass: with one pass hardly anything can be faster, so it is
  // the guess where nothing is timed, and cuDNN is where there are more.
  GradientsPlan make_gradients(const Gradients& call) {
    const ConvProblem& problem = call.problem;
    const int passes = few_channel_passes(problem);
    if (passes == 0) return plan(problem, call.arrays());
    const auto note = [&](GradientsPlan made) {
      context_.engines.use(fmt::format("gradient of a convolution's weight with {} input channel{}, {}", problem.x[3],
                                       problem.x[3] == 1 ? "" : "s", name_of(problem.dtype)),
                           made ? "cuDNN " + made->describe() : "lockstep");
      return made;
    };
    if (context_.choices == nullptr && passes == 1) return note(std::nullopt);
    // Its own kernel is chosen before: choices are made one at a time.
    std::string why;
    GradientsPlan library = try_to_plan(problem, call.arrays(), why);
    if (!library || context_.choices == nullptr) return note(std::move(library));
    const std::vector<std::string> names =
        passes == 1 ? std::vector<std::string>{"lockstep", "cuDNN"} : std::vector<std::string>{"cuDNN", "lockstep"};
    const GradientsPlan ours;
    const std::string text = fmt::format("cuDNN {}: few channels{}{}", Cudnn::version(), text_of(problem),
                                         call.db.defined() ? " and bias" : "");
    const std::size_t best = choose_kernel(context_, text, names, [&](std::size_t i) {
      Gradients timed = call;
      if (call.accumulate_w) timed.dw = Tensor::empty(context_.allocator, call.dw.shape());
      if (call.accumulate_b && call.db.defined()) timed.db = Tensor::empty(context_.allocator, call.db.shape());
      return seconds_of(context_, [&] { run(names[i] == "cuDNN" ? std::as_const(library) : ours, timed); });
    });
    return note(names[best] == "cuDNN" ? std::move(library) : std::nullopt);
  }

  Held make_forward(ConvProblem problem, const Tensor& y, ConvArrays arrays) {
    const bool bias = problem.bias, relu = problem.relu;
    problem.relu = false;
    if (relu && bias) {  // see Note [Probing ReLU]; a ReLU alone could not be tried
      ConvProblem fused = problem;
      fused.relu = true;
      std::string why;
      auto made = try_to_plan(fused, arrays, why);
      if (made && keeps_non_finite(*made, y, arrays)) {
        context_.engines.use(operation_of(problem, "bias and ReLU"), "cuDNN " + made->describe());
        return {std::move(*made)};
      }
      context_.engines.fall_back(operation_of(problem, "bias and ReLU"), "cuDNN and a kernel of ReLU after it",
                                 made ? "cuDNN's ReLU loses NaN or infinity" : why);
    }
    if (bias) {
      std::string why;
      if (auto made = try_to_plan(problem, arrays, why)) {
        if (!relu) context_.engines.use(operation_of(problem, "bias"), "cuDNN " + made->describe());
        return {std::move(*made), false, relu};
      }
      context_.engines.fall_back(operation_of(problem, "bias"), "cuDNN and a kernel of the bias after it", why);
    }
    problem.bias = false;
    ConvPlan made = plan(problem, arrays);
    if (!bias && !relu) context_.engines.use(operation_of(problem, {}), "cuDNN " + made.describe());
    return {std::move(made), bias, relu};
  }

  static std::string text_of(const ConvProblem& problem) {
    std::string text;
    for (const std::int64_t part : problem.key()) text += fmt::format(" {}", part);
    return text;
  }

  static std::string operation_of(const ConvProblem& problem, const std::string& fused) {
    return fmt::format("convolution{}, {}", fused.empty() ? "" : " with " + fused, name_of(problem.dtype));
  }

  // What is fused may be more than cuDNN has a kernel for; then `why`.
  std::optional<ConvPlan> try_to_plan(const ConvProblem& problem, const ConvArrays& arrays, std::string& why) {
    try {
      return plan(problem, arrays);
    } catch (const CudaError& error) {
      why = error.what();
      return std::nullopt;
    }
  }

  bool keeps_non_finite(const ConvPlan& made, const Tensor& y, ConvArrays arrays) {
    return relu_keeps_non_finite(context_, y.size(3), y, [&](const Tensor& bias) {
      arrays.b = bias.raw();
      run(made, arrays);
    });
  }

  void run(const ConvPlan& made, const ConvArrays& arrays) {
    const std::size_t bytes = made.workspace_bytes();
    const Tensor workspace =
        bytes > 0 ? Tensor::empty(context_.allocator, {static_cast<std::int64_t>(bytes)}, DType::kU8) : Tensor();
    made.run(*cudnn_, arrays, workspace.raw());
  }

  Context& context_;
  PointwiseKernels& pointwise_;
  LinearKernels& linear_;
  CudnnOperands operands_;
  std::optional<Cudnn> cudnn_;
  PlanMap<Held> plans_;
  PlanMap<GradientsPlan> gradient_plans_;
};

}  // namespace

std::unique_ptr<ConvKernels> make_conv_kernels(Context& context, PointwiseKernels& pointwise, LinearKernels& linear) {
  return std::make_unique<CudaConv>(context, pointwise, linear);
}

}  // namespace lockstep::nn::cuda
