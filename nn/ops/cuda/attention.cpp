#include "lockstep/nn/ops/attention.h"

#include <cstddef>
#include <initializer_list>

#include "base/error.h"
#include "nn/ops/cuda/attention_tiled.h"
#include "nn/ops/cuda/fused_attention.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/work.h"

namespace lockstep::nn::cuda {
namespace {

// In bf16 cuDNN's kernels, on matrix units; for what it has none for, and in f32, ours.
class CudaAttention final : public AttentionKernels {
 public:
  explicit CudaAttention(Context& context) : context_(context), fused_(context) {}

  // What cuDNN drops is not a function of the sample: with dropout the kernels are ours.
  void forward(const Tensor& qkv, std::int64_t heads, const AttentionDropout& drop, const Tensor& y,
               const Tensor& log_sums) override {
    const Work work(context_, "attention", {&qkv, &y, &log_sums}, 2.0 * static_cast<double>(y.count() * y.size(1)));
    check(qkv, heads, {&y});
    if (qkv.count() == 0 || (drop.p == 0 && fused_.forward(qkv, heads, y, log_sums))) return;
    const AttentionSizes sizes = sizes_of(qkv, heads);
    attend_tiled(context_, sizes, qkv.dtype(), part(qkv, 3, 0), part(qkv, 3, 1), part(qkv, 3, 2), part(y, 1, 0),
                 log_sums.f32(), mask_of(drop));
  }

  void backward(const Tensor& qkv, std::int64_t heads, const AttentionDropout& drop, const Tensor& y,
                const Tensor& log_sums, const Tensor& dy, const Tensor& dqkv) override {
    const Work work(context_, "attention's backward", {&qkv, &y, &log_sums, &dy, &dqkv},
                    5.0 * static_cast<double>(y.count() * y.size(1)));
    check(qkv, heads, {&y, &dy, &dqkv});
    if (qkv.count() == 0 || (drop.p == 0 && fused_.backward(qkv, heads, y, log_sums, dy, dqkv))) return;
    const Tensor means = Tensor::empty(context_.allocator, log_sums.shape());
    differentiate_tiled(context_, sizes_of(qkv, heads), qkv.dtype(),
                        {.q = part(qkv, 3, 0),
                         .k = part(qkv, 3, 1),
                         .v = part(qkv, 3, 2),
                         .y = part(y, 1, 0),
                         .dy = part(dy, 1, 0),
                         .log_sums = log_sums.f32(),
                         .means = means.f32(),
                         .dq = part(dqkv, 3, 0),
                         .dk = part(dqkv, 3, 1),
                         .dv = part(dqkv, 3, 2)},
                        mask_of(drop));
  }

  void extend(const Tensor& qkv, std::int64_t heads, std::int64_t past, const Tensor& cache, const Tensor& y) override {
    const Work work(context_, "attention with a cache", {&qkv, &cache, &y});
    check(qkv, heads, {&y, &cache});
    AttentionSizes sizes = sizes_of(qkv, heads);
    sizes.past = past;
    LOCKSTEP_ASSERT(past >= 0 && sizes.keys() <= cache.size(1), "{} tokens after {} in a cache for {}", sizes.queries,
                    past, cache.size(1));
    if (qkv.count() == 0) return;
    const HeadRows keys = part(cache, 2, 0), values = part(cache, 2, 1);
    HeadRows added = keys;
    added.data =
        static_cast<std::byte*>(keys.data) + static_cast<std::size_t>(past * keys.row_stride) * size_of(cache.dtype());
    copy_rows(context_, qkv.dtype(), sizes.samples, sizes.queries, cache.size(2), part(qkv, 3, 1), added);
    if (sizes.queries <= kMostDecodeQueries && sizes.width <= kMostDecodeWidth)
      attend_decoding(context_, sizes, qkv.dtype(), part(qkv, 3, 0), keys, values, part(y, 1, 0));
    else
      attend_tiled(context_, sizes, qkv.dtype(), part(qkv, 3, 0), keys, values, part(y, 1, 0), nullptr, {});
  }

 private:
  static AttentionMask mask_of(const AttentionDropout& drop) {
    if (drop.p == 0) return {};
    return {.numbers = drop.state.data<std::int64_t>(),
            .layer = drop.layer,
            .threshold = dropout_threshold(drop.p),
            .scale = static_cast<float>(1.0 / (1.0 - drop.p))};
  }

  static void check(const Tensor& qkv, std::int64_t heads, std::initializer_list<const Tensor*> others) {
    LOCKSTEP_ASSERT(heads > 0 && qkv.size(2) % (3 * heads) == 0, "{} heads of {}", heads, to_string(qkv.shape()));
    for (const Tensor* const other : others)
      LOCKSTEP_ASSERT(other->dtype() == qkv.dtype() && other->size(0) == qkv.size(0), "{} and {}",
                      to_string(qkv.shape()), to_string(other->shape()));
  }

  static AttentionSizes sizes_of(const Tensor& qkv, std::int64_t heads) {
    return {.samples = qkv.size(0), .heads = heads, .width = qkv.size(2) / (3 * heads), .queries = qkv.size(1)};
  }

  // Part `which` of (samples, tokens, parts · heads · width).
  static HeadRows part(const Tensor& all, std::int64_t parts, std::int64_t which) {
    const std::int64_t row = all.size(2);
    return {static_cast<std::byte*>(all.raw()) + static_cast<std::size_t>(which * (row / parts)) * size_of(all.dtype()),
            all.size(1) * row, row};
  }

  Context& context_;
  FusedAttention fused_;
};

}  // namespace

std::unique_ptr<AttentionKernels> make_attention_kernels(Context& context) {
  return std::make_unique<CudaAttention>(context);
}

}  // namespace lockstep::nn::cuda
