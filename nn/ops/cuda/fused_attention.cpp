#include "nn/ops/cuda/fused_attention.h"

#include <initializer_list>
#include <optional>
#include <set>
#include <vector>

#include "base/cuda/runtime.h"
#include "nn/ops/cuda/attention_tiled.h"
#include "nn/ops/cuda/cudnn.h"
#include "nn/ops/cuda/cudnn_operands.h"
#include "nn/ops/cuda/memory.h"

namespace lockstep::nn::cuda {
namespace {

constexpr std::int64_t kMostWidth = 256;
constexpr const char* kOwnKernels = "lockstep's own kernels";

const char* operation_name(AttentionProblem::What what, DType dtype) {
  const bool forward = what == AttentionProblem::What::kForward;
  if (dtype == DType::kF16) return forward ? "attention, f16" : "attention backward, f16";
  return forward ? "attention, bf16" : "attention backward, bf16";
}

// Of samples `begin` to `end`, each of them 4 bytes: a copy where they are misaligned.
Tensor lengths_of(Context& context, const AttentionOptions& options, std::int64_t begin, std::int64_t end) {
  if (!options.lengths.defined()) return {};
  const Tensor part = options.lengths.slice(begin, end);
  if (lies_well(part.raw())) return part;
  const Tensor made = Tensor::empty(context.allocator, part.shape(), part.dtype());
  check_cuda(cudaMemcpyAsync(made.raw(), part.raw(), part.bytes(), cudaMemcpyDeviceToDevice, native(context.stream)),
             "copying lengths");
  return made;
}

}  // namespace

struct FusedAttention::Held {
  std::optional<Cudnn> cudnn;
  PlanMap<std::optional<AttentionPlan>> plans;  // nothing: cuDNN has none
  std::set<PlanKey> tried;                      // those with a note that have left the same bits twice

  // nullptr where there is none. Arrays that lie badly have none.
  AttentionPlan* find(Context& context, const AttentionProblem& problem, std::initializer_list<const Tensor*> arrays) {
    const char* const operation = operation_name(problem.what, problem.dtype);
    const auto fall_back = [&](std::string_view why) -> AttentionPlan* {
      context.engines.fall_back(operation, kOwnKernels, why);
      return nullptr;
    };
    static_assert(kMostWidth == 256 && kCudnnAlignment == 16);
    if (problem.width % 8 != 0 || problem.width > kMostWidth)
      return fall_back("cuDNN takes heads of a multiple of 8 features, up to 256");
    for (const Tensor* const array : arrays)
      if (!lies_well(array->raw_rows())) return fall_back("an array does not lie at a multiple of 16 bytes");
    const PlanKey key = problem.key();
    auto at = plans.find(key);
    if (at == plans.end()) {
      at = plans.emplace(key, std::nullopt).first;
      try {
        if (!cudnn) {
          cudnn.emplace(context.stream);
          ++context.primitives_created;
        }
        at->second = cudnn->plan(problem);
        ++context.primitives_created;
        context.engines.use(operation, "cuDNN " + at->second->describe());
      } catch (const CudaError& error) {
        const bool exact = problem.what == AttentionProblem::What::kBackward && problem.deterministic;
        return fall_back(std::string(error.what()) + (exact ? "; --deterministic no may have one" : ""));
      }
    }
    return at->second ? &*at->second : nullptr;
  }

  // Whether a backward that cuDNN notes as not deterministic, and that was asked to be, leaves the same bits twice. It
  // is tried once, on the operands that it is for, in the first step, which is never captured; that waits for the GPU.
  // Sums whose order the hardware decides differ nearly always in one element of a batch at least.
  bool repeats(Context& context, AttentionPlan& plan, const AttentionArrays& arrays, const AttentionInputs& dx) {
    const auto gradients = [&] {
      run(context, plan, arrays);
      std::vector<std::byte> bytes;
      for (const Tensor* const one : {&dx.q, &dx.k, &dx.v}) {
        const Tensor whole = Tensor::empty(context.allocator, one->shape(), one->dtype());
        copy_rows(context, one->dtype(), one->size(0), one->size(1), one->size(2),
                  {one->raw_rows(), one->size(1) * one->pitch(), one->pitch()},
                  {whole.raw(), one->size(1) * one->size(2), one->size(2)});
        append_bytes(context, whole, bytes);
      }
      return bytes;
    };
    return gradients() == gradients();
  }

