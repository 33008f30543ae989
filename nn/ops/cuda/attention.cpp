#include "lockstep/nn/ops/attention.h"

#include <cstddef>
#include <initializer_list>

#include "base/error.h"
#include "nn/ops/cuda/attention_tiled.h"
#include "nn/ops/cuda/fused_attention.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"

namespace lockstep::nn::cuda {
namespace {

// In bf16 cuDNN's kernels, on matrix units; for what it has none for, and in f32, ours.
class CudaAttention final : public AttentionKernels {
 public:
  explicit CudaAttention(Context& context) : context_(context), fused_(context) {}

  // What cuDNN drops is not a function of the sample: with dropout the kernels are ours.
  void forward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
               const Tensor& log_sums) override {
    const OpProfileScope scope(context_, "attention", {&x.q, &x.k, &x.v, &y, &log_sums},
                               2.0 * static_cast<double>(y.count() * y.size(1)));
    check(heads, {&x.q, &x.k, &x.v, &y});
    if (y.count() == 0) return;
    if (options.dropout == 0 && fused_.forward(x, heads, options, y, log_sums)) {
      clear_padding_of({&y}, options);
      return;
    }
    attend_tiled(context_, sizes_of(x.q, heads, options), y.dtype(), rows_of(x.q), rows_of(x.k), rows_of(x.v),
                 rows_of(y), log_sums.f32(), dropout_of(options));
  }

  void backward(const AttentionInputs& x, std::int64_t heads, const AttentionOptions& options, const Tensor& y,
                const Tensor& log_sums, const Tensor& dy, const AttentionInputs& dx) override {
    const OpProfileScope scope(context_, "attention's backward",
                               {&x.q, &x.k, &x.v, &y, &log_sums, &dy, &dx.q, &dx.k, &dx.v},
                               5.0 * static_cast<double>(y.count() * y.size(1)));
    check(heads, {&x.q, &x.k, &x.v, &y, &dy, &dx.q, &dx.k, &dx.v});
    if (y.count() == 0) return;
    if (options.dropout == 0 && fused_.backward(x, heads, options, y, log_sums, dy, dx)) {
      clear_padding_of({&dx.q, &dx.k, &dx.v}, options);
      return;
    }
    const Tensor means = Tensor::empty(context_.allocator, log_sums.shape());
    differentiate_tiled(context_, sizes_of(x.q, heads, options), y.dtype(),
                        {.q = rows_of(x.q),
                         .k = rows_of(x.k),
                         .v = rows_of(x.v),
                         .y = rows_of(y),
                         .dy = rows_of(dy),
                         .log_sums = log_sums.f32(),
                         .means = means.f32(),
                         .dq = rows_of(dx.q),
                         .dk = rows_of(dx.k),
                         .dv = rows_of(dx.v)},
                        dropout_of(options));
  }

  void extend(const Tensor& qkv, std::int64_t heads, std::int64_t past, const Tensor& cache, const Tensor& y) override {
    const OpProfileScope scope(context_, "attention with a cache", {&qkv, &cache, &y});
    const AttentionInputs x(qkv);
    check(heads, {&x.q, &y});
    AttentionSizes sizes = sizes_of(x.q, heads, {});
    sizes.past = past;
    LOCKSTEP_ASSERT(past >= 0 && sizes.keys() <= cache.size(1), "{} tokens after {} in a cache for {}", sizes.queries,
                    past, cache.size(1));
    if (qkv.count() == 0) return;
    const std::int64_t model = y.size(2);
    const HeadRows keys = rows_of(cache.columns(0, model)), values = rows_of(cache.columns(model, 2 * model));
    HeadRows added = keys;
    added.data =
        static_cast<std::byte*>(keys.data) + static_cast<std::size_t>(past * keys.row_stride) * size_of(cache.dtype());
    copy_rows(context_, qkv.dtype(), sizes.samples, sizes.queries, cache.size(2), rows_of(x.k), added);
    if (sizes.queries <= kMostDecodeQueries && sizes.width <= kMostDecodeWidth)
      attend_decoding(context_, sizes, qkv.dtype(), rows_of(x.q), keys, values, rows_of(y));
    else
      attend_tiled(context_, sizes, qkv.dtype(), rows_of(x.q), keys, values, rows_of(y), nullptr, {});
  }

 private:
  static AttentionDropout dropout_of(const AttentionOptions& options) {
    if (options.dropout == 0) return {};
    return {.numbers = options.dropout_state.data<std::int64_t>(),
            .layer = options.layer,
            .threshold = dropout_threshold(options.dropout),
            .scale = static_cast<float>(1.0 / (1.0 - options.dropout))};
  }

  // cuDNN does not say what it leaves there.
  void clear_padding_of(std::initializer_list<const Tensor*> all, const AttentionOptions& options) {
    if (!options.lengths.defined()) return;
    for (const Tensor* const one : all)
      clear_padding(context_, one->dtype(), one->size(0), one->size(1), one->size(2),
                    options.lengths.data<std::int32_t>(), rows_of(*one));
  }

  // Of one shape and type.
  static void check(std::int64_t heads, std::initializer_list<const Tensor*> all) {
    const Tensor& first = **all.begin();
    LOCKSTEP_ASSERT(heads > 0 && first.size(2) % heads == 0, "{} heads of {}", heads, to_string(first.shape()));
    for (const Tensor* const other : all)
      LOCKSTEP_ASSERT(other->dtype() == first.dtype() && other->shape() == first.shape(), "{} and {}",
                      to_string(first.shape()), to_string(other->shape()));
  }

  static AttentionSizes sizes_of(const Tensor& q, std::int64_t heads, const AttentionOptions& options) {
    return {.samples = q.size(0),
            .heads = heads,
            .width = q.size(2) / heads,
            .queries = q.size(1),
            .causal = options.causal,
            .lengths = options.lengths.defined() ? options.lengths.data<std::int32_t>() : nullptr};
  }

  static HeadRows rows_of(const Tensor& all) { return {all.raw_rows(), all.size(1) * all.pitch(), all.pitch()}; }

  Context& context_;
  FusedAttention fused_;
};

}  // namespace

std::unique_ptr<AttentionKernels> make_attention_kernels(Context& context) {
  return std::make_unique<CudaAttention>(context);
}

}  // namespace lockstep::nn::cuda