  void run(Context& context, AttentionPlan& plan, const AttentionArrays& arrays) {
    const std::size_t bytes = plan.workspace_bytes();
    const Tensor workspace =
        bytes > 0 ? Tensor::empty(context.allocator, {static_cast<std::int64_t>(bytes)}, DType::kU8) : Tensor();
    plan.run(*cudnn, arrays, workspace.raw());
  }
};

FusedAttention::FusedAttention(Context& context) : context_(context), held_(std::make_unique<Held>()) {}
FusedAttention::~FusedAttention() = default;

bool FusedAttention::forward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options,
                             const Tensor& y, const Tensor& log_sums) {
  if (!is_half(y.dtype())) return false;  // of f32 there is no choice
  AttentionPlan* const plan = held_->find(context_,
                                          {.what = AttentionProblem::What::kForward,
                                           .samples = y.size(0),
                                           .tokens = y.size(1),
                                           .heads = heads,
                                           .width = y.size(2) / heads,
                                           .pitch = x.q.pitch(),
                                           .causal = options.causal,
                                           .padded = options.lengths.defined(),
                                           .dtype = y.dtype()},
                                          {&x.q, &x.k, &x.v, &y, &log_sums});
  if (plan == nullptr) return false;
  const Tensor lengths = lengths_of(context_, options, 0, y.size(0));
  held_->run(context_, *plan,
             {.q = x.q.raw_rows(),
              .k = x.k.raw_rows(),
              .v = x.v.raw_rows(),
              .y = y.raw(),
              .log_sums = log_sums.raw(),
              .lengths = lengths.raw()});
  return true;
}

bool FusedAttention::backward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options,
                              const Tensor& y, const Tensor& log_sums, const Tensor& dy, const AttentionInputs& dx) {
  if (!is_half(y.dtype())) return false;
  const std::int64_t samples = y.size(0), tokens = y.size(1);
  // The other algorithm's workspace is small.
  const std::int64_t at_once = context_.deterministic ? samples_at_once(samples, heads, tokens) : samples;
  const auto problem_of = [&](std::int64_t count) {
    return AttentionProblem{.what = AttentionProblem::What::kBackward,
                            .samples = count,
                            .tokens = tokens,
                            .heads = heads,
                            .width = y.size(2) / heads,
                            .pitch = x.q.pitch(),
                            .causal = options.causal,
                            .padded = options.lengths.defined(),
                            .deterministic = context_.deterministic,
                            .dtype = y.dtype()};
  };
  const auto plan_of = [&](std::int64_t count) {
    return held_->find(context_, problem_of(count), {&x.q, &x.k, &x.v, &y, &log_sums, &dy, &dx.q, &dx.k, &dx.v});
  };
  const bool pieces_lie_well = heads * tokens * static_cast<std::int64_t>(sizeof(float)) % kCudnnAlignment == 0;
  if (at_once < samples && !pieces_lie_well) {
    context_.engines.fall_back(operation_name(AttentionProblem::What::kBackward, y.dtype()), kOwnKernels,
                               "parts of the batch do not lie at a multiple of 16 bytes");
    return false;
  }
  // All of it or nothing: also what is left for the last piece.
  if (plan_of(at_once) == nullptr || (samples % at_once != 0 && plan_of(samples % at_once) == nullptr)) return false;
  const auto inputs_of = [](const AttentionInputs& all, std::int64_t begin, std::int64_t end) {
    return AttentionInputs(all.q.slice(begin, end), all.k.slice(begin, end), all.v.slice(begin, end));
  };
  const auto arrays_of = [&](std::int64_t begin, std::int64_t end, const Tensor& lengths) {
    const AttentionInputs of_x = inputs_of(x, begin, end), of_dx = inputs_of(dx, begin, end);
    return AttentionArrays{.q = of_x.q.raw_rows(),
                           .k = of_x.k.raw_rows(),
                           .v = of_x.v.raw_rows(),
                           .y = y.slice(begin, end).raw(),
                           .log_sums = log_sums.slice(begin, end).raw(),
                           .dy = dy.slice(begin, end).raw(),
                           .dq = of_dx.q.raw_rows(),
                           .dk = of_dx.k.raw_rows(),
                           .dv = of_dx.v.raw_rows(),
                           .lengths = lengths.raw()};
  };
  for (const std::int64_t count : {at_once, samples % at_once}) {
    if (count == 0 || !context_.deterministic || !plan_of(count)->is_noted_nondeterministic()) continue;
    const PlanKey key = problem_of(count).key();
    if (held_->tried.contains(key)) continue;
    const Tensor lengths = lengths_of(context_, options, 0, count);
    if (!held_->repeats(context_, *plan_of(count), arrays_of(0, count, lengths), inputs_of(dx, 0, count))) {
      held_->plans.at(key).reset();
      context_.engines.fall_back(operation_name(AttentionProblem::What::kBackward, y.dtype()), kOwnKernels,
                                 "cuDNN's kernel for this GPU is not deterministic (--deterministic no takes it)");
      return false;
    }
    held_->tried.insert(key);
  }
  for (std::int64_t begin = 0; begin < samples; begin += at_once) {
    const std::int64_t end = at_most(begin + at_once, samples);
    const Tensor lengths = lengths_of(context_, options, begin, end);
    held_->run(context_, *plan_of(end - begin), arrays_of(begin, end, lengths));
  }
  return true;
}

}  // namespace lockstep::nn::cuda
